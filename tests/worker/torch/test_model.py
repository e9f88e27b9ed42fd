import gc
import weakref
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from pensieve.device.asked import ModelAsked
from pensieve.device.model import load_model
from pensieve.device.shelf import empty, kept_host_bytes, open_shelf, take_model
from pensieve.errors import HardwareMissing, UnsupportedModel, WeightsMissing
from pensieve.specs import ModelSpec

from .driver import ARCHITECTURES, Hand, plain_logits, random_tokens, tiny_model, tiny_spec


def _load(spec, weights="random", hub_id=None):
    return load_model(ModelAsked(spec, weights=weights, hub_id=hub_id, threads=1))


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
    hand = Hand(model_of(name))
    said = Counter(hand.prompt()[40:])
    for at in range(40, 69):
        said.update(hand.step(hand.decode(at), tables=((0, 5, (8, 9, 10, 11)),)).tokens.values())
    assert len(said) >= 8 and max(said.values()) <= 20, said


def test_a_turn_ends_with_every_token_that_the_generation_settings_name(llama, monkeypatch):
    monkeypatch.setattr(llama.module.generation_config, "eos_token_id", [2, 9])
    assert llama.eos_token_ids == {2, 9}


def _reloaded(model, folder, changed):
    """Saved with weights that were `changed`, and loaded again."""
    model.module.config.save_pretrained(folder)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.module.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    changed(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return _load(model.spec, str(folder))


_V = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("name", "kept", "words"),
    [
        ("llama", lambda name: name != _V, rf"lack {_V}; fetch"),
        ("llama", lambda name: ".layers.1." not in name, r"lack model\.layers\.1\..* and 4 more; fetch"),
        ("gpt2", lambda name: name != "transformer.wte.weight", r"lack .*transformer\.wte\.weight; fetch"),
        ("llama", None, rf"lack {_V} \(shape \[16, 64\] for \[32, 64\]\)"),
    ],
)
def test_weights_that_lack_a_tensor_are_not_served(name, kept, words, tmp_path, model_of):
    def change(tensors):
        for one in list(tensors):
            if kept is None and one == _V:
                tensors[_V] = tensors[_V][:16].clone()
            elif kept is not None and not kept(one):
                del tensors[one]

    with pytest.raises(WeightsMissing, match=words):
        _reloaded(model_of(name), tmp_path, change)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}),
        ("gpt2", {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}),
        ("gpt2", {"lm_head.weight": None}),  # tied, and saved twice
    ],
)
def test_tied_heads_and_buffers_that_are_no_weights_load(name, more, tmp_path, model_of):
    model = model_of(name)

    def add(tensors):
        for one, shape in more.items():
            tensors[one] = model.module.lm_head.weight.clone() if shape is None else torch.zeros(shape)

    loaded, tokens = _reloaded(model, tmp_path, add), random_tokens(10, 0)
    assert torch.equal(plain_logits(loaded, tokens), plain_logits(model, tokens))


def test_weights_that_are_not_there_are_told_in_a_sentence(llama, tmp_path):
    other, saved = tmp_path / "other", tmp_path / "saved"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "not_a_model"}')
    llama.module.config.save_pretrained(saved)
    torch.save(llama.module.state_dict(), saved / "pytorch_model.bin")
    wider = tiny_spec("llama", num_key_value_heads=4)
    for spec, weights, error, words in (
        (llama.spec, f"{tmp_path}/none", WeightsMissing, r"no config\.json.*model\.weights=random"),
        (llama.spec, str(other), UnsupportedModel, "not_a_model"),
        (llama.spec, str(saved), WeightsMissing, r"model\.weights=random"),  # no safetensors
        (wider, str(saved), UnsupportedModel, "kv_heads=4, but its weights have 2"),
        (llama.spec, "hub", WeightsMissing, r"no published weights; set model\.weights=random"),
    ):
        with pytest.raises(error, match=words):
            _load(spec, weights)


_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
_MIXED = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


@pytest.mark.parametrize(
    ("model_type", "more", "words"),
    [
        ("falcon", {}, "own attention code"),
        ("gpt_oss", _MIXED, "attends in a way"),
        ("bert", {}, "fails its self-check: .* differ from its own by"),
        ("llama", _ROPE, "dynamic rotary scaling"),  # angles that depend on the batch
    ],
)
def test_architectures_that_would_be_wrong_are_refused(model_type, more, words):
    with pytest.raises(UnsupportedModel, match=words):
        _load(ModelSpec.from_architecture("x", {"model_type": model_type, **_SMALL, **more}))


def test_a_model_larger_than_the_machine_is_refused_before_it_is_allocated():
    huge = tiny_spec("llama", hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=100)
    with pytest.raises(HardwareMissing, match=r"PiB for its weights in float32, and cpu has .*sim_a100_80g"):
        _load(huge)


def take(**asked):
    return take_model(ModelAsked(tiny_spec("llama"), threads=1, **asked))


def test_what_is_kept_counts_as_free_and_leaves_memory_before_the_next_one_comes():
    """Also where a circle of references holds it, as the frame does in which transformers was imported first."""
    assert kept_host_bytes() == 0
    with open_shelf():
        model = take()
        assert kept_host_bytes() == sum(p.nbytes for p in (*model.module.parameters(), *model.module.buffers())) > 0
        first = weakref.ref(model.module)
        gc.disable()
        try:
            circle = [model.module]
            circle.append(circle)
            del circle, model
            take(seed=1)
        finally:
            gc.enable()
        assert first() is None
        assert take(seed=1).reused and not take(seed=1, attention="reference").reused
        empty()
        assert kept_host_bytes() == 0 and not take().reused
    assert kept_host_bytes() == 0
