"""The wall clock's system: every call comes back, whatever the engine's thread is doing, has met or has ended with."""

from __future__ import annotations

import threading
import time

import pytest

from pensieve.core.engine import MemoryLimits
from pensieve.errors import WorkerError
from tests.baselines.systems import PATIENCE_S, Side, threaded
from tests.simulated import request


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
    until = time.monotonic() + PATIENCE_S
    while system._inbox.qsize() < commands:
        assert time.monotonic() < until
        time.sleep(0.001)


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


def test_poll_comes_back_when_the_system_is_closed(started):
    system, worker = started
    hold(system, worker)
    polling, closing = Side(system.poll, None), Side(system.close)
    wait_for_inbox(system, 1)
    worker.gate.set()
    assert closing.ended()
    assert polling.ended()
    if polling.error is None:  # what the held step still gave
        assert not any(event.turn for event in polling.result)
    with pytest.raises(WorkerError, match="closed"):
        system.poll(None)


def test_a_crash_ends_every_call_that_waits_for_the_engine(started):
    system, worker = started
    hold(system, worker)
    polling, forgetting = Side(system.poll, None), Side(system.forget, "a")
    wait_for_inbox(system, 1)
    worker.failure = RuntimeError("the device fell off the bus")
    worker.gate.set()
    for side in (polling, forgetting):
        assert side.ended()
    for side in (polling, forgetting, Side(system.forget, None), Side(system.poll, 1e6)):
        assert side.ended()
        assert isinstance(side.error, WorkerError)
        assert "fell off the bus" in str(side.error)
    assert worker.closed == 0
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


def test_who_asks_is_told_of_the_end_of_the_engine(started):
    system, worker = started
    worker.gate.clear()
    asking = Side(system.ask, request(1, "a", tokens=5, output=2))
    assert worker.entered.wait(PATIENCE_S)
    closing = Side(system.close)
    wait_for_inbox(system, 1)
    late = Side(system.ask, request(2, "b", tokens=5, output=2))  # the engine will never read it
    worker.gate.set()
    for side in (closing, asking, late, Side(system.ask, request(3, "c", tokens=5, output=2))):
        assert side.ended()
        assert side is closing or isinstance(side.error, WorkerError)


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
