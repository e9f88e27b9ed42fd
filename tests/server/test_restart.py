"""Conversations outlive their server: a restarted one knows what the killed one knew, and answers as that would have."""

import contextlib
import logging
import shutil
import sqlite3
from contextlib import contextmanager

import httpx
import pytest

from tests.invariants import check_cache

pytest.importorskip("fastapi")
from pensieve.errors import ConfigError
from pensieve.serve.server import create_server
from pensieve.serve.server.app import ServeSettings, open_state
from pensieve.serve.server.conversations import Conversations
from pensieve.serve.server.state import StateFile
from tests.server.live import SIMULATED, serving
from tests.server.test_chat import composed
from tests.server.test_http import ALICE, BOB, KEYS, ask
from tests.waiting import PATIENCE_S


@contextmanager
def served(file, machine=SIMULATED, **fields):
    state = None if file is None else StateFile(file, "tiny")
    with (
        create_server(**machine) as server,
        serving(server, KEYS, state=state, **fields) as (app, url),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield app, client


def after_a_kill(file):
    """What a process that was killed now would have left."""
    copy = file.with_name(f"{file.name}.killed")
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
    return copy


def known(app):
    """All that a server knows of its conversations, but for what ends with it."""
    assert app.server is not None
    names = [
        "named",
        "created_at",
        "used_at",
        "keep_alive_s",
        "parent",
        "asked",
        "tokens",
        "messages",
        "stored",
        "marks",
    ]
    return {(one.tenant, one.id): [getattr(one, name) for name in names] for one in app.server.conversations}


def respond(client, text, previous=None, headers=ALICE, **fields):
    body = {"input": text, "max_output_tokens": 4, "temperature": 0, "seed": 7, "previous_response_id": previous}
    reply = client.post("/v1/responses", json={**body, **fields}, headers=headers)
    return reply.json() if reply.status_code == 200 else reply.status_code


def chat(client, text, headers=ALICE, **fields):
    reply = ask(client, text, headers, temperature=0, seed=7, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_restarted_server_answers_as_the_undisturbed_one_and_counts_its_history(tmp_path):
    file = tmp_path / "state.db"
    with served(file) as (_, first):
        for turn in range(2):
            chat(first, f"Question {turn} of Alice", session_id="talk", max_tokens=20)
            chat(first, f"Question {turn} of Bob", BOB, session_id="talk", max_tokens=20)
        one = respond(first, "Something to keep")
        killed = after_a_kill(file)
        expected = [chat(first, "Go on", who, session_id="talk", max_tokens=20) for who in (ALICE, BOB)]
        following = respond(first, "And then?", one["id"])
    with served(killed) as (app, again):
        assert app.restored == 3
        found = [chat(again, "Go on", who, session_id="talk", max_tokens=20) for who in (ALICE, BOB)]
        continued = respond(again, "And then?", one["id"])
        turns = again.get("/v1/sessions/talk", headers=ALICE).json()["statistics"]
        assert respond(again, "Mine?", one["id"], BOB) == 404
    for then, now in zip(expected, found, strict=True):
        assert now["choices"][0]["message"] == then["choices"][0]["message"]
        there, here = (usage["usage"]["prompt_tokens_details"] for usage in (then, now))
        history = there["gpu"] + there["cpu"] + there["recomputed"]
        assert history > 40
        assert here == {**there, "cached_tokens": 0, "gpu": 0, "cpu": 0, "recomputed": history}
    assert continued["output"][0]["content"] == following["output"][0]["content"]
    assert [turn["ttft_ms"] > 0 for turn in turns] == [True] * 3
    causes = {miss["cause"]: miss["tokens"] for miss in turns[-1]["misses"]}
    details = turns[-1]["prompt_tokens_details"]
    assert causes == {"restarted": details["recomputed"], "new": details["new"]}


def test_what_is_known_after_a_kill_is_what_was_known_before(tmp_path):
    """Named and unnamed, edited, regenerated, forked and deleted ones; cut short; with and without messages."""
    file = tmp_path / "state.db"
    with served(file) as (app, client):
        chat(client, "Hello", session_id="named", keep_alive=1000)
        for text in ("Go on", "And on"):
            said = chat(client, text, session_id="named")
        history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "other"}]
        chat(client, "", session_id="named", messages=[*history, {"role": "user", "content": "Edited"}])
        chat(client, "Unnamed")
        chat(client, "To be deleted", session_id="gone")
        assert client.delete("/v1/sessions/gone", headers=ALICE).status_code == 200
        first = respond(client, "A response")
        second = respond(client, "goes on", first["id"])
        respond(client, "and forks here", first["id"])
        respond(client, "is not stored", store=False)
        client.delete(f"/v1/responses/{second['id']}", headers=ALICE)
        whole = {"prompt": "Plain text that is long enough to be found again by what it says", "max_tokens": 4}
        client.post("/v1/completions", json={**whole, "session_id": "text"}, headers=BOB)
        claimed = client.get(f"/v1/responses/{first['id']}", headers=ALICE).json()["session_id"]
        again = [{"role": "user", "content": "Something else entirely"}]
        ask(client, headers=ALICE, messages=again, session_id=claimed, history="whole")  # forks what is claimed
        before = known(app)
        names = {name for _, name in before}
        killed = after_a_kill(file)
    assert len(before) == 6 and "alice" in {tenant for tenant, _ in before}
    for _ in range(2):  # a second restart knows no less
        with served(killed) as (app, client):
            assert known(app) == before
            assert client.get(f"/v1/responses/{first['id']}", headers=ALICE).json() == first
            assert client.get(f"/v1/responses/{second['id']}", headers=ALICE).status_code == 404
            assert client.get(f"/v1/responses/{first['id']}", headers=BOB).status_code == 404
    other = StateFile(killed, "another model")
    assert other.restore(Conversations(lambda _: None)) == 0, (
        "whose tokens mean something else, and which stays in the file"
    )
    other.close()
    with served(killed) as (app, client):
        found = respond(client, "Or else, first of all?", first["id"])["usage"]["input_tokens_details"]
        [fork] = [one for one in app.server.conversations if one.marks[-1].asked and one.parent and one.id not in names]
        assert found["recomputed"] > 10 and "restarted" in {miss["cause"] for miss in fork.marks[-1].told["misses"]}
        messages = app.server.conversations.find("alice", "named").messages
        chat(client, "", messages=[*messages, {"role": "user", "content": "By what was said"}])
        assert len(app.server.conversations.find("alice", "named").marks) == len(before["alice", "named"][-1]) + 1
    assert said["usage"]["prompt_tokens"] > 0


