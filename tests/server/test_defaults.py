"""How tokens are drawn where nobody says: by the model's own generation_config.json, else greedily, for every client."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from pensieve.core.plan import StartReport
from pensieve.core.request import Sampling
from pensieve.errors import ConfigError
from pensieve.serve.server.chat import ChatSettings, Conversation
from tests.server.live import simulated
from tests.worker.torch.driver import tiny_model


@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        ({}, Sampling(0.0, 1.0)),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling(0.0, 1.0)),  # without do_sample they mean nothing
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(0.6, 0.9)),
        ({"do_sample": True}, Sampling(1.0, 1.0)),
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
