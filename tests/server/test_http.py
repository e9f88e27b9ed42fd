"""The server over HTTP on a simulated machine: who may see what, how much is too much, and what is no request at all."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import pytest

from tests.invariants import check_cache

pytest.importorskip("fastapi")
from fastapi.exceptions import RequestValidationError

from pensieve.errors import ConfigError
from pensieve.serve.server import create_server
from pensieve.serve.server.api import Server
from pensieve.serve.server.gate import tenants_of
from pensieve.serve.tokenizer import ByteTokenizer
from tests.baselines.systems import threaded
from tests.server.live import SIMULATED, serving, simulated
from tests.waiting import PATIENCE_S, Side, until

KEYS = {"key-of-alice": "alice", "key-of-bob": "bob", "key-of-operator": "operator"}
ALICE, BOB, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in KEYS)


def ask(client, text="Hello", headers=None, **fields):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def client():
    with simulated() as (_, client):
        yield client


def said_by_a_user(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


def said(**fields):
    return json.dumps({"input": "x", "max_output_tokens": 1, **fields}).encode()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat/completions", b"", "required"),
        ("chat/completions", b"{", "no JSON"),
        ("chat/completions", said_by_a_user().replace(b"x", b"\\ud800"), "no JSON"),
        ("chat/completions", said_by_a_user(temperature=float("nan")), "no JSON"),
        ("chat/completions", b"[" * 100_000, "no JSON"),
        ("chat/completions", b"null", "dictionary"),
        ("chat/completions", b'{"messages": []}', "messages: List should have at least 1"),
        ("chat/completions", b'{"messages": [{"role": "king", "content": "x"}]}', "messages.0.role: Input should be"),
        ("chat/completions", said_by_a_user(max_tokens=2_000_000), "context"),
        ("responses", said(metadata={"a": float("nan")}), "no JSON"),  # told again, which no JSON could
        ("responses", said(tool_choice=[float("inf")]), "no JSON"),
        ("responses", said(tools=[{"type": "function", "a": "1e999"}]).replace(b'"1e999"', b"1e999"), "finite"),
        ("responses", said(metadata={"stop_reason": "length"}), "stop_reason"),
        ("responses", said(metadata={"expected_s": "soon"}), "expected_s"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_makes_no_sense_is_a_400_that_says_so(client, path, body, says, stream):
    if stream and body[:2] == b'{"':
        body = b'{"stream": true, ' + body[1:]
    reply = client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert says in (message := reply.json()["error"]["message"]), message
    assert message and "king" not in message, "what was sent is not told of"


NULLS = [None] * 50_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/completions", {"prompt": NULLS}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": NULLS}]}),
        ("v1/responses", {"input": NULLS}),
        ("tokenize", {"messages": NULLS}),
    ],
)
def test_what_is_wrong_in_a_long_body_is_found_once(path, body, client, monkeypatch):
    """An error an item takes gigabytes, and minutes in which nobody is served."""
    found, errors = [], RequestValidationError.errors
    monkeypatch.setattr(RequestValidationError, "errors", lambda self: found.append(errors(self)) or found[-1])
    assert client.post(f"/{path}", json=body).status_code == 400
    assert all(len(one) <= 5 for one in found)


@pytest.mark.parametrize("name", [" ", "a ", "a\nb", "a\x00", "\x85", "a\u2028b", "..", "a/./b", "x" * 257])
def test_a_session_that_nobody_could_find_again_is_refused_before_its_turn(client, name):
    """Its name would break the reply's header, or be another one in a path."""
    known, fields = client.get("/v1/sessions").json(), {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for path in ("chat/completions", "completions"):
        assert client.post(f"/v1/{path}", json={**fields, "session_id": name}).status_code == 400
        if name == name.strip() and name.isascii() and name.isprintable():  # else no client sends such a header
            assert client.post(f"/v1/{path}", json=fields, headers={"X-Session-Id": name}).status_code == 400
    assert client.get("/v1/sessions").json() == known
    if name.strip(".") and "\n" not in name and "/" not in name:  # or it is another path
        assert client.delete(f"/v1/sessions/{quote(name, safe='')}").status_code == 400


def test_unicode_ids_and_odd_texts_are_served(client):
    for name in ("ж", "a/b c?d", "👩\u200d🚀" * 10, "~"):
        assert ask(client, text="\u0000\u202e" * 20, session_id=name).json()["session_id"] == name
        path = f"/v1/sessions/{quote(name, safe='')}"
        assert client.get(path).json()["id"] == name
        assert client.delete(path).json()["deleted"]
        assert client.get(path).status_code == 404


def test_a_session_tells_each_turn_and_where_its_kv_is(client):
    first = ask(client, "x" * 70, session_id="told").json()["usage"]
    messages = [{"role": "user", "content": "x" * 70}]
    assert client.post("/tokenize", json={"messages": messages}).json()["count"] == first["prompt_tokens"]
    assert client.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"] == list(b"Hello")
    second = ask(client, "y", session_id="told").json()["usage"]
    told = client.get("/v1/sessions/told").json()
    assert [turn["prompt_tokens"] for turn in told["statistics"]] == [first["prompt_tokens"], second["prompt_tokens"]]
    assert told["statistics"][1]["prompt_tokens_details"] == second["prompt_tokens_details"]
    assert told["tokens"] == second["total_tokens"]
    assert told["kv"].startswith("GG") and len(told["kv"]) == -(-told["tokens"] // told["chunk_tokens"])
    assert "told" in [one["id"] for one in client.get("/v1/sessions").json()["data"]]


def test_metrics_count_turns_and_where_prompts_were_found():
    with simulated() as (_, client):
        usages = [ask(client, session_id="m").json()["usage"] for _ in range(3)]
        lines = client.get("/metrics").text.splitlines()
        told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(told['pensieve_requests_total{status="completed"}']) == 3
        assert float(told["pensieve_ttft_seconds_count"]) == 3
        assert float(told["pensieve_itl_seconds_count"]) == sum(usage["completion_tokens"] - 1 for usage in usages)
        for place in ("gpu", "cpu", "recomputed", "new"):
            counted = float(told[f'pensieve_prompt_tokens_total{{found="{place}"}}'])
            assert counted == sum(usage["prompt_tokens_details"][place] for usage in usages)
        assert float(told["pensieve_sessions"]) == 1
        assert float(told["pensieve_gpu_blocks_used"]) > 0


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/a", "/metrics"])
def test_an_engine_that_is_slow_to_tell_what_it_holds_holds_up_nobody_else(path, monkeypatch):
    """As replicas are, which are asked over the network."""
    with simulated() as (state, client):
        assert ask(client, session_id="a").status_code == 200
        asked, others_are_served = threading.Event(), threading.Event()

        def slowly(real):
            def told(*arguments):
                asked.set()
                assert others_are_served.wait(PATIENCE_S)
                return real(*arguments)

            return told

        assert state.server is not None
        system = state.server.system
        for name in ("places", "gauges"):
            monkeypatch.setattr(system, name, slowly(getattr(system, name)))
        looking = Side(client.get, path)
        assert asked.wait(PATIENCE_S)
        try:
            assert client.get("/health", timeout=PATIENCE_S / 2).status_code == 200
        finally:
            others_are_served.set()
        assert looking.ended() and looking.result.status_code == 200


def test_tenants_see_nothing_of_each_other():
    with simulated(KEYS) as (_, client):
        assert ask(client).status_code == 401
        assert ask(client, headers={"Authorization": "Bearer key-of-mallory"}).status_code == 401
        assert client.get("/v1/sessions").status_code == 401
        text = "a prompt that both of them send, long enough for two chunks of thirty-two tokens"
        alice = ask(client, text, ALICE, session_id="same")
        bob = ask(client, text, BOB, session_id="same")
        for reply in (alice, bob):
            details = reply.json()["usage"]["prompt_tokens_details"]
            assert details["new"] == reply.json()["usage"]["prompt_tokens"]
        unnamed = ask(client, text, BOB).json()
        assert unnamed["usage"]["prompt_tokens_details"]["gpu"] > 0, "found in his own"
        asked = {"input": "x", "max_output_tokens": 4}
        response = client.post("/v1/responses", json=asked, headers=ALICE).json()["id"]
        ask(client, "y", ALICE, session_id="hers")
        for path in ("/v1/sessions/hers", f"/v1/responses/{response}"):
            assert client.get(path, headers=BOB).status_code == 404
            assert client.delete(path, headers=BOB).status_code == 404
            assert client.get(path, headers=ALICE).status_code == 200
        stolen = client.post("/v1/responses", json={**asked, "previous_response_id": response}, headers=BOB)
        unknown = client.post("/v1/responses", json={**asked, "previous_response_id": "resp_none"}, headers=BOB)
        assert stolen.status_code == unknown.status_code == 404
        assert stolen.text.replace(response, "") == unknown.text.replace("resp_none", "")
        assert [one["id"] for one in client.get("/v1/sessions", headers=ALICE).json()["data"]][:1] == ["hers"]
        assert client.get("/metrics", headers=ALICE).status_code == 404
        told = client.get("/metrics", headers=OPERATOR).text
        assert "alice" not in told and "hers" not in told


@pytest.mark.parametrize("baseline", ["prefix_cache", "pensieve_shared"])
def test_prefixes_are_not_shared_between_tenants_where_blocks_are(baseline):
    text = "a prompt that both of them send, long enough for two chunks of thirty-two tokens"
    with create_server(baseline, **SIMULATED) as server, serving(server, KEYS) as (_, url):
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            found = [
                ask(client, text, headers, session_id=name).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                for headers, name in ((ALICE, "a"), (BOB, "b"), (BOB, "c"))
            ]
            assert client.get("/metrics", headers=BOB).status_code == 404, "nor does anybody see what all have found"
        check_cache(server.system.engine.cache)
    assert found[:2] == [0, 0]
    assert found[2] >= 64, "and within one they are"


def test_too_much_is_refused_before_it_costs_anything():
    with simulated(max_body_bytes=2000, max_sessions=3, max_queue=4) as (state, client):
        assert ask(client, "x" * 3000).status_code == 413
        chunked = client.post("/v1/chat/completions", content=(b"x" * 100 for _ in range(50)))
        assert chunked.status_code == 413
        for name in "abc":
            assert ask(client, session_id=name).status_code == 200
        full = ask(client, session_id="d")
        assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
        assert client.delete("/v1/sessions/a").status_code == 200
        assert ask(client).status_code == 200, "one without a name"
        assert ask(client, "something else").status_code == 200, "which makes room for the next"
        assert len(state.server.conversations) == 3


def test_a_full_queue_sheds_and_recovers():
    system, worker = threaded()
    worker.gate.clear()
    with Server(system, ByteTokenizer()) as server, serving(server, max_queue=4) as (_, url):
        with ThreadPoolExecutor(20) as pool, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            asked = [pool.submit(ask, client, f"number {i}") for i in range(20)]
            assert until(lambda: sum(one.done() for one in asked) == 16)
            worker.gate.set()
            statuses = sorted(one.result().status_code for one in asked)
            assert statuses == [200] * 4 + [429] * 16
            assert ask(client).status_code == 200
        check_cache(system.engine.cache)
    assert server.under_way == 0


def test_only_this_machine_is_served_without_keys_and_json_that_says_so(client):
    """A page from elsewhere may send text/plain without being asked."""
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 400)):
        body = said_by_a_user(max_tokens=2)
        reply = client.post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
        assert reply.status_code == status
    assert client.get("/v1/models", headers={"Host": "evil.example:8000"}).status_code == 403
    assert client.get("/v1/models", headers={"Host": "localhost:8000"}).status_code == 200


