"""The proxy passes on every byte as it is, and tells what went by; the recorder makes rows of that."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest

from pensieve.lab.commands.record.proxy import Client, Proxy
from pensieve.lab.traffic.openai import Recorded
from pensieve.lab.traffic.table import Salt
from tests.waiting import until

ASK = b"POST /v1/completions HTTP/1.1\r\nHOST: here\r\nX-Odd:  kept \r\nContent-Length: 14\r\n\r\n" + b'{"prompt":"x"}'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"hi"}]}\n\n'
ANSWERS = {
    "chunked, extensions, a trailer": (CHUNKED + b"2d;a=b\r\n" + EVENT + b"\r\n0\r\nX-End: 1\r\n\r\n", "completed"),
    "a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "completed"),
    "to the end": (b"HTTP/1.1 200 OK\r\n\r\n{}", "completed"),
    "continue first": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "completed"),
    "an error": (b"HTTP/1.1 429 Slow Down\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\n{}", "failed"),
    "cut off": (CHUNKED + b"2d\r\ndata: {", "failed"),
    "nothing": (b"", "failed"),
    "no HTTP": (b"220 smtp.example.org\r\n", "failed"),
    "no end of a head": (b"x" * 300_000, "failed"),
}


@contextmanager
def looping(start):
    """What the coroutine start() gives, in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)


def port_of(server):
    return server.sockets[0].getsockname()[1]


@contextmanager
def pair(answer):
    """An upstream that answers a connection once with these bytes and closes it, a proxy before it, what the upstream got and
    what was told."""
    got, told = [], []

    async def handle(reader, writer):
        data = b""
        while not data.endswith(b'"x"}') and not data.endswith(b"true}"):
            piece = await reader.read(65536)
            if not piece:
                break
            data += piece
        got.append(data)
        step = 7 + len(answer) // 100
        for place in range(0, len(answer), step):
            writer.write(answer[place : place + step])
            await writer.drain()
            await asyncio.sleep(0)
        if b"hold" in data:
            got.append(await reader.read())  # until the client leaves
        writer.close()

    def tell(kind, *what):
        told.append((kind, *what))
        return True

    async def both():
        up = port_of(await asyncio.start_server(handle, "127.0.0.1", 0))
        return up, port_of(await Proxy(urlsplit(f"http://127.0.0.1:{up}"), tell).serve("127.0.0.1", 0))

    with looping(both) as (up, port):
        yield up, port, got, told


