"""Who polls sleeps until a request has ended, and loses nothing."""

from __future__ import annotations

import threading
import time

import pytest

from pensieve.core.request import Event
from pensieve.errors import WorkerError
from pensieve.serve.systems.base import Outbox, WallClock


def token(request_id: int) -> Event:
    return Event("token", request_id, 0.0, 7)


def finished(request_id: int) -> Event:
    return Event("finished", request_id, 0.0)


def test_tokens_wake_nobody_and_come_in_order_with_the_end_of_their_request():
    box = Outbox(WallClock(), lambda: None)
    box.expect(1)
    box.put([token(1)])
    box.put([token(1), token(2)])
    assert box._wakes.empty()
    box.put([token(2), finished(1)])
    assert box.poll(None) == [token(1), token(1), token(2), token(2), finished(1)]
    box.put([token(2)])
    began = time.monotonic()
    assert box.poll(WallClock().now_s()) == [token(2)] and time.monotonic() - began < 1.0  # due already: what there is
    assert box.poll(None) == []  # nobody is awaited


def test_a_poll_that_waits_is_woken_by_an_end_and_by_the_end_of_the_system():
    ended: list[WorkerError] = []
    box = Outbox(WallClock(), lambda: ended[0] if ended else None)
    box.expect(1)
    threading.Timer(0.05, lambda: box.put([token(1), finished(1)])).start()
    assert box.poll(None) == [token(1), finished(1)]
    box.expect(2)

    def end() -> None:
        box.put([token(2)])
        ended.append(WorkerError("gone"))
        box.put([])

    threading.Timer(0.05, end).start()
    assert box.poll(None) == [token(2)]  # what came before is told first
    with pytest.raises(WorkerError, match="gone"):
        box.poll(None)
