"""A server that cannot start leaves no engine behind, and close returns when the engine is closed."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("uvicorn")

from pensieve.errors import ConfigError, RequestFailed
from pensieve.serve.server import command
from pensieve.serve.server.api import Server
from pensieve.serve.server.app import ServeSettings
from pensieve.serve.tokenizer import ByteTokenizer
from pensieve.sim.worker import SimulatedWorker
from tests.baselines.systems import PATIENCE_S, Side, inline, threaded


def test_requests_under_way_fail_when_the_server_is_closed():
    system, worker = threaded()
    server = Server(system, ByteTokenizer())
    worker.gate.clear()
    asking = [Side(lambda name=name: server.generate(name, prompt_ids=[1, 2, 3], max_new_tokens=5)) for name in "ab"]
    assert worker.entered.wait(PATIENCE_S)
    closing = Side(server.close)
    worker.gate.set()
    assert closing.ended()
    assert all(side.ended() for side in asking)
    assert {type(side.error) for side in asking} <= {RequestFailed, type(None)}, "a turn that was done by then stands"
    with pytest.raises(RequestFailed, match="closed"):
        server.generate("c", prompt_ids=[1], max_new_tokens=1)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_a_crash_of_the_engine_fails_every_request_and_those_to_come(clock):
    class Worker(SimulatedWorker):
        def collect(self, until_ns):
            raise RuntimeError("the device fell off the bus")

    if clock == "wall":
        system, worker = threaded()
        worker.failure = RuntimeError("the device fell off the bus")
        server = Server(system, ByteTokenizer())
    else:
        server = Server(inline(Worker), ByteTokenizer())
    asking = [Side(lambda name=name: server.generate(name, prompt_ids=[1], max_new_tokens=2)) for name in "ab"]
    assert all(side.ended() for side in asking)
    for side in (*asking, Side(lambda: server.generate("c", prompt_ids=[1], max_new_tokens=2))):
        assert side.ended()
        assert isinstance(side.error, RequestFailed)
        assert "fell off the bus" in str(side.error)
    server.close()


def test_forget_beside_requests_keeps_the_engine_whole():
    """Conversations on a virtual clock that are forgotten while others are served."""
    with Server(inline(), ByteTokenizer()) as server:

        def talk(name):
            return sum(len(server.generate(name, prompt_ids=[1, 2, 3], max_new_tokens=5).token_ids) for _ in range(8))

        talking = [Side(talk, name) for name in "abcd"]
        for _ in range(20):
            server.forget()
        assert all(side.ended() for side in talking)
        assert [side.error for side in talking] == [None] * 4
        server.forget()
        assert list(server.system.engine.cache.sessions) == []
        server.system.engine.cache.check()


def test_a_taken_port_is_told_before_the_model_loads(monkeypatch):
    loaded = []
    monkeypatch.setattr(command, "server_of", lambda *given, **_: loaded.append(given))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} .*already in use.*serve\.port=8001"):
            command.serve({"model": {"name": "tiny"}, "serve": {"port": port}})
    assert loaded == []


def test_the_first_bytes_of_a_reply_wait_for_no_acknowledgement():
    """A socket that asyncio is given keeps small packets back, unless it was told not to."""
    with command.bind(ServeSettings(port=0)) as bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
