"""Variants of the experiments for two CPU cores: the same axes, no two the same jobs, and a scalar for every swept field."""

from functools import cache

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pensieve.compose import check, options
from tests.composed import hydra_session

EXPERIMENTS = [
    "demo_sequential", "hotness", "hotness_users", "hotness_interval", "sharegpt_light", "sharegpt_full",
    "prefix_invalidation", "prefix_invalidation_batch", "llm_decode", "agent_scaling",
]  # fmt: skip


@cache
def composed(name):
    """Read only: one for all tests."""
    with hydra_session():
        return compose(config_name="config", overrides=[f"experiment={name}"], return_hydra_config=True)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_small_variant_is_the_tiny_model_on_the_cpu_with_the_same_axes(name):
    assert {name, f"{name}_small"} <= set(options("experiment"))
    large, small = composed(name), composed(f"{name}_small")
    assert (small.model.name, small.cache.name, small.hardware.name) == ("tiny", "cramped", "cpu")
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


def test_no_two_experiments_are_the_same_jobs():
    named: dict[str, str] = {}
    for name in options("experiment"):
        cfg = composed(name)
        jobs = OmegaConf.to_container(cfg)
        del jobs["hydra"], jobs["experiment_name"]
        known = named.setdefault(repr((jobs, cfg.hydra.sweeper.params)), name)
        assert known == name, f"{name} runs what {known} runs"


def test_sharegpt_overlays_have_their_models_and_replies():
    for name, model, replies in (("full", "llama3_8b", 1024), ("gemma", "gemma2_27b_it", 512)):
        cfg = composed(f"sharegpt_{name}")
        assert (cfg.model.name, cfg.workload.max_new_tokens) == (model, replies)
