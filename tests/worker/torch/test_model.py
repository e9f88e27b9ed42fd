from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from transformers import AttentionInterface

from pensieve.device.asked import ModelAsked
from pensieve.device.attention import IMPLEMENTATION, paged_attention
from pensieve.device.model import load_model, resolve_device
from pensieve.errors import HardwareMissing, UnsupportedModel, WeightsMissing
from pensieve.specs import ModelSpec

from .driver import ARCHITECTURES, Driver, plain_logits, random_tokens, tiny_model, tiny_spec


def _load(spec, weights="random", hub_id=None, seed=0, fused=True):
    return load_model(ModelAsked(spec, weights=weights, hub_id=hub_id, seed=seed, threads=1, fused=fused))


def test_random_weights_are_a_function_of_the_seed(llama):
    state = torch.random.get_rng_state()
    again, other = tiny_model("llama"), tiny_model("llama", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random numbers are left alone"
    tokens = random_tokens(10, 0)
    assert torch.equal(plain_logits(again, tokens), plain_logits(llama, tokens))
    assert not torch.allclose(plain_logits(other, tokens), plain_logits(llama, tokens), atol=0.1)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_random_weights_write_varied_text(name, model_of):
    """Of every architecture: where greedy tokens are one id for ever, a comparison of tokens says little."""
    for seed in range(4):
        driver = Driver(model_of(name))
        driver.step(driver.prompt_row(0, random_tokens(40, seed)))
        for _ in range(29):
            driver.step(driver.decode_row(0))
        said = Counter(driver.tokens[0][40:])
        assert len(said) >= 8, (seed, said)
        assert max(said.values()) <= 20, (seed, said)


def test_a_turn_ends_with_every_token_that_the_generation_settings_name(llama, monkeypatch):
    monkeypatch.setattr(llama.module.generation_config, "eos_token_id", [2, 9])
    assert llama.eos_token_ids == {2, 9}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cpu_runs_16_bits_where_it_is_asked_to(dtype):
    model = _load(ModelSpec.from_architecture("llama", ARCHITECTURES["llama"], dtype))
    assert (model.spec.dtype, model.dtype, model.module.dtype) == (dtype, getattr(torch, dtype), getattr(torch, dtype))
    assert model.self_check.against == "float32"
    assert 0 < model.self_check.difference <= model.self_check.limit


def test_a_folder_with_other_sizes_than_configured_is_refused(llama, tmp_path):
    llama.module.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="kv_heads=4, but its weights have 2"):
        _load(tiny_spec("llama", num_key_value_heads=4), str(tmp_path))


def test_weights_that_are_not_safetensors_are_not_read(llama, tmp_path):
    llama.module.config.save_pretrained(tmp_path)
    torch.save(llama.module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsMissing, match=r"model\.weights=random"):
        _load(tiny_spec("llama"), str(tmp_path))


