"""The server over real replicas, of which one is killed under load."""

import json
import os
import signal
import threading
from contextlib import contextmanager

import httpx
import psutil
import pytest

pytest.importorskip("fastapi")
from pensieve.lab.compose.settings import resolved
from pensieve.serve.server.api import server_of
from pensieve.serve.server.state import StateFile
from tests.server.live import serving
from tests.server.test_chat import composed
from tests.server.test_http import ALICE, BOB, KEYS
from tests.waiting import descendants, until

REPLY_S = 120.0


WHO = [(name, tenant) for tenant in ("alice", "bob") for name in ("talk", "other")]
HEADERS = {"alice": ALICE, "bob": BOB}


def say(client, name, tenant, turn, run, begun):
    """One streamed turn of a conversation that all tenants call the same. begun: set at its second piece."""
    body = {
        "messages": [{"role": "user", "content": f"xyzzy{turn} says {tenant} of {name}"}],
        "session_id": run + name,
        "max_tokens": 96 if turn == 2 else 8,  # long enough to be under way when a replica is killed
        "temperature": 0 if name == "talk" else 1,
        "seed": 11,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, reason, usage, pieces = "", None, None, 0
    with client.stream("POST", "/v1/chat/completions", json=body, headers=HEADERS[tenant]) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            part = json.loads(line.removeprefix("data: "))
            assert "error" not in part, part
            usage = part.get("usage") or usage
            for choice in part["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                pieces += 1
                if pieces == 2:
                    begun.set()
    begun.set()
    return {"text": text, "reason": reason, "usage": usage}


def rounds(client, run, kill=None):
    """Three turns of each conversation, all at once; kill: called when all of the second have begun. run: of their names."""
    said = {}
    for turn in (1, 2, 3):
        begun = [threading.Event() for _ in WHO]

        def one(name, tenant, started, turn=turn):
            said[name, tenant, turn] = say(client, name, tenant, turn, run, started)

        asking = [threading.Thread(target=one, args=(*who, event)) for who, event in zip(WHO, begun, strict=True)]
        for thread in asking:
            thread.start()
        if turn == 2 and kill is not None:
            assert all(event.wait(REPLY_S) for event in begun)
            kill()
        for thread in asking:
            thread.join(REPLY_S)
            assert not thread.is_alive()
    return said


@contextmanager
def over_http(server, state=None):
    with serving(server, KEYS, state=state) as (app, url), httpx.Client(base_url=url, timeout=REPLY_S) as client:
        yield app, client


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_of_a_replica_under_load(tmp_path):
    """Two replicas of the tiny model; the undisturbed run asks them the same in other conversations, before. That one engine
    says the same as several is shown in tests/replicas."""
    before = descendants()
    config = composed(
        "hardware=cpu", "hardware.threads=1", "model.weights=random", "cache.gpu=1024 tokens", "cache.cpu=2048 tokens"
    )
    server = server_of(resolved(config), replicas=2)
    try:
        system = server.system
        first = {}

        def kill():
            first.update(_homes(system))
            guard = psutil.Process(system.up[0].process.pid)
            os.kill(guard.children()[0].pid, signal.SIGKILL)

        with over_http(server, StateFile(tmp_path / "state.db", "tiny")) as (app, client):
            undisturbed = rounds(client, "calm ")
            said = rounds(client, "", kill)
            assert app.server is not None
            stand = {(one.tenant, one.id): len(one.marks) for one in app.server.conversations}
            last, counted = _homes(system), system.counters()
            shown = client.get("/v1/sessions", headers=ALICE).json()["data"]
        assert "xyzzy" not in "".join(one.process.log() for one in system.up), "no message is in a log"
    finally:
        server.close()
    assert until(lambda: not descendants() - before), "they end with the server"

    for key, here in said.items():
        there = undisturbed[key]
        assert (here["text"], here["reason"]) == (there["text"], there["reason"]), key
        assert here["usage"]["total_tokens"] == there["usage"]["total_tokens"]
    assert stand == {(tenant, run + name): 3 for name, tenant in WHO for run in ("", "calm ")}, (
        "none twice, none missing"
    )
    assert counted["restarted_requests"] >= 1
    mine = {f"{tenant}/{name}" for name, tenant in WHO}
    gone = {home for home in first.values() if home not in last.values()}
    moved = {session for session in mine if first[session] in gone}
    assert len(gone) == 1 and 0 < len(moved) < len(mine), "both replicas served when one of them was killed"
    assert all(last[session] == first[session] for session in mine - moved), "only those of the dead one move"
    found = {
        f"{tenant}/{name}": [said[name, tenant, turn]["usage"]["prompt_tokens_details"] for turn in (2, 3)]
        for name, tenant in WHO
    }
    assert {session for session, turns in found.items() if any(one["recomputed"] for one in turns)} == moved
    assert {session for session, turns in found.items() if all(one["gpu"] for one in turns)} >= mine - moved
    assert {one["id"] for one in shown} == {"talk", "other", "calm talk", "calm other"}


def _homes(system):
    """Of the conversations that are disturbed."""
    return {name: home for name, home in system._home.items() if "calm" not in name}