def test_an_address_beyond_this_machine_asks_for_keys(monkeypatch):
    monkeypatch.delenv("PENSIEVE_API_KEYS", raising=False)
    with pytest.raises(ConfigError, match="PENSIEVE_API_KEYS"):
        tenants_of("0.0.0.0")
    assert tenants_of("localhost") == {}
    monkeypatch.setenv("PENSIEVE_API_KEYS", "alice:secret-of-alice,bob:secret-of-bob")
    assert tenants_of("0.0.0.0") == {"secret-of-alice": "alice", "secret-of-bob": "bob"}
    for wrong in ("a:short", "x y:long-enough-key", "a:same-key-1,b:same-key-1"):
        monkeypatch.setenv("PENSIEVE_API_KEYS", wrong)
        with pytest.raises(ConfigError):
            tenants_of("127.0.0.1")


def test_nothing_is_served_before_the_engine_is_warm():
    with simulated() as (state, client):
        server, state.server = state.server, None
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert ask(client).status_code == 503
        state.server = server
        assert client.get("/health").status_code == 200


def test_what_is_said_is_not_logged(client, caplog):
    secret = "a-secret-nobody-may-log"
    with caplog.at_level(logging.DEBUG):
        ask(client, secret, session_id=secret)
        client.post("/v1/chat/completions", content=json.dumps({"messages": secret}))
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any(secret in message for message in ours)


def test_conversations_that_nobody_comes_back_to_are_given_up():
    with simulated() as (state, client):
        ask(client, session_id="short", keep_alive=0.001)
        ask(client, session_id="long", keep_alive=1000)
        assert until(lambda: state.sweep() or len(state.server.conversations) == 1)
        assert [one["id"] for one in client.get("/v1/sessions").json()["data"]] == ["long"]
        ask(client, session_id="long")  # the engine learns of it with the next turn
        assert list(state.server.system.engine.cache.sessions) == ["long"]
