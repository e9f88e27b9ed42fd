"""Our engine in a process of its own, with weights and KV that it shares with nobody: what an actor of Ray holds."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from time import perf_counter

from pensieve.core.request import Request
from pensieve.errors import RequestFailed, refused
from pensieve.plugins.engines.base import EngineSetup, Reply
from pensieve.plugins.engines.memory_watch import forbid_more
from pensieve.serve.record import TurnRecord


@dataclass(frozen=True, slots=True)
class Started:
    """pid: of the process. load_s: weights to memory, without imports. start_s: of the whole, imports included."""

    pid: int
    load_s: float
    start_s: float


class Replica:
    """The model, and KV for `kv_tokens`, under the engine, scheduler and kernels of baseline=gpu_only: what differs from
    sharing one engine is the process alone.

    memory_bytes: this process gets no more than that from the kernel. share_bytes: of that, what is meant for this process
    where others have the rest: whether weights are packed is decided as for an engine that has no more.
    """

    def __init__(
        self, setup: EngineSetup, kv_tokens: int, memory_bytes: int | None, share_bytes: int | None = None
    ) -> None:
        self._setup, self._kv_tokens = setup, kv_tokens
        self._memory_bytes = memory_bytes
        self._share_bytes = memory_bytes if share_bytes is None else share_bytes

    def pid(self) -> int:
        return os.getpid()

    def load(self) -> Started:
        """A call of its own, so that whoever watches its memory knows the process before. Raises MemoryError where
        memory_bytes is too little."""
        began = perf_counter()
        if self._memory_bytes is not None:
            forbid_more(self._memory_bytes)
        from pensieve.core.cache.two_tier import TwoTierCache
        from pensieve.core.clock import WallClock
        from pensieve.core.policies.lru import Lru
        from pensieve.core.scheduler.composition import SchedulerSettings
        from pensieve.device.asked import ModelAsked
        from pensieve.device.model import load_model
        from pensieve.device.options import TorchOptions
        from pensieve.device.worker import TorchWorker
        from pensieve.serve.systems.threaded_system import ThreadedSystem
        from pensieve.sim.profile import Profile
        from pensieve.specs import HardwareSpec
        from pensieve.units import ceil_div

        setup, size, share = self._setup, self._setup.block_tokens, self._share_bytes
        blocks = ceil_div(self._kv_tokens, size)
        beside_kv = None if share is None else share - blocks * size * setup.model.kv_bytes_per_token
        try:
            asked = ModelAsked(
                setup.model, setup.weights, setup.hub_id, setup.revision, setup.seed, setup.device, setup.threads,
                chunk_tokens=size, memory_bytes=beside_kv,
            )  # fmt: skip
            clock = WallClock()
            options = TorchOptions(max_batch_tokens=setup.batch_tokens, max_batch_requests=1)
            self._system = ThreadedSystem(
                model=setup.model,
                hardware=HardwareSpec(setup.device, simulated=False),
                worker=TorchWorker(load_model(asked), size, clock, options=options),
                clock=clock,
                cache=TwoTierCache,
                policy=Lru,
                scheduler=SchedulerSettings(max_batch_tokens=setup.batch_tokens, max_batch_requests=1),
                gpu_blocks=blocks,
                cpu_blocks=0,
                chunk_tokens=size,
                tokenizer=setup.tokenizer,
                seed=setup.seed,
                # Its policy goes by recency, so nothing is measured: a start is as short as it can be.
                costs=Profile(size, {size: 1.0}, 1.0, {"source": "none: all chunks cost alike"}),
            )
            report = self._system.start()
        except RuntimeError as error:  # torch has no error of its own for a CPU that refuses memory
            if "memory" in str(error):
                raise MemoryError(str(error)) from error
            raise
        self._offset_s = perf_counter() - clock.now_s()
        assert report.load_s is not None, "a process of its own shares no model"
        return Started(os.getpid(), report.load_s, perf_counter() - began)

    def answer(self, request: Request) -> Reply:
        """Raises RequestRefused, RequestFailed, and MemoryError where the kernel gives no more."""
        turn = self._system.ask(request)
        _raise_unserved(turn)
        return Reply(
            turn.finish_reason,
            tokens=turn.token_ids,
            emitted_s=array("d", (self._offset_s + at_s for at_s in turn.emitted_s)),
            cached_tokens=turn.gpu_hit_tokens,
            admitted_s=None if turn.admitted_s is None else self._offset_s + turn.admitted_s,
            compute_ms=turn.compute_ms,
        )

    def forget(self, session: str | None) -> None:
        self._system.forget(session)

    def close(self) -> None:
        self._system.close()


def _raise_unserved(turn: TurnRecord) -> None:
    if turn.status == "refused":
        raise refused(turn.finish_reason, turn.error or "The engine refused the request.")
    if turn.status != "completed":
        said = turn.error or f"The request ended as {turn.status}."
        if "memory" in said:
            raise MemoryError(said)
        raise RequestFailed(said)


def answer_once(
    setup: EngineSetup, kv_tokens: int, memory_bytes: int | None, share_bytes: int | None, request: Request
) -> tuple[Reply, Started]:
    """One request on a Replica that exists for it alone."""
    replica = Replica(setup, kv_tokens, memory_bytes, share_bytes)
    started = replica.load()
    try:
        return replica.answer(request), started
    finally:
        replica.close()
