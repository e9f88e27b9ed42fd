"""A model in numbers, against transformers; and the models whose numbers are not known."""

import json
import random

import pytest

from pensieve.errors import UnsupportedModel
from pensieve.lab.compose.plan import plan_trial
from pensieve.specs import GATED, PLAIN, ROUTED, Experts, ModelSpec
from tests.composed import checked
from tests.hub_cache import fill, unreachable

SIZES = {
    "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "intermediate_size": 1400, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
OTHER_NAMES = {
    "gpt2": {"n_embd": 512, "n_layer": 3, "n_head": 8, "vocab_size": 1000, "n_positions": 512},
    "opt": {**SIZES, "ffn_dim": 1400, "num_key_value_heads": None, "intermediate_size": None, "word_embed_proj_dim": 512},
    "gpt_neox": {**SIZES, "num_key_value_heads": None},
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 48, "num_key_value_heads": 8,
}  # fmt: skip
_ROUTED = {
    "deepseek_v2": {**_LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2, "q_lora_rank": 96, "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 64},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 300},
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 300, "head_dim": 64},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8, "intermediate_size": 300},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 700, "decoder_sparse_step": 2},
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [1], "head_dim": 64},
    "qwen3_next": {
        "num_experts": 8, "shared_expert_intermediate_size": 300, "head_dim": 64, "num_hidden_layers": 6,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
        "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip
OTHER_NAMES |= {
    name: {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 300, **fields}
    for name, fields in _ROUTED.items()
}
for _name in ("gpt_oss", "minimax_m2", "mixtral", "olmoe"):
    del OTHER_NAMES[_name]["moe_intermediate_size"]
ROOFLINE = (
    "hardware.terms.projections=roofline", "hardware.terms.attention=roofline", "hardware.compute_efficiency=0.7",
    "hardware.memory_efficiency=0.8",
)  # fmt: skip
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize("model_type", sorted(GATED | PLAIN | ROUTED))
def test_an_architecture_that_is_known_has_the_parameters_and_heads_of_transformers(model_type):
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    given = OTHER_NAMES.get(model_type, SIZES)
    config = AutoConfig.for_model(
        model_type, **{name: value for name, value in given.items() if value is not None or name == "q_lora_rank"}
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.from_architecture("x", {**given, "model_type": model_type})
    assert not spec.uncounted
    counted = sum(weight.numel() for weight in module.parameters())
    assert spec.parameters == pytest.approx(counted, rel=0.005)
    assert spec.head_dim == (64 if spec.latent else getattr(config, "head_dim", None) or 64)
    if spec.experts:
        routed = [name for name, _ in module.named_parameters() if name.endswith("experts.down_proj")]
        assert len(routed) == spec.experts.layers


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv"),
    [
        ("mixtral_8x7b", 46.7, 12.9, 131_072),
        ("qwen3_30b_a3b", 30.5, 3.3, 98_304),
        ("gpt_oss_20b", 20.9, 3.6, 49_152),
        ("deepseek_v2_lite", 15.7, 2.4, 31_104),
        ("qwen3_next_80b_a3b", 79.7, 3.6, 24_576),
    ],
)
def test_models_with_experts_have_their_published_sizes(name, billions, active, kv):
    """Parameters, those that a token passes (with the head), and KV bytes a token in 16 bits, as their model cards say."""
    spec = plan_trial(checked(f"model={name}", "hardware=sim_h100", *ROOFLINE, "cache.gpu=1000 tokens")).model
    assert round(spec.parameters / 1e9, 1) == billions
    assert (spec.linear_flops_per_token + spec.head_flops) / 2e9 == pytest.approx(active, rel=0.1)
    assert spec.kv_bytes_per_token == kv


def test_a_state_is_as_large_as_the_one_that_transformers_keeps():
    """It keeps a position more of what the convolution saw: that of the token itself."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**OTHER_NAMES["qwen3_next"], "model_type": "qwen3_next"}
    spec = ModelSpec.from_architecture("x", given)
    states = spec.states
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given)).eval()
    with torch.no_grad():
        layers = module(torch.arange(9)[None], use_cache=True).past_key_values.layers
    kept = [layer for layer in layers if getattr(layer, "recurrent_states", None) is not None]
    assert len(kept) == states.layers == 5 and len(layers) - len(kept) == spec.attending_layers

    def bytes_of(held):
        return sum(one.nbytes for one in (held.values() if isinstance(held, dict) else [held]))

    recurrent = sum(bytes_of(layer.recurrent_states) for layer in kept)
    convolved = sum(bytes_of(layer.conv_states) for layer in kept)
    assert spec.state_bytes == recurrent + convolved * (states.kernel - 1) // states.kernel
    assert spec.kv_bytes_per_token * 9 == sum(
        layer.keys.nbytes + layer.values.nbytes for layer in layers if layer not in kept
    )


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_as_many_experts_are_read_as_independent_choices_touch(tokens):
    chance, drawn = random.Random(7), 2000
    touched = [len({e for _ in range(tokens) for e in chance.sample(range(16), 3)}) for _ in range(drawn)]
    experts = Experts(count=16, active=3, intermediate=8, shared=0, layers=1)
    assert experts.touched(tokens) == pytest.approx(sum(touched) / drawn, rel=0.02)
    assert experts.touched(1) == pytest.approx(3) and Experts(4, 4, 8, 0, 1).touched(tokens) == 4


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ({**SIZES, "model_type": "bloom"}, r"is of an architecture \(bloom\) whose parameters are not known"),
        ({**SIZES, "model_type": "jetmoe", "num_local_experts": 8}, r"is of an architecture \(jetmoe\)"),
        (SIZES, r"is of an architecture \(no model_type\)"),
    ],
)
def test_a_model_whose_parameters_are_not_known_is_not_simulated(architecture, says, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    unreachable(monkeypatch, tmp_path)
    fill(tmp_path, "org/name", {"config.json": architecture})
    for given in (tmp_path, "org/name"):
        config = checked("model=hf", f"model.hub_id={given}", "hardware=sim_h100")
        with pytest.raises(UnsupportedModel, match=f"{says}.*; use hardware=local, or another model"):
            plan_trial(config)


def test_a_model_with_experts_is_still_run_for_real(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    plan = plan_trial(checked("model=hf", f"model.weights={tmp_path}", "hardware=cpu", "cache.gpu=256 tokens"))
    assert not plan.model.uncounted and plan.model.experts is not None
