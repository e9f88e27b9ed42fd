"""The server under clients that mean it badly, or many at once; and that it starts and closes whole."""

import gc
import os
import socket
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack

import httpx
import pytest

from tests.invariants import check_cache

pytest.importorskip("fastapi")

from pensieve.core.request import Request
from pensieve.core.session import Session
from pensieve.errors import ConfigError, RequestFailed
from pensieve.serve.record import TurnRecord
from pensieve.serve.server import app, create_server
from pensieve.serve.server.api import Server, Stream, Turn
from pensieve.serve.server.app import ServeSettings
from pensieve.serve.server.conversations import Conversation, Mark
from pensieve.serve.server.replies import Reply
from pensieve.serve.tokenizer import ByteTokenizer
from pensieve.sim.worker import SimulatedWorker
from tests.baselines.systems import inline, threaded
from tests.server.live import SIMULATED, serving, simulated
from tests.server.test_http import ask
from tests.waiting import PATIENCE_S, Side, until

CASES = int(os.environ.get("PENSIEVE_SCHEMA_CASES", "8"))  # an operation; 800 are some 10,000 in all
KNOWN = {200, 400, 401, 403, 404, 405, 413, 415, 429}


@pytest.mark.slow
def test_no_request_that_the_document_allows_or_not_makes_the_server_fail():
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis

    with simulated(max_new_tokens=8) as (state, client):
        schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
        sent = []

        for result in schema.get_all_operations():
            operation = result.ok()

            @hypothesis.settings(
                max_examples=CASES,
                deadline=None,
                database=None,
                derandomize=CASES < 100,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy())
            def call(case):
                reply = case.call(base_url=str(client.base_url), timeout=PATIENCE_S)
                sent.append(reply.status_code)
                assert reply.status_code in KNOWN, (reply.status_code, reply.text, case.as_curl_command())

            call()
        assert len(sent) >= 5 * CASES
        assert sum(status == 200 for status in sent) > CASES, "some of it was served"
        assert until(lambda: state.server.under_way == 0)
        check_cache(state.server.system.engine.cache)
        assert client.get("/health").status_code == 200
    print(f"{len(sent)} requests, {sum(status == 200 for status in sent)} of them served")


def test_a_turn_that_ended_leaves_no_cycle():
    """What only the cycle collector frees piles up until its next full pass: minutes, in a process of this size."""
    with simulated() as (state, client):

        def talk():
            for stream in (False, True):
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": stream}
                client.post("/v1/chat/completions", json={**body, "session_id": f"s-{stream}"})
                assert client.delete(f"/v1/sessions/s-{stream}").status_code == 200
            assert len(list(state.server.stream("s", text="x", max_new_tokens=4))) >= 1
            state.server.forget("s")

        def held():
            assert until(lambda: state.server.under_way == 0)
            return Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), kinds))

        kinds = (Turn, TurnRecord, Conversation, Mark, Session, Reply, Stream, Future, Request)
        talk()
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(5):
                talk()
            more = held() - before
        finally:
            gc.enable()
        assert all(count < 5 for count in more.values()), more  # the last of what a thread or the loop did


def test_a_client_that_sends_its_body_and_leaves_is_not_served():
    with create_server(**SIMULATED) as server, serving(server) as (_, url):
        port = int(url.rpartition(":")[2])
        body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}'
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
        assert until(lambda: server.under_way == 0)
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            assert ask(client).status_code == 200


def test_a_server_that_is_told_to_stop_lets_replies_end():
    system, worker = threaded()
    worker.gate.clear()
    body = {"prompt": "x", "max_tokens": 4}
    with Server(system, ByteTokenizer()) as server, ExitStack() as stack:
        _, url = stack.enter_context(serving(server, drain_s=PATIENCE_S))
        asked = Side(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S))
        assert worker.entered.wait(PATIENCE_S)
        stopping = Side(stack.close)
        assert not stopping.ends_within(0.2), "it waits"
        worker.gate.set()
        assert asked.ended() and stopping.ended()
        assert asked.result.status_code == 200


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
        check_cache(server.system.engine.cache)


def test_a_taken_port_is_told_before_the_model_loads(monkeypatch):
    loaded = []
    monkeypatch.setattr(app, "server_of", lambda *given, **_: loaded.append(given))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} .*already in use.*serve\.port=8001"):
            app.serve({"model": {"name": "tiny"}, "serve": {"port": port}})
    assert loaded == []


def test_the_first_bytes_of_a_reply_wait_for_no_acknowledgement():
    """A socket that asyncio is given keeps small packets back, unless it was told not to."""
    with app.bind(ServeSettings(port=0)) as bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
