"""What is said before a start, by a trial and by a server."""

from dataclasses import replace

import pytest

from pensieve.lab.compose import plan_trial
from pensieve.lab.trial import start_times
from pensieve.lab.trial.start_times import announce, sentence
from pensieve.plugins.device import shelf
from pensieve.serve.server import create
from tests.composed import checked


@pytest.fixture(scope="module")
def plan():
    return plan_trial(checked("hardware=cpu", "model=llama3_8b", "cache.cpu='65536 tokens'"))


@pytest.fixture(scope="module")
def on_gpu(plan):
    return replace(plan, device=replace(plan.device, kind="cuda", label="a GPU"))


def test_a_long_start_says_what_it_does(plan, on_gpu):
    assert "GiB of weights, page-locks" in sentence(on_gpu)
    assert "compiles kernels" in sentence(on_gpu) and "compiles" not in sentence(plan)
    assert sentence(plan_trial(checked("hardware=cpu"))) is None, "a small model on a CPU"
    assert sentence(plan_trial(checked())) is None, "a simulated one"


def test_a_model_in_memory_needs_no_announcement(plan, monkeypatch):
    monkeypatch.setattr(start_times, "sentence", lambda *_: "a sentence")
    said = []
    announce(plan, said.append)
    assert said == ["a sentence"]
    other, own = (plan_trial(checked("hardware=cpu", f"model.seed={seed}")) for seed in (1, 0))
    monkeypatch.setattr("pensieve.device.model.load_model", lambda *_, **__: "a model")
    with shelf.open_shelf():
        shelf.take_model(shelf.ModelAsked(own.model, "random", None, None, 0, "cpu", None, "auto", own.chunk_tokens))
        announce(own, said.append)
        assert len(said) == 1
        announce(other, said.append)
        assert len(said) == 2, "it will be loaded in the place of that one"


def test_a_server_says_so_too(monkeypatch):
    said = []
    monkeypatch.setattr(start_times, "sentence", lambda plan: None if plan.device.simulated else "a sentence")
    for build in ("build_tokenizer", "build_system", "Server", "check_free_memory"):
        monkeypatch.setattr(create, build, lambda *_, **__: None)
    fields = {name: value for name, value in checked("hardware=cpu").model_dump().items() if name != "workload"}
    create.server_of(fields, say=said.append)
    assert said == ["a sentence"]
    create.server_of(fields)
    simulated = {name: value for name, value in checked().model_dump().items() if name != "workload"}
    create.server_of(simulated, say=said.append)
    assert len(said) == 1, "a library is silent, and a simulated engine starts at once"
