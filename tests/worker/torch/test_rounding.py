"""A deep model with random weights in bfloat16 is not mistaken for a wrong one, nor a wrong one for such a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pensieve.errors import UnsupportedModel
from pensieve.specs import ModelSpec
from pensieve.worker.torch import model as loading
from pensieve.worker.torch.attention import register
from pensieve.worker.torch.fused import build_fused
from pensieve.worker.torch.kernels.reference import ReferenceBackend, ReferencePlan
from pensieve.worker.torch.rounding import nudged
from pensieve.worker.torch.self_check import SelfCheck, check_against_eager

CPU, BF16 = torch.device("cpu"), torch.bfloat16
DEEP = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


def _check(backend: ReferenceBackend) -> SelfCheck:
    """What load_model does on a GPU, where alone models run in 16 bits."""
    spec = ModelSpec.from_architecture("deep", DEEP, "bfloat16")
    register()
    module = loading._random(spec, BF16, CPU, 0).eval().requires_grad_(False)
    forward = build_fused(module, pack=False)
    assert not isinstance(forward, str)
    return check_against_eager(module, forward, spec, CPU, BF16, backend, 32)


def test_a_deep_random_model_passes_in_bfloat16() -> None:
    check = _check(ReferenceBackend())
    assert 0 < check.difference < check.limit < 4


class _Shifts(ReferencePlan):
    """Gives each query the result of the one before it."""

    def attend(self, pool: torch.Tensor, queries: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().attend(pool, queries, *rest).roll(1, 0)


class _ShiftingBackend(ReferenceBackend):
    def plan(self, *how: Any) -> ReferencePlan:
        return _Shifts(*how)


def test_a_wrong_attention_fails_in_bfloat16_too() -> None:
    with pytest.raises(UnsupportedModel, match="fails its self-check"):
        _check(_ShiftingBackend())


def test_a_nudge_is_as_small_as_the_type_and_ends_with_its_block() -> None:
    module = torch.nn.Sequential()
    module.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    x = torch.ones(64, 8, dtype=BF16)
    with nudged(module, 2):
        moved = module.layers[0](x)
        assert torch.equal(moved, module.layers[0](x))
    assert set(moved.float().unique().tolist()) == {1 - 2**-7, 1.0, 1 + 2**-7}
    assert torch.equal(module.layers[0](x), x)
    with nudged(module, 3):
        assert torch.equal(module.layers[0](x), x)
