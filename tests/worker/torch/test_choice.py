from __future__ import annotations

import pytest
import torch

from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.worker.torch import choice
from pensieve.worker.torch.choice import Choice, choose
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kernels.reference import ReferenceBackend, ReferencePlan
from pensieve.worker.torch.model import LoadedModel

CPU = torch.device("cpu")


class _WrongPlan(ReferencePlan):
    def attend(self, *arguments: torch.Tensor | float | None) -> torch.Tensor:
        return super().attend(*arguments) + 1.0  # type: ignore[arg-type]


class _WrongBackend(ReferenceBackend):
    name = "wrong"
    chunks: list[int]

    def __init__(self) -> None:
        self.chunks = []

    def plan(self, batch: object, pool: torch.Tensor, chunk_tokens: int) -> ReferencePlan:
        self.chunks.append(chunk_tokens)
        return _WrongPlan(batch, pool, chunk_tokens)  # type: ignore[arg-type]


def _choose(model: LoadedModel, *backends: str) -> Choice:
    return choose(model.module, model.spec, CPU, torch.float32, True, backends, 16)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> _WrongBackend:
    backend, load = _WrongBackend(), choice.load_backend

    def load_backend(name: str, *where: object) -> AttentionBackend:
        if name == "absent":
            raise EngineMissing("It is not installed.")
        return backend if name == "wrong" else load(name, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(choice, "load_backend", load_backend)
    return backend


def test_the_first_backend_that_loads_and_passes_serves_and_the_others_are_noted(
    llama: LoadedModel, wrong: _WrongBackend
) -> None:
    chosen = _choose(llama, "absent", "wrong", "reference")
    assert (chosen.attention.name, chosen.forward.name) == ("reference", llama.forward.name)
    assert chosen.attention_note.startswith("Not absent: It is not installed. Not wrong: ")
    assert "fails its self-check" in chosen.attention_note
    assert set(wrong.chunks) == {16}, "a kernel is checked with the blocks that it will serve"


def test_the_one_that_was_asked_for_raises(llama: LoadedModel, wrong: _WrongBackend) -> None:
    with pytest.raises(EngineMissing, match="not installed"):
        _choose(llama, "absent")
    with pytest.raises(UnsupportedModel, match="fails its self-check"):
        _choose(llama, "wrong")
