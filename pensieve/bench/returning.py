"""A conversation whose KV is on CPU, and what its return costs: the whole engine, one request at a time."""

from __future__ import annotations

from array import array
from dataclasses import replace

from pensieve.baselines.profiling import load_s, profile_of
from pensieve.cache.base import PolicyContext
from pensieve.cache.restore import RestoreMode, Split
from pensieve.cache.two_tier import TwoTierCache
from pensieve.clock import WallClock
from pensieve.cost.profile import Profile
from pensieve.engine import Engine
from pensieve.errors import WorkerError
from pensieve.eviction.lru import Lru
from pensieve.record import TurnRecord
from pensieve.request import Length, Request
from pensieve.scheduler.composition import SchedulerSettings
from pensieve.units import ceil_div
from pensieve.worker.torch.link import Link
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.worker import TorchWorker

CHUNK = 32
_VOCAB = 250  # token ids that every model has


class Returning:
    """One conversation of `tokens` tokens, asked again and again with `new` other tokens after the same history.

    After every turn all of its KV is copied out, and its GPU blocks are given up, so that the next one finds it on CPU.
    link: what stands in for copy streams on a CPU.
    """

    def __init__(self, model: LoadedModel, tokens: int, new: int, batch_tokens: int, link: Link | None) -> None:
        self.tokens, self.new = tokens, new
        blocks = ceil_div(tokens + new + 2, CHUNK) + 2
        self.model, self.clock = model, WallClock()
        self.worker = TorchWorker(model, CHUNK, self.clock, link=link)
        self.worker.start(blocks, blocks)
        self._batch_tokens = batch_tokens
        context = PolicyContext(CHUNK, blocks, blocks, lambda length: 1.0, 0.0, 0)
        self.cache = TwoTierCache(policy=Lru(context), chunk_tokens=CHUNK, gpu_blocks=blocks, cpu_blocks=blocks)
        # Everything idle is copied out at once.
        settings = SchedulerSettings(max_batch_tokens=batch_tokens, swap_out_start=1.0, swap_out_stop=1.0)
        longest = model.spec.max_context
        self.engine = Engine(
            cache=self.cache, settings=settings, worker=self.worker, clock=self.clock, max_context=longest
        )
        self._turn = 0
        self._history = array("i", [3 + i * 7 % (_VOCAB - 3) for i in range(tokens)])

    @property
    def profile(self) -> Profile:
        """Of the machine and the link as it is, measured as a trial does; a hybrid restore decides by it."""
        blocks, settings = self.cache.gpu_blocks, {**self.worker.settings(), "bench": "returning"}
        longest = self.model.spec.max_context
        known = profile_of(self.worker, self.clock, CHUNK, blocks * CHUNK, longest, blocks, settings)
        return replace(known, load_chunk_s=load_s(self.worker, self.clock, blocks))

    def weigh(self) -> Profile:
        profile = self.profile
        self.cache.weigh(profile, self.model.spec.layers, self._batch_tokens)
        return profile

    def fill(self) -> None:
        """The first turn: computes the history and puts it on CPU."""
        self._ask(array("i"), 1)

    def ttft_ms(self, mode: RestoreMode) -> float:
        """One return, restored in this mode, until the first output token."""
        self.cache.restorer.mode = mode
        turn = self._ask(self._question(), 1)
        found, again = turn.cpu_hit_tokens or 0, turn.cpu_recomputed_tokens
        assert turn.history_tokens == found == self.tokens, "the history was not all on CPU"
        assert again == {"load": 0, "recompute": found}.get(mode, again)
        assert turn.ttft_ms is not None
        return turn.ttft_ms

    def hit_ms(self) -> float:
        """One return that finds everything on the GPU: what the new tokens cost by themselves."""
        self.cache.restorer.mode = "load"
        self._ask(self._question(), 1, leave=True)
        turn = self._ask(self._question(), 1)
        assert turn.ttft_ms is not None and turn.gpu_hit_tokens == self.tokens
        return turn.ttft_ms

    def split(self) -> Split:
        """What the cost model predicts for such a return, apart from what an engine costs anyway."""
        assert self.cache.restorer.times is not None
        on_cpu = [(start, min(start + CHUNK, self.tokens)) for start in range(0, self.tokens, CHUNK)]
        return self.cache.restorer.times.choose([(self.tokens, self.tokens + self.new)], on_cpu, 0)

    def close(self) -> None:
        self.worker.close()

    def _question(self) -> array[int]:
        self._turn += 1
        return array("i", [3 + (self._turn * 31 + i * 11) % (_VOCAB - 3) for i in range(self.new)])

    def _ask(self, question: array[int], output: int, leave: bool = False) -> TurnRecord:
        number = self._turn = self._turn + 1
        prompt = self._history + question
        request = Request(number, "returning", number, prompt, Length(output), continues=False)
        request.intended_s = self.clock.now_s()
        self.engine.submit(request)
        finished: TurnRecord | None = None
        while self.engine.busy or self.engine.progressed:
            for event in self.engine.step(None):
                finished = event.turn or finished
        assert finished is not None
        if finished.status != "completed":
            raise WorkerError(f"The conversation could not be served: {finished.error}")
        session = self.engine.cache.find("returning")
        assert session is not None
        self.cache.truncate(session, self.tokens)
        if not leave:
            self.cache.reclaim(self.cache.gpu_blocks, self.clock.now_s())
        return finished
