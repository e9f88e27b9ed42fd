"""What the systems of both clocks promise alike."""

from __future__ import annotations

import threading

import pytest

from pensieve.errors import WorkerError
from tests.baselines.systems import Side, inline, threaded
from tests.simulated import request


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
