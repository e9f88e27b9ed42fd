"""Every experiment has a variant for two CPU cores, and every swept field a scalar of its own."""

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pensieve.compose import check, options
from tests.composed import hydra_session

EXPERIMENTS = [
    "demo_sequential", "hotness", "hotness_users", "hotness_interval", "sharegpt_light", "sharegpt_full",
    "sharegpt_gemma", "prefix_invalidation", "prefix_invalidation_batch", "llm_decode", "agent_scaling",
]  # fmt: skip


def composed(name):
    with hydra_session():
        return compose(config_name="config", overrides=[f"experiment={name}"], return_hydra_config=True)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_small_variant_is_the_tiny_model_on_the_cpu_with_the_same_axes(name):
    assert {name, f"{name}_small"} <= set(options("experiment"))
    large, small = composed(name), composed(f"{name}_small")
    assert (small.model.name, small.cache.name, small.hardware.name) == ("tiny", "demo", "cpu")
    assert small.workload.name == large.workload.name
    assert list(small.hydra.sweeper.params) == list(large.hydra.sweeper.params)
    assert small.hydra.sweeper.params.seed == "0"


@pytest.mark.parametrize("name", [*EXPERIMENTS, *(f"{name}_small" for name in EXPERIMENTS)])
def test_baseline_is_the_innermost_axis_and_swept_fields_have_a_scalar(name):
    cfg = composed(name)
    axes = list(cfg.hydra.sweeper.params)
    assert axes[-1] == "baseline"
    check({key: value for key, value in cfg.items() if key != "hydra"})
    for axis in axes:
        if "." in axis:
            assert str(OmegaConf.select(cfg, axis)) in cfg.hydra.sweeper.params[axis].split(",")


def test_sharegpt_overlays_have_their_users_turns_and_conversations():
    asked = {"light": (3, 5, 10, 5), "full": (32, 10, 30, 20), "gemma": (16, 10, 20, 15)}
    for name, numbers in asked.items():
        w = composed(f"sharegpt_{name}").workload
        assert (w.users, w.min_turns, w.max_turns, w.conversations) == numbers
    assert composed("sharegpt_full").workload.max_new_tokens == 1024
    gemma = composed("sharegpt_gemma")
    assert (gemma.model.name, gemma.workload.max_new_tokens) == ("gemma2_27b_it", 512)
