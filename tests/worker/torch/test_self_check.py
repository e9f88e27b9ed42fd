"""In 16 bits a right model is told from a wrong one by its distance to float32, whatever this machine's rounding does; and
what passes first serves."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AttentionInterface

from pensieve.device import model as loaded
from pensieve.device import weights as loading
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import IMPLEMENTATION, TransformersForward, paged_attention, register
from pensieve.device.fused.decoder import build_fused
from pensieve.device.kernels.reference import ReferenceBackend, ReferencePlan
from pensieve.device.model import choose
from pensieve.device.self_check import MULTIPLE, check_against_eager, upcast
from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.specs import ModelSpec

from .driver import ARCHITECTURES, tiny_model

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16
DEEP = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
KINDS = {**ARCHITECTURES, "deep": DEEP, "eight": {**DEEP, "num_hidden_layers": 8}}
CHUNK = 8


@cache
def _model(name, dtype=BF16):
    """What load_model makes on a GPU, where alone models run in 16 bits."""
    spec = ModelSpec.from_architecture(name, KINDS[name], str(dtype).removeprefix("torch."))
    register()
    module = loading._random(spec, dtype, CPU, 0).eval().requires_grad_(False)
    return spec, module, build_fused(module, pack=False)


@pytest.mark.parametrize(
    ("name", "dtype", "fused"),
    [("deep", BF16, True), ("gpt2", FP16, False), ("gemma2", BF16, False)],
)
def test_a_right_model_is_about_as_far_from_float32_as_its_own_attention(name, dtype, fused):
    spec, module, forward = _model(name, dtype)
    forward = forward if fused else TransformersForward(module)
    check = check_against_eager(module, forward, spec, CPU, ReferenceBackend(), CHUNK)
    assert check.against == "float32"
    assert 0 < check.difference < 1.25 * check.limit / MULTIPLE, "the limit is not met by luck"


def _changed(change):
    """A plan whose results are changed."""
    return type("_Changed", (ReferencePlan,), {"attend": lambda self, *all_: change(ReferencePlan.attend(self, *all_))})


class _Scales(ReferencePlan):
    """By a quarter more."""

    def attend(self, *all_):
        *rest, scores = all_
        scaling = rest[1].shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
        return super().attend(*rest, scores._replace(scaling=1.25 * scaling))


_WRONG = {
    "a head gets what another one found": _changed(lambda result: torch.cat([result[:, 1:2], result[:, 1:]], 1)),
    "nan": _changed(lambda result: result * float("nan")),
    "scales": _Scales,
    "positions": None,
}
"""None: the position of what is appended, by one."""


class _Backend(ReferenceBackend):
    def __init__(self, plan):
        self._plan = plan

    def plan(self, *how):
        return self._plan(*how)


@pytest.mark.parametrize("wrong", _WRONG)
def test_what_is_wrong_fails_in_16_bits_too(wrong):
    spec, module, forward = _model("eight")
    plan = _WRONG[wrong]

    def misplaced(iteration, wanted):
        positions = iteration.batch.positions
        if int(positions[0]):
            iteration.batch = replace(iteration.batch, positions=positions + 1)
        return forward(iteration, wanted)

    backend = ReferenceBackend() if plan is None else _Backend(plan)
    words = r"fails its self-check: .* of the same weights in float32 by" + " nan" * (wrong == "nan")
    with pytest.raises(UnsupportedModel, match=words):
        check_against_eager(module, forward if plan else misplaced, spec, CPU, backend, CHUNK)


def test_a_product_that_is_wrong_for_so_many_rows_fails():
    """As one that this machine's compiler got wrong."""
    spec, module, forward = _model("llama", torch.float32)
    assert check_against_eager(module, forward, spec, CPU).against == "eager"
    for rows in (1, 3):

        def wrong(iteration, wanted, rows=rows):
            return forward(iteration, wanted) * (1.01 if len(wanted) == rows else 1)

        with pytest.raises(UnsupportedModel, match="fails its self-check"):
            check_against_eager(module, wrong, spec, CPU)


def test_a_layer_that_attends_twice_is_told(monkeypatch):
    def twice(module, *args, **kwargs):
        paged_attention(module, *args, **kwargs)
        return paged_attention(module, *args, **kwargs)

    for place in ("model", "weights"):
        monkeypatch.setattr(f"pensieve.device.{place}.register", lambda: None)
    monkeypatch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, twice)
    with pytest.raises(UnsupportedModel, match="called 4 times"):
        tiny_model("llama", fused=False)


def test_upcast_holds_one_layer_at_a_time_and_lets_go_of_it_when_a_forward_fails():
    spec, module, _ = _model("eight")
    layers, seen = module.model.layers, []

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


# -- which of them serves ---------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen_of(monkeypatch):
    """Chooses among backends, of which "absent" is not installed, and "wrong" computes something else."""
    load, wrong = loaded.load_backend, _changed(lambda result: result + 1.0)

    def load_backend(name, *where):
        if name == "absent":
            raise EngineMissing("It is not installed.")
        backend = _Backend(wrong) if name == "wrong" else load(name, *where)
        backend.name = name
        return backend

    monkeypatch.setattr(loaded, "load_backend", load_backend)
    return lambda model, *backends: choose(model.module, ModelAsked(model.spec, chunk_tokens=16), CPU, backends)


@pytest.mark.parametrize(
    ("backends", "loud"),
    [
        (("reference",), None),  # asked for
        (("absent", "native", "reference"), None),  # another kernel serves
        (("absent", "reference"), "attention_backend=reference .* Not absent: It is not installed"),
        (("wrong", "native"), "attention_backend=native .* Not wrong: .* fails its self-check"),
    ],
)
def test_the_first_that_loads_and_passes_serves_and_a_fall_back_is_warned_of(llama, chosen_of, caplog, backends, loud):
    if "native" in backends:
        try:
            loaded.load_backend("native", CPU, torch.float32, 16, 16)
        except EngineMissing as missing:
            pytest.skip(str(missing))
    chosen = chosen_of(llama, *backends)
    assert chosen.attention.name == next(name for name in backends if name not in ("absent", "wrong"))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert chosen.fell_back == (loud is not None) == bool(warned)
    assert loud is None or re.search(loud, warned[0])
    for alone, error in (("absent", EngineMissing), ("wrong", UnsupportedModel)):
        with pytest.raises(error):
            chosen_of(llama, alone)


def test_a_fused_forward_that_is_wrong_is_not_used(monkeypatch):
    def wrong(*given):
        fused = build_fused(*given)
        return type("Wrong", (), {"name": "fused", "__call__": lambda self, *given: fused(*given) * 1.01})()

    monkeypatch.setattr(loaded, "build_fused", wrong)
    model = tiny_model("llama")
    assert model.forward.name == "transformers" and model.fell_back
    assert "fails its self-check" in model.forward_note
    assert model.self_check.difference < 1e-4
