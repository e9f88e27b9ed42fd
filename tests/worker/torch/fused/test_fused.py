"""The fused forwards against transformers' own, packed and joined; how one is chosen, and refused."""

from __future__ import annotations

import copy

import psutil
import pytest
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device import choice as loading
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import Iteration, register
from pensieve.device.batch import BlockTables, build_batch
from pensieve.device.fused import build_fused
from pensieve.device.fused.decoder import FusedModel
from pensieve.device.fused.few_rows import FewRows
from pensieve.device.fused.linear import packable
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import load_model
from pensieve.device.weights import _random
from pensieve.errors import EngineMissing
from pensieve.specs import ModelSpec
from tests.worker.torch.driver import ARCHITECTURES, Driver, plain_logits, random_tokens, tiny_model, tiny_spec

CHUNK = 8


def _logits(forward, model, tokens, wanted):
    """[len(wanted), vocab] of one prompt in scattered blocks that hold NaN before."""
    pool = KvTensors(model.spec, CHUNK, 16, 0, model.device, model.dtype)
    pool.gpu.fill_(float("nan"))
    tables = BlockTables()
    tables.overwrite(0, 0, (11, 3, 14, 0, 9, 6))
    row = Row(0, ((0, len(tokens)),), tuple(tokens), Sample(len(tokens)))
    batch = build_batch([row], tables, {}, CHUNK, model.device)
    with torch.inference_mode():
        logits = forward(Iteration(batch, pool.gpu_tokens(), CHUNK), torch.tensor(wanted))
    return logits


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize(
    ("length", "wanted"), [(1, [0]), (2, [1]), (3, [0, 2]), (4, [3]), (37, [36]), (37, [0, 5, 20, 21, 36])]
)
def test_equals_transformers(name, pack, length, wanted, model_of):
    model = model_of(name)
    fused = _BUILT.setdefault((name, pack), build_fused(copy.deepcopy(model.module), pack))
    assert isinstance(fused, FusedModel), fused
    assert fused.packed == pack
    tokens = random_tokens(length, 3).tolist()
    logits = _logits(fused, model, tokens, wanted)
    expected = plain_logits(model, tokens)[wanted]
    assert logits.shape == expected.shape
    assert float((logits - expected).abs().max()) <= 1e-4


_BUILT = {}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_joined_weights_exist_once(name, model_of, tmp_path):
    """The module's parameters are views of the joined ones, say the same as before, and can still be saved."""
    module = copy.deepcopy(model_of(name).module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    memory = _storage_bytes(module)
    fused = build_fused(module, pack=False)
    assert isinstance(fused, FusedModel)
    assert _storage_bytes(module) == memory
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    first = [p for p in module.parameters() if p.dim() == 2][-1]
    assert not first.requires_grad
    module.save_pretrained(tmp_path)
    spec = ModelSpec.from_architecture(name, module.config.to_dict())
    again = load_model(ModelAsked(spec, weights=str(tmp_path), threads=1))
    assert torch.equal(plain_logits(again, [5, 6, 7]), plain_logits(model_of(name), [5, 6, 7]))


def _storage_bytes(module):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(storages.values())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_weights_that_onednn_multiplies_here_and_that_fit_twice_are_packed(llama, monkeypatch):
    assert packable(llama.module)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for here in (True, False):
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda here=here: here)
            assert packable(copy.deepcopy(llama.module).to(dtype)) is here
    assert not packable(copy.deepcopy(llama.module).to(torch.float64))
    little = type("Memory", (), {"available": llama.spec.weight_bytes, "total": 2**40})
    monkeypatch.setattr("pensieve.device.fused.linear.psutil.virtual_memory", lambda: little)
    assert not packable(llama.module)
    assert tiny_model("llama").forward.name == "fused"


def _packed_name():
    """What serves small float32 models here where there is memory: with oneDNN and a C compiler, or without."""
    if not torch.backends.mkldnn.is_available():
        return "fused"
    try:
        FewRows(torch.ones(2, 2), None)
    except EngineMissing:
        return "fused, packed weights"
    return "fused, packed weights, few rows in C"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_the_limit_alone_decides_whether_a_second_copy_is_made(llama, monkeypatch):
    """Not what the process or the machine hold, which earlier trials left: the same trial would have another speed."""
    weights, spec = sum(w.nbytes for w in llama.module.parameters()), tiny_spec("llama")
    enough = 5 * weights

    def served(memory):
        return load_model(ModelAsked(spec, threads=1, memory_bytes=memory)).forward.name

    for ballast in (0, 2**40):
        held = type("Resident", (), {"rss": ballast, "vms": ballast})
        monkeypatch.setattr(psutil.Process, "memory_info", lambda self, held=held: held)
        assert packable(llama.module, memory_bytes=enough) and not packable(llama.module, memory_bytes=enough - 1)
        assert served(enough) == _packed_name() and served(enough - 1) == served(-1) == "fused"


def _phi3():
    return ModelSpec.from_architecture(
        "phi3", {**ARCHITECTURES["llama"], "model_type": "phi3", "pad_token_id": 0, "eos_token_id": 2}
    )


def test_other_architectures_run_on_transformers():
    model = load_model(ModelAsked(_phi3(), threads=1))
    assert model.forward.name == "transformers"
    assert "phi3" in model.forward_note
    driver = Driver(model)
    driver.step(driver.prompt_row(0, random_tokens(20, 0)))
    driver.check_logits(0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("opt", {"do_layer_norm_before": False}, "layer norms after"),
        ("opt", {"word_embed_proj_dim": 32}, "projected embeddings"),
        ("llama", {"hidden_act": "mish"}, "activation mish"),
        ("gpt2", {"activation_function": "mish"}, "activation mish"),
    ],
)
def test_variants_without_a_fused_forward(name, changes, words):
    model = load_model(ModelAsked(tiny_spec(name, **changes), threads=1))
    assert model.forward.name == "transformers"
    assert words in model.forward_note


def test_a_fused_forward_that_is_wrong_is_not_used(monkeypatch):
    right = build_fused

    def wrong(module, **options):
        fused = right(module, **options)
        assert isinstance(fused, FusedModel)
        return type("Wrong", (), {"name": "fused", "__call__": lambda self, *given: fused(*given) * 1.01})()

    monkeypatch.setattr(loading, "build_fused", wrong)
    model = tiny_model("llama")
    assert model.forward.name == "transformers"
    assert "fails its self-check" in model.forward_note
    assert model.self_check.difference < 1e-4


def test_modules_of_another_make_are_left_to_transformers(monkeypatch):
    module = copy.deepcopy(tiny_model("llama").module)
    del module.model.layers[0].self_attn.scaling
    built = build_fused(module)
    assert isinstance(built, str)
    assert "scaling" in built


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_a_norm_with_trained_weights(name: str) -> None:
    """In bfloat16, as on a GPU, transformers' own. Gemma's weights are added to 1: that sum would keep 7 bits of them."""
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