def asked(port, data, pieces=1):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        for place in range(pieces):
            one.sendall(data[len(data) * place // pieces : len(data) * (place + 1) // pieces])
            time.sleep(0.002 if pieces > 1 else 0)
        found = b""
        while piece := one.recv(65536):
            found += piece
    return found


@pytest.mark.parametrize("pieces", [1, 40])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_byte_is_passed_on(name, pieces):
    answer, status = ANSWERS[name]
    with pair(answer) as (up, port, got, told):
        assert asked(port, ASK, pieces) == asked(up, ASK) == answer
        assert until(lambda: len(got) == 2)
        assert got[0] == got[1].replace(b"HOST: here", b"Host: 127.0.0.1:%d" % up)
        assert until(lambda: told and told[-1][0] == "reply")
    assert told[0][:2] == ("ask", 0) and told[0][-1] == b'{"prompt":"x"}'
    assert [what[-2] for what in told if what[0] == "reply"] == [status]
    if "chunked" in name:
        assert told[-1][2] == EVENT


def test_a_client_that_leaves_is_a_cancel_for_the_upstream():
    with pair(CHUNKED + b"2d\r\n" + EVENT) as (_, port, got, told):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
            one.sendall(ASK.replace(b"here", b"hold").replace(b"X-Odd", b"hold"))
            found = b""
            while EVENT not in found:
                found += one.recv(65536)
        assert until(lambda: len(got) == 2)
        assert until(lambda: told[-1][0] == "reply")
    assert told[-1][-2] == "cancelled" and told[-1][2].startswith(b"data")


def test_an_upstream_that_is_not_there_is_a_502_in_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    proxy = Proxy(urlsplit(f"http://127.0.0.1:{free}"), lambda *_: True)
    with looping(lambda: proxy.serve("127.0.0.1", 0)) as server:
        found = asked(port_of(server), ASK)
    assert found.startswith(b"HTTP/1.1 502") and b"cannot be reached" in found


def test_it_is_known_when_each_piece_of_a_reply_came_though_all_are_read_at_its_end(monkeypatch):
    told, clock = [], iter(range(100))
    monkeypatch.setattr("pensieve.lab.commands.record.proxy.monotonic", lambda: next(clock))
    client = Client(Proxy(urlsplit("http://x"), lambda *what: told.append(what) or True))
    client.transport = Mock()
    for kind, raw, body in client._asked.feed(ASK):
        client._ask(kind, raw, body, 0.0)
    for piece in (CHUNKED, b"5\r\nfirst\r\n", b"6\r\nsecond\r\n0\r\n", b"\r\n"):
        client.answer(piece)
    [(_, _, body, marks, _, status, at_s)] = [what for what in told if what[0] == "reply"]
    assert (body, status) == (b"firstsecond", "completed")
    assert marks == [(1, 5), (2, 11)] and at_s == 3


# -- what is said in requests and replies -------------------------------------------------------------------------------

USER = {"role": "user", "content": "What is it? " * 8}
TOOL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def events(*deltas, **more):
    lines = [{"choices": [{"index": 0, "delta": one}]} for one in deltas]
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in [*lines, {"choices": [], **more}])


USAGE = {"prompt_tokens": 30, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}}
SAID = {
    "text": (events({"role": "assistant", "content": ""}, {"content": "It is "}, {"content": "that. " * 12}, usage=USAGE),
             {"role": "assistant", "content": "It is " + "that. " * 12}),
    "thought": (events({"reasoning_content": "hm " * 20, "reasoning": "hm " * 20, "content": "so"}, usage=USAGE),
                {"role": "assistant", "reasoning_content": "hm " * 20, "content": "so"}),
    "tool": (events({"content": "I look " * 10},
                    {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": ""}}]},
                    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
                    {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, usage=USAGE),
             {"role": "assistant", "content": "I look " * 10, "tool_calls": [TOOL]}),
    "parts": (events({"content": "a" * 70}, usage=USAGE),
              {"role": "assistant", "content": [{"type": "text", "text": "a" * 70}]}),
}  # fmt: skip


@pytest.mark.parametrize("cut", [1, 50, 10**6])
@pytest.mark.parametrize("name", SAID)
def test_the_next_prompt_holds_the_reply_block_for_block(name, cut):
    data, message = SAID[name]
    recorded = Recorded(Salt(), 16)
    reply = recorded.asked(0, 1.0, {}, json.dumps({"messages": [USER]}).encode())
    for place in range(0, len(data), cut):
        reply.part(data[place : place + cut], [(2.0, 0), (3.0, len(data))], streamed=True)
    row = reply.end("completed", 4.0, streamed=True)
    body = {"messages": [USER, message, {"role": "user", "content": "and?"}]}
    after = recorded.asked(1, 5.0, {}, json.dumps(body).encode()).row
    whole = list(row.blocks) + list(row.output_blocks)
    assert len(row.output_blocks) >= 3 and list(after.blocks[: len(whole)]) == whole
    assert (row.prompt_tokens, row.output_tokens, row.cached_tokens, row.first_token_s) == (30, 9, 16, 3.0)


def test_who_named_the_session_is_told_and_its_name_is_not():
    key = {"authorization": "Bearer key"}
    for headers, body, source in (
        ({"x-session-id": "s"}, {"user": "s"}, "header"),
        ({}, {"user": "u", "prompt_cache_key": "s"}, "prompt_cache_key"),
        (key, {}, None),
    ):
        row = Recorded(Salt(), 16).asked(0, 0.0, headers, json.dumps({"prompt": "x", **body}).encode()).row
        assert row.session_from == source and (row.session is None) == (source is None)
        assert row.session != "s" and (row.tenant is None) == (headers is not key) and row.tenant != "key"


def test_a_response_goes_on_from_the_one_that_it_names():
    recorded = Recorded(Salt(), 16)
    first = recorded.asked(0, 0.0, {}, b'{"input": "hi"}')
    said = {"object": "response", "id": "r1", "usage": {"input_tokens": 20, "output_tokens": 4},
            "output": [{"role": "assistant", "content": [{"type": "output_text", "text": "ho"}]}]}  # fmt: skip
    first.part(json.dumps(said).encode(), [], streamed=False)
    row = first.end("completed", 1.0, streamed=False)
    then = recorded.asked(1, 2.0, {}, b'{"input": "more", "previous_response_id": "r1"}').row
    assert (then.parent, then.kept_tokens, then.session) == (0, 24, row.session)
