"""The fused forwards against transformers' own, packed and joined; how one is chosen, and refused."""

import copy

import psutil
import pytest
import torch

from pensieve.device.asked import ModelAsked
from pensieve.device.attention import register
from pensieve.device.fused import build_fused
from pensieve.device.fused.decoder import FusedModel, packable
from pensieve.device.fused.few_rows import serves
from pensieve.device.model import load_model
from pensieve.device.self_check import check_against_eager
from pensieve.device.weights import _random
from pensieve.specs import ModelSpec

from .driver import ARCHITECTURES, plain_logits, tiny_model, tiny_spec


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_equals_transformers(name, model_of):
    """By the self-check: of what serves when the model was loaded, and here of weights that are joined and not packed."""
    model = model_of(name)
    assert model.forward.packed == serves(torch.float32) and not model.forward_note
    module = copy.deepcopy(model.module)
    fused = build_fused(module, pack=False)
    assert isinstance(fused, FusedModel) and not fused.packed
    assert check_against_eager(module, fused, model.spec, model.device).difference < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
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
    """The limit alone decides, not what the process holds, which earlier trials left: the same trial would have another
    speed. Without a limit it is what the machine has free."""
    for here in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda here=here: here)
        assert packable(copy.deepcopy(llama.module).to(torch.bfloat16)) is (here and serves(torch.bfloat16))
    assert not packable(copy.deepcopy(llama.module).to(torch.float16)), "only a type that C multiplies too"
    enough = 5 * sum(weight.nbytes for weight in llama.module.parameters())
    for ballast, available in ((0, 2**40), (2**40, llama.spec.weight_bytes)):
        held = type("Resident", (), {"rss": ballast, "vms": ballast, "available": available, "total": 2**40})
        monkeypatch.setattr(psutil.Process, "memory_info", lambda self, held=held: held)
        monkeypatch.setattr("pensieve.device.fused.decoder.psutil.virtual_memory", lambda held=held: held)
        for limit, packed in ((enough, True), (enough - 1, False), (None, ballast == 0)):
            assert packable(llama.module, limit) is (packed and serves(torch.float32))
    assert tiny_model("llama").forward.name == "fused"


PHI3 = {**ARCHITECTURES["llama"], "model_type": "phi3", "pad_token_id": 0, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (PHI3, "phi3"),
        ({**ARCHITECTURES["opt"], "do_layer_norm_before": False}, "layer norms after"),
        ({**ARCHITECTURES["opt"], "word_embed_proj_dim": 32}, "projected embeddings"),
        ({**ARCHITECTURES["llama"], "hidden_act": "mish"}, "activation mish"),
        ({**ARCHITECTURES["gpt2"], "activation_function": "mish"}, "activation mish"),
    ],
)
def test_what_has_no_fused_forward_runs_on_transformers(architecture, words):
    model = load_model(ModelAsked(ModelSpec.from_architecture("other", architecture), threads=1))
    assert model.forward.name == "transformers" and words in model.forward_note


def test_modules_of_another_make_are_left_to_transformers():
    module = tiny_model("llama").module
    del module.model.layers[0].self_attn.scaling
    built = build_fused(module)
    assert isinstance(built, str) and "scaling" in built


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
