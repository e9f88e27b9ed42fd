from __future__ import annotations

import re

import pytest
import torch

from pensieve.device import choice
from pensieve.device.asked import ModelAsked
from pensieve.device.choice import attention_here, choose
from pensieve.device.kernels.reference import ReferenceBackend, ReferencePlan
from pensieve.errors import EngineMissing, UnsupportedModel

CPU = torch.device("cpu")


class _WrongPlan(ReferencePlan):
    def attend(self, *arguments):
        return super().attend(*arguments) + 1.0


class _WrongBackend(ReferenceBackend):
    name = "wrong"
    chunks: list[int]

    def __init__(self):
        self.chunks = []

    def plan(self, batch, pool, chunk_tokens):
        self.chunks.append(chunk_tokens)
        return _WrongPlan(batch, pool, chunk_tokens)


def _needs_native():
    try:
        choice.load_backend("native", CPU, torch.float32, 16, 16)
    except EngineMissing as missing:
        pytest.skip(str(missing))


def _choose(model, *backends):
    return choose(model.module, ModelAsked(model.spec, chunk_tokens=16), CPU, backends)


@pytest.fixture
def wrong(monkeypatch):
    backend, load = _WrongBackend(), choice.load_backend

    def load_backend(name, *where):
        if name == "absent":
            raise EngineMissing("It is not installed.")
        return backend if name == "wrong" else load(name, *where)

    monkeypatch.setattr(choice, "load_backend", load_backend)
    return backend


def test_the_first_backend_that_loads_and_passes_serves_and_the_others_are_noted(llama, wrong):
    chosen = _choose(llama, "absent", "wrong", "reference")
    assert (chosen.attention.name, chosen.forward.name) == ("reference", llama.forward.name)
    assert chosen.attention_note.startswith("Not absent: It is not installed. Not wrong: ")
    assert "fails its self-check" in chosen.attention_note
    assert set(wrong.chunks) == {16}, "a kernel is checked with the blocks that it will serve"


@pytest.mark.parametrize(
    ("backends", "loud"),
    [
        (("reference",), None),  # asked for
        (("native", "reference"), None),
        (("absent", "native", "reference"), None),  # another kernel serves
        (("absent", "reference"), "attention_backend=reference .* Not absent: It is not installed"),
        (("wrong", "native"), "attention_backend=native .* Not wrong: .* fails its self-check"),
    ],
)
def test_a_fall_back_is_warned_of(llama, wrong, caplog, backends, loud):
    if "native" in backends:
        _needs_native()
    chosen = _choose(llama, *backends)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert chosen.fell_back == (loud is not None)
    assert len(warned) == (loud is not None)
    assert loud is None or re.search(loud, warned[0])


def test_what_serves_here_is_told_without_a_model(wrong, monkeypatch):
    def here(*names):
        monkeypatch.setattr(choice, "candidates", lambda asked, kind: names)
        return attention_here("auto", CPU, torch.float32, 16, 16)

    assert here("reference") == ("reference", "", False)
    assert here("absent", "reference") == ("reference", "Not absent: It is not installed.", True)
    assert here("absent", "wrong", "reference") == ("wrong", "Not absent: It is not installed.", False)
    with pytest.raises(EngineMissing, match="not installed"):
        here("absent")


def test_the_one_that_was_asked_for_raises(llama, wrong):
    with pytest.raises(EngineMissing, match="not installed"):
        _choose(llama, "absent")
    with pytest.raises(UnsupportedModel, match="fails its self-check"):
        _choose(llama, "wrong")
