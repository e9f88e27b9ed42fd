"""The virtual clock's system: one call at a time has the engine, and time goes where something happens."""

from __future__ import annotations

import threading

from pensieve.core.engine import MemoryLimits
from pensieve.core.plan import StepResult
from pensieve.sim.worker import SimulatedWorker
from tests.baselines.systems import PATIENCE_S, Side, inline
from tests.calls import calls_of
from tests.simulated import request


def test_forget_waits_for_a_poll_that_runs_the_engine() -> None:
    gate, entered, happened = threading.Event(), threading.Event(), []

    class Held(SimulatedWorker):
        def collect(self, until_ns: int | None) -> StepResult | None:
            entered.set()
            assert gate.wait(PATIENCE_S)
            happened.append("step")
            return super().collect(until_ns)

    system = inline(Held)
    system.start()
    forget = system.engine.forget

    def tell(session: str | None) -> None:
        happened.append("forget")
        forget(session)

    system.engine.forget = tell  # type: ignore[method-assign]
    system.submit(request(1, "a", tokens=5, output=1))
    polling = Side(system.poll, None)
    assert entered.wait(PATIENCE_S)
    forgetting = Side(system.forget, None)
    assert not forgetting.ends_within(0.2)
    gate.set()
    assert polling.ended()
    assert forgetting.ended()
    assert happened == ["step", "forget"]
    assert polling.error is forgetting.error is None


def test_an_idle_system_stops_where_a_conversation_expires() -> None:
    """So that what is sampled as the clock moves shows the memory given back when it was."""
    system = inline(limits=MemoryLimits(ttl_s=5.0))
    system.start()
    system.submit(request(1, "a", tokens=40, output=2))
    ended_s = system.poll(None)[-1].at_s
    held: list[tuple[int, float]] = []
    system.clock.on_advance = lambda ns: held.append((ns, system.gauges()["gpu_blocks_used"][0]))  # type: ignore[attr-defined]
    assert system.poll(ended_s + 100) == []
    assert list(system.engine.cache.sessions) == []
    expiry_ns, end_ns = round(ended_s * 1e9) + 5 * 10**9, round((ended_s + 100) * 1e9)
    assert held == [(expiry_ns, 11), (end_ns, 0)], "blocks held until then"


def test_a_poll_costs_its_steps() -> None:
    """Not its steps times the tokens that they gave."""
    costs = []
    for output in (100, 1000):
        system = inline()
        system.start()
        system.submit(request(1, "a", tokens=5, output=output))
        costs.append(calls_of(lambda system=system: system.poll(None)))
    assert costs[1] < 11 * costs[0]
