"""In 16 bits a right model is told from a wrong one by its distance to float32, whatever this machine's rounding does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from pensieve.device import weights as loading
from pensieve.device.attention import TransformersForward, register
from pensieve.device.batch import Spans
from pensieve.device.fused import build_fused
from pensieve.device.kernels.reference import ReferenceBackend, ReferencePlan
from pensieve.device.self_check import MULTIPLE, check_against_eager, upcast
from pensieve.errors import UnsupportedModel
from pensieve.specs import ModelSpec

from .driver import ARCHITECTURES

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16
DEEP = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
KINDS = {**ARCHITECTURES, "deep": DEEP}
CHUNK = 8


@cache
def _model(name, dtype=BF16, seed=0):
    """What load_model makes on a GPU, where alone models run in 16 bits."""
    spec = ModelSpec.from_architecture(name, KINDS[name], str(dtype).removeprefix("torch."))
    register()
    module = loading._random(spec, dtype, CPU, seed).eval().requires_grad_(False)
    forward = build_fused(module, pack=False)
    assert not isinstance(forward, str)
    return spec, module, forward


def _check(
    name, backend=None, dtype=BF16, seed=0,
    wrap=None, fused=True,
):  # fmt: skip
    spec, module, forward = _model(name, dtype, seed)
    forward = forward if fused else TransformersForward(module)
    forward = wrap(forward) if wrap else forward
    return check_against_eager(module, forward, spec, CPU, dtype, backend or ReferenceBackend(), CHUNK)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["deep", "llama", "gpt2", "gemma2"])
def test_a_right_model_is_about_as_far_from_float32_as_its_own_attention(name, dtype, fused):
    check = _check(name, dtype=dtype, fused=fused)
    assert check.against == "float32"
    assert 0 < check.difference < 1.25 * check.limit / MULTIPLE, "the limit is not met by luck"


class _Plan(ReferencePlan):
    def __init__(self, batch, pool, chunk_tokens):
        super().__init__(batch, pool, chunk_tokens)
        (self.span,) = batch.spans


class _Shifts(_Plan):
    """Gives each query the result of the one before it."""

    def attend(self, pool, queries, *rest):
        return super().attend(pool, queries, *rest).roll(1, 0)


class _Scales(_Plan):
    """By a quarter more."""

    def attend(self, *all_):
        *rest, scores = all_
        scaling = rest[1].shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
        return super().attend(*rest, scores._replace(scaling=1.25 * scaling))


class _Mistakes(_Plan):
    """Reads one block of what was there before in the place of another (two in each other's place are the same keys)."""

    def __init__(self, batch, pool, chunk_tokens):
        (span,) = batch.spans
        blocks = span.blocks.copy()
        if span.start:
            blocks[1] = blocks[0]
        super().__init__(replace(batch, spans=Spans.of([replace(span, blocks=blocks)])), pool, chunk_tokens)


class _Loses(_Plan):
    """Finds nothing in a block that was written before."""

    def attend(self, pool, *rest):
        if self.span.start:
            block = int(self.span.blocks[1])
            pool[block * CHUNK : (block + 1) * CHUNK] = 0
        return super().attend(pool, *rest)


class _Mixes(_Plan):
    """One head gives what another one found."""

    def attend(self, *all_):
        result = super().attend(*all_).clone()
        result[:, 0] = result[:, 1]
        return result


class _Backend(ReferenceBackend):
    def __init__(self, plan):
        self._plan = plan

    def plan(self, *how):
        return self._plan(*how)


@pytest.mark.parametrize("plan", [_Shifts, _Scales, _Mistakes, _Loses, _Mixes])
@pytest.mark.parametrize("name", ["deep", "llama", "gpt2"])
def test_a_wrong_attention_fails_in_16_bits_too(name, plan):
    with pytest.raises(UnsupportedModel, match=r"fails its self-check: .* of the same weights in float32 by"):
        _check(name, _Backend(plan))


@pytest.mark.parametrize("name", ["deep", "llama", "gpt2"])
def test_a_wrong_position_fails_in_16_bits_too(name):
    """Of what is appended, by one."""

    def wrap(forward):
        def wrong(iteration, wanted):
            positions = iteration.batch.positions
            if int(positions[0]):
                iteration.batch = replace(iteration.batch, positions=positions + 1)
            return forward(iteration, wanted)

        return wrong

    with pytest.raises(UnsupportedModel, match="fails its self-check"):
        _check(name, wrap=wrap)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_product_that_is_wrong_for_so_many_rows_fails(rows):
    """As one that this machine's compiler got wrong."""
    spec, module, forward = _model("llama", torch.float32)

    def wrong(iteration, wanted):
        logits = forward(iteration, wanted)
        return logits * 1.01 if len(wanted) == rows else logits

    assert check_against_eager(module, forward, spec, CPU, torch.float32).against == "eager"
    with pytest.raises(UnsupportedModel, match="fails its self-check"):
        check_against_eager(module, wrong, spec, CPU, torch.float32)


def test_logits_that_are_no_numbers_fail():
    class NaN(_Plan):
        def attend(self, *all_):
            return super().attend(*all_) * float("nan")

    with pytest.raises(UnsupportedModel, match="by nan"):
        _check("llama", _Backend(NaN))


@pytest.mark.parametrize("name", ["deep", "gpt2", "gemma2"])
def test_upcast_is_the_model_of_the_same_weights_in_float32_and_leaves_it_as_it_was(name):
    spec, module, _ = _model(name)
    ids = torch.arange(3, 40)[None]
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    module.set_attn_implementation("eager")
    with torch.no_grad(), upcast(module, spec.layers):
        got = module(input_ids=ids, use_cache=False).logits
    after = module.state_dict()
    assert all(after[key].dtype == each.dtype and torch.equal(after[key], each) for key, each in before.items())
    whole = loading._random(spec, BF16, CPU, 0).eval().requires_grad_(False).float()
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).logits
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, atol=1e-4)


def test_upcast_holds_one_layer_at_a_time_and_lets_go_of_it_when_a_forward_fails():
    spec, module, _ = _model("deep")
    layers = module.model.layers
    seen = []

    def look(*_):
        seen.append(sum(next(layer.parameters()).dtype == torch.float32 for layer in layers))

    def fail(*_):
        raise RuntimeError("out of memory")

    hooks = [layer.mlp.register_forward_pre_hook(look) for layer in layers]
    hooks.append(layers[5].mlp.register_forward_hook(fail))
    module.set_attn_implementation("eager")
    try:
        with pytest.raises(RuntimeError, match="out of memory"), torch.no_grad(), upcast(module, spec.layers):
            module(input_ids=torch.arange(3, 9)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == [1] * 6
    assert {tensor.dtype for tensor in module.parameters()} == {BF16}