def _saved(model, folder, files, changed):
    """A folder of the model whose weights were `changed`: in one file, or in two with an index."""
    model.module.config.save_pretrained(folder)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.module.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    changed(tensors)
    names = sorted(tensors)
    half = len(names) // 2
    parts = {"model.safetensors": names}
    if files == "several":
        parts = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
        of = {name: file for file, held in parts.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    return str(folder)


_V = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize(
    ("name", "kept", "words"),
    [
        ("llama", lambda name: name != _V, rf"lack {_V}; fetch"),
        ("llama", lambda name: ".layers.1." not in name, r"lack model\.layers\.1\..* and 4 more; fetch"),
        ("gpt2", lambda name: name != "transformer.wte.weight", r"lack .*transformer\.wte\.weight; fetch"),
        ("llama", None, rf"lack {_V} \(shape \[16, 64\] for \[32, 64\]\)"),
    ],
)
def test_weights_that_lack_a_tensor_are_not_served(name, kept, words, files, tmp_path, model_of):
    def change(tensors):
        if kept is None:
            tensors[_V] = tensors[_V][:16].clone()
        for one in [one for one in tensors if kept is not None and not kept(one)]:
            del tensors[one]

    with pytest.raises(WeightsMissing, match=words):
        _load(tiny_spec(name), _saved(model_of(name), tmp_path, files, change))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}),
        ("gpt2", {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}),
        ("gpt2", {"lm_head.weight": None}),  # tied, and saved twice
        ("gemma2", {}),
    ],
)
def test_tied_heads_and_buffers_that_are_no_weights_load(name, more, tmp_path, model_of):
    model = model_of(name)

    def add(tensors):
        for one, shape in more.items():
            tensors[one] = (
                torch.zeros(shape) if shape is not None else model.module.get_output_embeddings().weight.clone()
            )

    loaded = _load(tiny_spec(name), _saved(model, tmp_path, "one", add))
    tokens = random_tokens(10, 0)
    assert torch.equal(plain_logits(loaded, tokens), plain_logits(model, tokens))


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ("{folder}/none", WeightsMissing, r"no config\.json.*model\.weights=random"),
        ("{folder}", UnsupportedModel, "not_a_model"),
        ("hub", WeightsMissing, r"no published weights; set model\.weights=random"),
    ],
)
def test_weights_that_are_not_there_are_told_in_a_sentence(weights, error, words, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "not_a_model"}')
    with pytest.raises(error, match=words):
        _load(tiny_spec("llama"), weights.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("failure", "words"),
    [("OfflineModeIsEnabled", "HF_HUB_OFFLINE is set"), ("ConnectionError", "the hub cannot be reached")],
)
def test_no_network_is_one_sentence_at_once(failure, words, monkeypatch, tmp_path, capfd):
    import huggingface_hub
    from huggingface_hub import errors

    asked = []

    def unreachable(self, hub_id, **kwargs):
        asked.append(hub_id)
        raise getattr(errors, failure, ConnectionError)("down")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr("pensieve.hub._answers", {})
    capfd.readouterr()
    with pytest.raises(WeightsMissing, match=rf"{words}.*model\.weights=random") as caught:
        _load(tiny_spec("llama"), "hub", "nobody/nothing")
    assert asked == ["nobody/nothing"], "asked once, and not again"
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_device_that_is_not_there():
    with pytest.raises(HardwareMissing, match=r"hardware\.device=tpu"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(HardwareMissing, match="no usable GPU"):
            resolve_device("cuda")
        assert resolve_device("auto").type == "cpu"


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "intermediate_size": 32,
}
_REFUSED = {
    "falcon": (_SMALL, "own attention code"),
    "gpt_oss": (
        {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "attends in a way",
    ),
    "bert": (_SMALL, "fails its self-check: .* differ from its own by"),
}


@pytest.mark.parametrize("model_type", sorted(_REFUSED))
def test_architectures_that_would_be_wrong_are_refused(model_type):
    architecture, words = _REFUSED[model_type]
    spec = ModelSpec.from_architecture("x", {"model_type": model_type, "max_position_embeddings": 64, **architecture})
    with pytest.raises(UnsupportedModel, match=words):
        _load(spec)


def test_rotary_angles_that_depend_on_the_batch_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="dynamic rotary scaling"):
        _load(tiny_spec("llama", rope_parameters=rope))


def _unscaled(module, query, *args, **kwargs):
    return paged_attention(module, query * 1.05, *args, **kwargs)


def _reads_too_much(module, query, key, value, mask, **kwargs):
    """Attends to the batch's own keys only: right for a whole prompt, wrong for the second piece of one."""
    heads = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(heads, 1) for x in (key, value))
    paged_attention(module, query, key, value, mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=query.shape[2] > 1)
    return output.transpose(1, 2), None


def _twice(module, *args, **kwargs):
    paged_attention(module, *args, **kwargs)
    return paged_attention(module, *args, **kwargs)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(_unscaled, "fails its self-check"), (_reads_too_much, "fails its self-check"), (_twice, "called 4 times")],
)
def test_the_self_check_rejects_a_wrong_attention(wrong, words, monkeypatch):
    for place in ("model", "weights"):
        monkeypatch.setattr(f"pensieve.device.{place}.register", lambda: None)
    monkeypatch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, wrong)
    with pytest.raises(UnsupportedModel, match=words):
        _load(tiny_spec("llama"), fused=False)


def test_a_model_larger_than_the_machine_is_refused_before_it_is_allocated():
    huge = tiny_spec("llama", hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=100)
    with pytest.raises(HardwareMissing, match=r"TiB for its weights in float32, and cpu has .*sim_a100_80g"):
        _load(huge)
