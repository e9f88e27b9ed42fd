"""The server under clients that mean it badly, or many at once."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack

import httpx
import pytest

pytest.importorskip("fastapi")

from pensieve.core.request import Request
from pensieve.core.session import Session
from pensieve.serve.record import TurnRecord
from pensieve.serve.server import create_server
from pensieve.serve.server.api import Server, Stream, Turn
from pensieve.serve.server.conversations import Conversation, Mark
from pensieve.serve.server.replies import Feed
from pensieve.serve.tokenizer import ByteTokenizer
from tests.baselines.systems import Side, threaded
from tests.server.live import PATIENCE_S, SIMULATED, serving, simulated, until
from tests.server.test_http import ask

CASES = int(os.environ.get("PENSIEVE_SCHEMA_CASES", "8"))  # an operation; 800 are some 10,000 in all
HANG_UPS = int(os.environ.get("PENSIEVE_HANG_UPS", "150"))
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
        state.server.system.engine.cache.check()
        assert client.get("/health").status_code == 200
    print(f"{len(sent)} requests, {sum(status == 200 for status in sent)} of them served")


@pytest.mark.slow
def test_clients_that_hang_up_in_mid_stream_leave_nothing():
    system, _ = threaded()
    with Server(system, ByteTokenizer()) as server, serving(server) as (_, url):

        async def hang_up(client, number):
            body = {"messages": [{"role": "user", "content": f"number {number}"}], "stream": True, "max_tokens": 1500}
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
                async for _ in reply.aiter_bytes():
                    return

        async def everybody():
            async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=16)) as client:
                for first in range(0, HANG_UPS, 10):
                    await asyncio.gather(*(hang_up(client, number) for number in range(first, first + 10)))

        asyncio.run(everybody())
        assert until(lambda: server.under_way == 0)
        assert all(one.idle for one in server.conversations)
        server.forget()
        assert len(server.conversations) == 0
        assert until(lambda: list(system.engine.cache.sessions) == [])
        system.engine.cache.check()
        assert system.engine.cache.gpu_blocks_used == 0
        assert not system._listeners


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

        kinds = (Turn, TurnRecord, Conversation, Mark, Session, Feed, Stream, Future, Request)
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