def test_a_conversation_deleted_before_it_was_asked_again_is_given_up_on_disk_too(tmp_path):
    file = tmp_path / "state.db"
    with served(file) as (app, client):
        chat(client, "Hello", session_id="deleted")
        chat(client, "Hello again", session_id="asked")
        one = respond(client, "Something to keep, of several words")
        tokens = app.server.conversations.find("alice", "deleted").tokens
    with served(file) as (app, client):
        disowned = []
        engine = app.server.system.engine
        forget, engine.forget = engine.forget, lambda *told: (disowned.append(told), forget(*told))
        chat(client, "Go on", session_id="asked")
        assert respond(client, "x" * 5000, one["id"], instructions="A fork that is refused") == 400
        for name in ("deleted", "asked"):
            assert client.delete(f"/v1/sessions/{name}", headers=ALICE).status_code == 200
        respond(client, "Another one", headers=BOB)  # the engine learns of it with the next turn
        left = {name: told for name, _, told in disowned}
        assert left["alice/deleted"] == tokens and left["alice/asked"][: len(tokens)] and None in left.values()
        check_cache(engine.cache)


def test_the_forgotten_leave_the_file_and_what_they_said_is_nowhere(tmp_path):
    file = tmp_path / "state.db"
    with served(file, max_sessions=3) as (app, client):
        chat(client, "xyzzy makes room")
        chat(client, "xyzzy has its time", keep_alive=0.0001)
        chat(client, "xyzzy is deleted", session_id="gone")
        chat(client, "kept", session_id="kept")
        assert client.delete("/v1/sessions/gone", headers=ALICE).status_code == 200
        app.sweep()
        kept = known(app)
        for part in tmp_path.iterdir():
            assert b"xyzzy" not in part.read_bytes(), part.name
    with served(file) as (app, _):
        assert known(app) == kept and [name for _, name in kept] == ["kept"]


def test_a_file_that_cannot_serve_is_refused_where_it_was_asked_for_and_else_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    file, config = tmp_path / "serve.db", composed("hardware=sim_h100")
    first = open_state(ServeSettings(state="auto"), config)
    assert first.path == file and file.stat().st_mode & 0o77 == 0, "nobody else reads what was said"

    def refused(why):
        assert open_state(ServeSettings(state="auto"), config) is None
        assert why in capsys.readouterr().err
        with pytest.raises(ConfigError, match=why):
            open_state(ServeSettings(state=str(file)), config)

    refused("open in another server")
    first.close()
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA user_version = 1")
    refused("its version is 1")
    file.write_bytes(other := b"some other file" * 100)
    refused("not a database")
    assert file.read_bytes() == other
    assert open_state(ServeSettings(state="off"), config) is None


def test_a_disk_that_fails_costs_a_line_and_no_turn(tmp_path, caplog):
    file = tmp_path / "state.db"
    state = StateFile(file, "tiny")
    with create_server(**SIMULATED) as server, serving(server, KEYS, state=state) as (app, url):
        client = httpx.Client(base_url=url, timeout=PATIENCE_S)
        chat(client, "Hello", session_id="a")
        state._database.execute("PRAGMA query_only = ON")
        with caplog.at_level(logging.ERROR):
            chat(client, "Not written", session_id="a")
        assert "cannot be written" in caplog.text and "Not written" not in caplog.text
        state._database.execute("PRAGMA query_only = OFF")
        chat(client, "Written, with what was not", session_id="a")
        before = known(app)
        client.close()
    with served(file) as (app, _):
        assert known(app) == before
