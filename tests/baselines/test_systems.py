"""In-engine systems on either clock: what both promise, and that every call comes back, whatever the engine is doing, has met
or has ended with."""

import threading
import time
from functools import partial

import pytest

from pensieve.core.engine import MemoryLimits
from pensieve.core.plan import StepResult
from pensieve.core.request import Event
from pensieve.errors import WorkerError
from pensieve.serve.systems.base import Outbox, WallClock
from pensieve.sim.worker import SimulatedWorker
from tests.baselines.systems import inline, threaded
from tests.crossings import calls_of
from tests.simulated import request
from tests.waiting import PATIENCE_S, Side, until

# -- both -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["wall", "virtual"])
def made(request):
    return (lambda **changed: threaded(**changed)[0]) if request.param == "wall" else inline


@pytest.mark.parametrize("part", ["gpu_blocks", "cache", "policy"])
def test_a_failed_start_leaves_nothing_behind(made, part, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no")

    before = threading.active_count()
    system, closed = made(**{part: refuse}), []
    monkeypatch.setattr(system._worker, "close", lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="no"):
        system.start()
    assert closed == [True]
    assert threading.active_count() == before
    system.close()


def test_who_asks_gets_the_answer_and_poll_tells_only_of_what_was_submitted(made):
    """Several at once, and a request that can never be served."""
    system = made()
    system.start()
    system.submit(request(1, "a", tokens=5, output=3))
    asking = [Side(system.ask, request(number, f"b{number}", tokens=5, output=20)) for number in (2, 3, 4)]
    assert all(side.ended() for side in asking)
    assert [(side.result.request_id, side.result.status) for side in asking] == [(n, "completed") for n in (2, 3, 4)]
    assert system.ask(request(5, "c", tokens=5000, output=1)).status == "refused"
    events = []
    while not any(event.turn for event in events):
        events += system.poll(None)
    assert [event.request_id for event in events] == [1] * 4
    assert system.poll(None) == []
    system.close()
    with pytest.raises(WorkerError, match="closed"):
        system.ask(request(6, "a", tokens=1, output=1))


# -- on the wall clock -----------------------------------------------------------------------------------------------------


def test_tokens_wake_nobody_and_come_in_order_with_the_end_of_their_request():
    box, clock = Outbox(WallClock(), lambda: None), WallClock()
    token, finished = partial(Event, "token", at_s=0.0, token=7), partial(Event, "finished", at_s=0.0)
    box.expect(1)
    box.put([token(1)])
    box.put([token(1), token(2)])
    assert box._wakes.empty()
    box.put([token(2), finished(1)])
    assert box.poll(None) == [token(1), token(1), token(2), token(2), finished(1)]
    box.put([token(2)])
    began = time.monotonic()
    assert box.poll(clock.now_s()) == [token(2)] and time.monotonic() - began < 1.0  # due already: what there is
    assert box.poll(None) == []  # nobody is awaited


@pytest.fixture
def started():
    system, worker = threaded()
    system.start()
    return system, worker


def hold(system, worker):
    """Submit a request, and keep the engine's thread in its first step."""
    worker.gate.clear()
    worker.entered.clear()
    system.submit(request(1, "a", tokens=5, output=2))
    assert worker.entered.wait(PATIENCE_S)


def wait_for_inbox(system, commands):
    assert until(lambda: system._inbox.qsize() >= commands)


def test_forget_is_carried_out_and_behind_close_comes_back(started):
    system, worker = started
    system.submit(request(9, "a", tokens=5, output=2))
    assert any(event.turn for event in system.poll(None))
    system.forget("a")
    assert list(system.engine.cache.sessions) == []
    hold(system, worker)
    closing = Side(system.close)
    wait_for_inbox(system, 1)
    forgetting = Side(system.forget, None)
    wait_for_inbox(system, 2)  # the engine will never read it
    worker.gate.set()
    assert closing.ended()
    assert forgetting.ended()
    assert closing.error is forgetting.error is None
    assert worker.closed == 1, "in the thread that drove it, and not once more"
    system.close()
    assert Side(system.forget, None).ended(), "also when the engine is gone already"


def test_an_idle_system_has_nothing_to_wait_for(started):
    system, worker = started
    for number in (1, 2):
        polling = Side(system.poll, None)
        assert polling.ended()
        assert polling.result == [], "no request is under way"
        system.submit(request(number, "a", tokens=5, output=2, turn=number))
        assert [event.turn.status for event in system.poll(None) if event.turn] == ["completed"]
    system.submit(request(3, "b", tokens=5000, output=2))
    assert [event.turn.status for event in system.poll(None) if event.turn] == ["refused"]
    assert Side(system.poll, None).ended()
    hold(system, worker)
    polling = Side(system.poll, None)
    worker.gate.set()
    assert polling.ended()
    assert any(event.turn for event in polling.result), "with one under way it waits for its end"
    system.close()


@pytest.mark.parametrize("why", ["closed", "fell off the bus"])
def test_the_end_of_the_engine_ends_every_call_that_waits_for_it(started, why):
    """Those that it knows of, those that it will never read, and those that come later."""
    system, worker = started
    hold(system, worker)
    polling, asking = Side(system.poll, None), Side(system.ask, request(2, "b", tokens=5, output=2))
    wait_for_inbox(system, 1)
    if why == "closed":
        closing = Side(system.close)
        wait_for_inbox(system, 2)
    else:
        worker.failure = RuntimeError(f"the device {why}")
        closing = Side(system.forget, "a")
        wait_for_inbox(system, 2)
    late = Side(system.ask, request(3, "c", tokens=5, output=2))
    wait_for_inbox(system, 3)
    worker.gate.set()
    for side in (polling, closing, asking, late):
        assert side.ended()
    later = [Side(system.ask, request(4, "d", tokens=5, output=2)), Side(system.poll, None), Side(system.poll, 1e6)]
    failed = [asking, late, *later]
    if why == "closed":
        assert closing.error is None
        assert polling.error or not any(event.turn for event in polling.result), "what the held step still gave"
    else:
        failed += [polling, closing, Side(system.forget, None)]
        assert worker.closed == 0
    for side in failed:
        assert side.ended() and isinstance(side.error, WorkerError) and why in str(side.error)
    system.close()
    assert worker.closed == 1


def test_an_idle_engine_wakes_to_forget_and_sleeps_again():
    """Two conversations, both idle for longer than they may be; nobody calls anything meanwhile."""
    system, _ = threaded(limits=MemoryLimits(ttl_s=0.3))
    system.start()
    engine, forgotten, steps = system.engine, threading.Event(), []
    for number, name in enumerate("ab", start=1):
        system.submit(request(number, name, tokens=5, output=2))
        assert any(event.turn for event in system.poll(None))
    forget, step = engine.cache.forget, engine.step

    def forget_and_tell(session):
        forget(session)
        if not engine.cache.sessions:
            forgotten.set()

    def count(until_ns):
        steps.append(until_ns)
        return step(until_ns)

    engine.cache.forget = forget_and_tell
    engine.step = count
    assert forgotten.wait(PATIENCE_S)
    assert engine.facts.counts.forgotten_sessions == 2
    system.forget(None)  # it sleeps until it is told
    assert len(steps) < 12, "it woke for its conversations and no more often"
    system.close()


@pytest.mark.parametrize("begun", [False, True], ids=["submitted", "begun"])
@pytest.mark.parametrize(
    "part", ["pensieve.core.engine.ActiveRequest.arrive", "pensieve.core.scheduler.scheduler.Scheduler.submit"]
)
def test_a_request_that_the_engine_cannot_take_fails_alone(started, monkeypatch, begun, part):
    system, _ = started
    assert system.ask(request(1, "known", tokens=5, output=2)).status == "completed"

    def fails(*_):
        raise ValueError("no such thing")

    for session in ("known", "new"):
        with monkeypatch.context() as patched:
            patched.setattr(part, fails)
            asked = request(2, session, tokens=5, output=2, turn=2)
            if begun:
                turn = system.ask(asked)
            else:
                system.submit(asked)
                (turn,) = (event.turn for event in system.poll(None) if event.turn)
        assert turn.status == "failed" and "no such thing" in turn.error
    assert list(system.engine.cache.sessions) == ["known"] and not system.engine.busy
    assert system.ask(request(3, "known", tokens=5, output=2, turn=2)).status == "completed"
    monkeypatch.setattr(system.engine, "forget", fails)
    with pytest.raises(WorkerError, match="no such thing"):
        system.forget(None)
    system.release("known")
    assert system.ask(request(4, "known", tokens=5, output=2, turn=3)).status == "completed"
    system.close()


# -- on the virtual clock --------------------------------------------------------------------------------------------------


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
