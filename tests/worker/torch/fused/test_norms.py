"""Norms in bfloat16, as they run on a GPU, are those of transformers bit for bit."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.attention import register
from pensieve.device.fused import build_fused
from pensieve.device.weights import _random
from tests.worker.torch.driver import tiny_spec


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_a_norm_with_trained_weights(name: str) -> None:
    """Gemma's weights are added to 1: in bfloat16 that sum would keep 7 bits of them."""
    register()
    module = _random(tiny_spec(name), torch.bfloat16, torch.device("cpu"), 0).eval().requires_grad_(False)
    layer = module.model.layers[0]
    layer.input_layernorm.weight.copy_(torch.randn(64) * 0.3 + (name == "llama"))
    fused = build_fused(module, pack=False)
    assert not isinstance(fused, str)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    got, expected = fused.layers[0].before_attention(x), layer.input_layernorm(x)  # type: ignore[attr-defined]
    assert got.dtype == torch.bfloat16
    differing = float((got != expected).float().mean())
    assert differing < (0.001 if name == "gemma2" else 0.5), "Llama's rounds once more than one kernel does"
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)
