"""A server that cannot start leaves no engine behind, and close returns when the engine is closed."""

from __future__ import annotations

import threading

import pytest

from pensieve.server.api import Server
from pensieve.tokenizer import ByteTokenizer
from pensieve.worker.simulated import SimulatedWorker
from tests.baselines.systems import PATIENCE_S, Side, inline


def test_a_server_without_a_thread_closes_its_system(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Worker(SimulatedWorker):
        def close(self) -> None:
            closed.append(True)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        Server(inline(Worker), ByteTokenizer())
    assert closed


def test_whoever_closes_second_waits_for_the_first() -> None:
    gate, closing = threading.Event(), threading.Event()

    class Worker(SimulatedWorker):
        def close(self) -> None:
            closing.set()
            assert gate.wait(PATIENCE_S)

    server = Server(inline(Worker), ByteTokenizer())
    first = Side(server.close)
    assert closing.wait(PATIENCE_S)
    second = Side(server.close)
    assert not second.ends_within(0.2)
    gate.set()
    assert first.ended()
    assert second.ended()


def test_forget_beside_requests_keeps_the_engine_whole() -> None:
    """Conversations on a virtual clock that are forgotten while others are served."""
    with Server(inline(), ByteTokenizer()) as server:

        def talk(name: str) -> int:
            return sum(len(server.generate(name, prompt_ids=[1, 2, 3], max_new_tokens=5).token_ids) for _ in range(8))

        talking = [Side(talk, name) for name in "abcd"]
        for _ in range(20):
            server.forget()
        assert all(side.ended() for side in talking)
        assert [side.error for side in talking] == [None] * 4
        server.forget()
        assert server._system.engine.cache.names() == []  # type: ignore[attr-defined]
        server._system.engine.cache.check()  # type: ignore[attr-defined]
