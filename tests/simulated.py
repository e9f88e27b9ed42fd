"""A tiny model and machine without torch: the double under most tests."""

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import Engine, MemoryLimits
from pensieve.core.plan import Moved, StepResult
from pensieve.core.policies.base import PolicyContext
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Length, Request
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.core.session import Chunks, Session
from pensieve.plugins.overlap import strategies_of
from pensieve.serve.books.books import Books
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.inline_system import forward_for
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from pensieve.specs import HardwareSpec, ModelSpec
from tests.invariants import check_cache

MODEL = ModelSpec(
    name="toy",
    model_type="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=97,
    max_context=4096,
)
MACHINE = HardwareSpec(
    name="toy", simulated=True, device="sim", flops=1e10, memory_bw=1e9, h2d_bw=1e8, d2h_bw=1e8, step_overhead_s=1e-4
)


class TalkingEngine(Engine):
    """An engine that also takes messages alone."""

    def say(self, message: Request) -> None:
        """Submit it with a prompt of all that its conversation holds, and the message."""
        if self.counts_windows and self.scheduler.forward is not None:  # so that it has all that was said
            self.scheduler.forward.leave(list(self.scheduler.standing))
        held = self.cache.sessions.get(message.session)
        self.submit(message if held is None else replace(message, prompt=held.tokens + message.prompt))


class LateWorker(SimulatedWorker):
    """Its copies are reported late and out of step: in a random order, some steps after they were planned."""

    def __init__(self, *args: Any, rng: random.Random) -> None:
        super().__init__(*args)
        self._rng = rng
        self._held: list[Moved] = []

    def collect(self, until_ns: int | None) -> StepResult | None:
        result = super().collect(until_ns)
        if result is None and not self._held:
            return None
        self._held += result.moved if result else ()
        self._rng.shuffle(self._held)
        idle = result is None or result.step is None
        count = max(1, self._rng.randint(0, len(self._held))) if idle else self._rng.randint(0, len(self._held))
        moved, self._held = tuple(self._held[:count]), self._held[count:]
        return replace(result or StepResult(step=None), moved=moved)


def policy_context(chunk_tokens: int = 4, gpu_blocks: int = 16, cpu_blocks: int = 16) -> PolicyContext:
    return PolicyContext(chunk_tokens, gpu_blocks, cpu_blocks, lambda context: 1.0 + context / 8, 0.1, 0)


def make_engine(
    gpu_blocks: int = 16,
    cpu_blocks: int = 16,
    chunk_tokens: int = 4,
    cache: Callable[..., Any] = TwoTierCache,
    hardware: HardwareSpec = MACHINE,
    policy: Any = None,
    limits: MemoryLimits | None = None,
    late: random.Random | None = None,
    depth: int = 1,
    computes: bool = True,
    cost: Any = None,
    holding: bool = False,
    below_bw: float = 0.0,
    **settings: Any,
) -> TalkingEngine:
    """computes: plans are made as for a worker that reads tokens, one iteration each."""
    clock = VirtualClock()
    policy = (policy or RetentionValue)(policy_context(chunk_tokens, gpu_blocks, cpu_blocks))
    manager = cache(policy=policy, chunk_tokens=chunk_tokens, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
    made = (MODEL, hardware, clock, chunk_tokens, depth, below_bw)
    worker = SimulatedWorker(*made) if late is None else LateWorker(*made, rng=late)
    worker.computes = computes
    worker.start(gpu_blocks, manager.cpu_blocks)
    books, asked = Books(chunk_tokens, cost), SchedulerSettings(**settings)
    made_engine = TalkingEngine(
        cache=manager,
        settings=asked,
        worker=worker,
        clock=clock,
        max_context=MODEL.max_context,
        limits=limits,
        facts=books,
        strategies=strategies_of(asked, chunk_tokens, cost, forward_for(worker.computes, depth, MODEL)),
    )
    if holding:
        books.count_holding()
    return made_engine


def request(number: int, session: str, tokens: int, output: int, turn: int = 1, **fields: Any) -> Request:
    prompt = array("i", [(7 * number + i) % 90 for i in range(tokens)])
    return Request(id=number, session=session, turn=turn, prompt=prompt, output=Length(output), **fields)


def run(engine: Engine, until_idle: bool = True) -> dict[int, TurnRecord]:
    """Step until nobody waits, checking every invariant on the way; the finished turns by request id."""
    finished: dict[int, TurnRecord] = {}
    idle_steps = 0
    while engine.busy or idle_steps < 1:
        events = engine.step(None)
        check_cache(engine.cache)
        for event in events:
            if event.turn is not None:
                assert event.request_id not in finished, "a request finishes once"
                finished[event.request_id] = event.turn
        assert engine.progressed or events or not engine.busy, "jammed"
        idle_steps += not engine.busy
        if not until_idle and finished:
            break
    return finished


def with_chunks(session: Session, count: int) -> Session:
    """The session, with records of so many chunks without KV."""
    session.leaf.chunks = Chunks(count)
    return session
