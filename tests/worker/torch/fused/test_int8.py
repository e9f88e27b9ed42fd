"""Weights in int8: how they are rounded, what their product is, and that a quantised model is one exact model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pensieve.compiler import find_compiler
from pensieve.device.asked import ModelAsked
from pensieve.device.fused import build_fused
from pensieve.device.fused.decoder import FusedModel
from pensieve.device.model import LoadedModel, load_model
from pensieve.errors import EngineMissing
from pensieve.plugins.device.int8 import Int8Weights, quantise, rounded

from ..driver import ARCHITECTURES, Driver, converse, plain_logits, random_tokens, tiny_spec

try:
    find_compiler()
except EngineMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_output_has_a_scale_of_its_own() -> None:
    weight = _noise(5, 33) * torch.tensor([1.0, 1000.0, 1e-6, 0.0, 1.0])[:, None]
    found = rounded(weight)
    assert found.numbers.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127]
    assert ((found.restored - weight).abs() <= found.scales[:, None] * 0.5001).all()
    assert torch.equal(rounded(found.restored).numbers, found.numbers), "what was rounded rounds to itself"


def _is_rounded(part: Any) -> bool:
    return hasattr(getattr(part, "weight", None), "rounded")


def _quantised(name: str) -> LoadedModel:
    spec = replace(tiny_spec(name), quantization="int8")
    return load_model(ModelAsked(spec, threads=1))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_turns_equal_transformers_on_the_rounded_weights(name: str) -> None:
    """Prefill goes through the packed weights and decode through the int8 ones: both are one model."""
    model = _quantised(name)
    assert model.forward.name == "fused, packed weights, int8 weights for few rows"
    assert model.self_check.against == "eager"
    converse(model, Driver(model), [(37, 6), (1, 4), (21, 6)])


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_the_joined_weights_are_the_modules_own_and_it_can_be_built_again(name: str, pack: bool) -> None:
    """No float32 weight exists twice but in oneDNN's layout, and no int8 number; another attention backend builds from the
    same module."""
    module = load_model(ModelAsked(tiny_spec(name), threads=1)).module
    quantise(module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for _ in range(2):
        forward = build_fused(module, pack=pack)
        assert isinstance(forward, FusedModel) and forward.few_rows == "int8"
        own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        numbers = {
            part.weight.rounded.numbers.untyped_storage().data_ptr() for part in module.modules() if _is_rounded(part)
        }
        layer: Any = forward.layers[0]
        for part in (layer.qkv, layer.out, layer.down):
            assert part.few_rows == "int8"
            assert part._few._weights.untyped_storage().data_ptr() in numbers
            assert pack or part._weight.untyped_storage().data_ptr() in own
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_a_quantised_model_is_near_the_one_that_it_was() -> None:
    """The logits move by 3.3 % of their root mean square here; SmolLM2 is measured in docs/models.md."""
    prompt = random_tokens(60, 1)
    one, other = load_model(ModelAsked(tiny_spec("llama"), threads=1)), _quantised("llama")
    exact, got = plain_logits(one, prompt), plain_logits(other, prompt)
    assert not torch.equal(exact, got)
    assert float((got - exact).square().mean().sqrt()) < 0.05 * float(exact.square().mean().sqrt())


def test_a_tied_embedding_is_rounded_with_the_head_and_once() -> None:
    module = torch.nn.Module()
    module.embed, module.head = torch.nn.Embedding(7, 16), torch.nn.Linear(16, 7, bias=False)
    module.head.weight = module.embed.weight
    quantise(module)
    kept: Int8Weights = module.head.weight.rounded
    assert torch.equal(module.embed.weight, kept.restored)
    quantise(module)
    assert module.head.weight.rounded is kept
