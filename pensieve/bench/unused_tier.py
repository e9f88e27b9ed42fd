"""What a CPU tier costs where nothing is ever copied to it."""

from __future__ import annotations

from array import array
from time import perf_counter

from pensieve.cache.base import PolicyContext
from pensieve.cache.two_tier import TwoTierCache
from pensieve.clock import WallClock
from pensieve.engine import Engine
from pensieve.errors import WorkerError
from pensieve.eviction.retention_value import RetentionValue
from pensieve.record import Event
from pensieve.request import Length, Request
from pensieve.scheduler.composition import SchedulerSettings
from pensieve.units import ceil_div
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.worker import TorchWorker

_CHUNK = 32
_STEPS = 8


class UnusedTier:
    """A whole engine that decodes `requests` conversations over `context` tokens each, with a CPU tier as large as its GPU
    tier or without one. Two thirds of the GPU tier stay free, so that nothing is copied ahead of time either."""

    def __init__(self, model: LoadedModel, requests: int, context: int, with_tier: bool) -> None:
        blocks = 3 * requests * ceil_div(context + 512, _CHUNK)
        cpu_blocks = blocks if with_tier else 0
        clock = WallClock()
        self.worker = TorchWorker(model, _CHUNK, clock)
        self.worker.start(blocks, cpu_blocks)
        policy = RetentionValue(PolicyContext(_CHUNK, blocks, cpu_blocks, lambda length: 1.0, 0.0, 0))
        cache = TwoTierCache(policy=policy, chunk_tokens=_CHUNK, gpu_blocks=blocks, cpu_blocks=cpu_blocks)
        settings = SchedulerSettings(max_batch_tokens=max(512, requests), max_batch_requests=requests)
        self.engine = Engine(
            cache=cache, settings=settings, worker=self.worker, clock=clock, max_context=model.spec.max_context
        )
        for number in range(requests):
            prompt = array("i", [3 + (number * 13 + i * 7) % 240 for i in range(context)])
            self.engine.submit(Request(number, f"conversation {number}", 1, prompt, Length(500)))
        decoding = 0
        while decoding < requests:  # all prompts are computed
            decoding += sum(event.kind == "first_token" for event in self._step())

    def step_ms(self) -> float:
        """Milliseconds a decode step of all conversations, over a few of them."""
        began = perf_counter()
        for _ in range(_STEPS):
            self._step()
        took = (perf_counter() - began) * 1e3 / _STEPS
        assert not self.engine.counters.h2d_bytes + self.engine.counters.d2h_bytes, "the tier was used"
        return took

    def close(self) -> None:
        self.worker.close()

    def _step(self) -> list[Event]:
        events = self.engine.step(None)
        for event in events:
            if event.turn is not None:
                raise WorkerError(f"A conversation ended while it was measured: {event.turn.error or 'it was over.'}")
        return events
