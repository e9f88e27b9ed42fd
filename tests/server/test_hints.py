"""What clients leave open or say beside the prompt: how tokens are drawn, and when they will be back."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
from rich.console import Console

from pensieve.core.plan import StartReport
from pensieve.core.request import Hint, Sampling
from pensieve.errors import ConfigError
from pensieve.serve.server import create_server
from pensieve.serve.server.chat import ChatSettings, Conversation
from tests.server.live import SIMULATED, simulated
from tests.waiting import until
from tests.worker.torch.driver import tiny_model


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

    def hint_after(**fields):
        reply = ask(client, "hinted", path, **fields)
        assert reply.status_code == 200, reply.text
        return cache.sessions.get(reply.json()["session_id"])

    metadata = {"tool": "bash", "expected_s": "2.5", "stop_reason": "tool_use", "whatever": "else"}
    session = hint_after(keep_alive=300, metadata=metadata)
    assert until(lambda: session.hint == Hint("tool_use", "bash", 2.5, 300.0))
    if path != "/v1/responses":  # which makes a conversation of its own each time
        assert hint_after(metadata={"user": "me"}) is session
        assert until(lambda: session.hint == Hint(keep_s=300.0)), "the expectation was of one reply only"


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


@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, Sampling(0.0, 1.0)),  # without do_sample they mean nothing
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(0.6, 0.9)),
        ({"do_sample": True, "temperature": -1.0}, None),
    ],
)
def test_a_models_own_account_counts_where_it_samples(said, drawn):
    from transformers import GenerationConfig

    model = tiny_model("llama")
    config = GenerationConfig()
    for name, value in said.items():
        setattr(config, name, value)
    asked = replace(model, module=SimpleNamespace(generation_config=config))
    if drawn is None:
        with pytest.raises(ConfigError, match=r"generation_config\.json of .* temperature"):
            _ = asked.sampling
    else:
        assert asked.sampling == drawn


@pytest.mark.parametrize(
    ("configured", "asked", "drawn"),
    [
        (None, {}, (0.6, 0.9)),
        (None, {"temperature": 0}, (0, 0.9)),
        (None, {"top_p": 0.5}, (0.6, 0.5)),
        (0.3, {}, (0.3, 0.9)),  # the configuration's temperature goes before the model's
    ],
)
def test_chat_page_and_server_draw_by_one_rule(configured, asked, drawn):
    """The page gets its default from /v1/models, as any client can."""
    with simulated(temperature=configured) as (state, client):
        server = state.server
        assert server.report.sampling == Sampling()
        server.report = StartReport(0.0, 0.0, sampling=Sampling(0.6, 0.9))
        [card] = client.get("/v1/models").json()["data"]
        assert (card["temperature"], card["top_p"]) == (configured or 0.6, 0.9)
        reply = client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2, **asked}).json()
        assert (reply["temperature"], reply["top_p"]) == drawn
        began, make = [], server.turn
        server.turn = lambda *parts, **fields: began.append(make(*parts, **fields)) or began[-1]
        settings = ChatSettings(max_new_tokens=2, **{"temperature": configured, **asked})
        Conversation(server, settings, Console()).ask("Hello").result()
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **asked}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert [(turn.sampling.temperature, turn.sampling.top_p) for turn in began] == [drawn, drawn]
