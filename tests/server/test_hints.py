"""What clients say of when they will be back reaches the eviction policy, and what makes no sense is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from pensieve.core.request import Hint
from pensieve.serve.server import create_server
from tests.server.live import SIMULATED, simulated, until


@pytest.fixture(scope="module")
def served():
    with simulated() as (state, client):
        yield state.server.system.engine.cache, client


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
}


def ask(client, name, path="/v1/chat/completions", **fields):
    return client.post(path, json={"session_id": name, **fields, **BODIES[path]})


@pytest.mark.parametrize("path", BODIES)
def test_metadata_and_keep_alive_are_hints_on_every_path(served, path):
    cache, client = served
    before = set(cache.sessions)
    metadata = {"tool": "bash", "expected_s": "2.5", "stop_reason": "tool_use", "whatever": "else"}
    reply = ask(client, f"hinted {path}", path, keep_alive=300, metadata=metadata)
    assert reply.status_code == 200, reply.text
    (name,) = set(cache.sessions) - before
    assert until(lambda: cache.sessions.get(name).hint == Hint("tool_use", "bash", 2.5, 300.0))


def test_who_says_nothing_gives_no_hint_and_keep_alive_stays_with_the_conversation(served):
    cache, client = served
    before = set(cache.sessions)
    ask(client, "quiet", metadata={"user": "me"})
    (name,) = set(cache.sessions) - before
    assert cache.sessions.get(name).hint is None
    ask(client, "quiet", keep_alive=60, metadata={"expected_s": 1})
    assert until(lambda: cache.sessions.get(name).hint == Hint(expected_s=1, keep_s=60.0))
    ask(client, "quiet")
    assert until(lambda: cache.sessions.get(name).hint == Hint(keep_s=60.0)), "the expectation was of one reply only"


@pytest.mark.parametrize(
    "metadata",
    [*({"expected_s": value} for value in ("soon", -1, 10**400, "inf")), {"stop_reason": "length"}, {"tool": 7}],
)
def test_a_hint_that_makes_no_sense_is_a_400_that_names_it(served, metadata):
    reply = ask(served[1], "odd", metadata=metadata)
    assert reply.status_code == 400
    assert next(iter(metadata)) in reply.json()["error"]["message"]


def test_programs_give_hints_and_a_policy_acts_on_them():
    small = {**SIMULATED, "gpu_cache": "512 tokens", "cpu_cache": "0 tokens"}
    with create_server(**small, eviction="hinted") as server:
        soon = Hint(expected_s=5.0)
        server.generate("stays", prompt_ids=range(200), max_new_tokens=4, hint=soon)
        server.generate("goes", prompt_ids=range(200), max_new_tokens=4)
        server.generate("new", prompt_ids=range(90, 290), max_new_tokens=4)
        again = {name: server.generate(name, prompt_ids=[1], max_new_tokens=1) for name in ("stays", "goes")}
        found = {name: out.turn.gpu_hit_tokens for name, out in again.items()}
        assert found["stays"] == 203 and found["goes"] < 203, "recency alone would have evicted the first"
