"""A model in numbers, against transformers; and the models whose numbers are not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import UnsupportedModel
from pensieve.lab.compose import plan_trial
from pensieve.specs import GATED, PLAIN, ModelSpec
from tests.composed import checked
from tests.hub_cache import fill, unreachable

SIZES: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "intermediate_size": 1400, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 512, "n_layer": 3, "n_head": 8, "vocab_size": 1000, "n_positions": 512},
    "opt": {
        **SIZES,
        "ffn_dim": 1400,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "word_embed_proj_dim": 512,
    },
    "gpt_neox": {**SIZES, "num_key_value_heads": None},
}
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize("model_type", sorted(GATED | PLAIN))
def test_an_architecture_that_is_known_has_the_parameters_and_heads_of_transformers(model_type: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    given = OTHER_NAMES.get(model_type, SIZES)
    config = AutoConfig.for_model(model_type, **{name: value for name, value in given.items() if value is not None})
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    spec = ModelSpec.from_architecture("x", {**given, "model_type": model_type})
    assert spec.uncounted is None
    counted = sum(weight.numel() for weight in module.parameters())
    assert spec.parameters == pytest.approx(counted, rel=0.005)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 64)


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        (MIXTRAL, r"has experts \(num_local_experts=8\)"),
        ({**SIZES, "model_type": "qwen3_moe", "num_experts": 128}, r"has experts \(num_experts=128\)"),
        ({**SIZES, "model_type": "deepseek_v3", "n_routed_experts": 256}, r"has experts \(n_routed_experts=256\)"),
        ({**SIZES, "model_type": "llama", "num_experts": 4}, r"has experts \(num_experts=4\)"),
        ({**SIZES, "model_type": "x", "ffn_config": {"moe_num_experts": 16}}, r"has experts \(moe_num_experts=16\)"),
        ({**SIZES, "model_type": "x", "text_config": {"moe_num_experts": [64, 64]}}, "has experts"),
        ({**SIZES, "model_type": "bloom"}, r"is of an architecture \(bloom\) whose parameters are not known"),
        (SIZES, r"is of an architecture \(no model_type\)"),
    ],
)
def test_a_model_whose_parameters_are_not_known_is_not_simulated(
    architecture: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    unreachable(monkeypatch, tmp_path)
    fill(tmp_path, "org/name", {"config.json": architecture})
    for given in (tmp_path, "org/name"):
        config = checked("model=hf", f"model.hub_id={given}", "hardware=sim_h100")
        with pytest.raises(UnsupportedModel, match=f"{says}.*; use hardware=local, or another model") as caught:
            plan_trial(config)
        assert str(caught.value).count(". ") == 0


def test_a_model_with_experts_is_still_run_for_real_and_one_expert_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    plan = plan_trial(checked("model=hf", f"model.weights={tmp_path}", "hardware=cpu", "cache.gpu=256 tokens"))
    assert plan.model.uncounted is not None
    one = {**SIZES, "model_type": "llama", "num_local_experts": 1, "num_experts_per_tok": 1, "enable_moe_block": True}
    assert ModelSpec.from_architecture("x", one).uncounted is None
