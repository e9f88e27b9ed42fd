"""Each experiment composes at both scales, each swept field has a scalar of its own, and --help has a clause for each."""

import shlex
from functools import cache

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pensieve.lab.compose import check, conf_folder, options
from pensieve.lab.compose.help import choices, clause
from tests.composed import hydra_session

EXPERIMENTS = options("experiment")
SHORTENED = sorted(str(file.relative_to(conf_folder() / "at" / "small").with_suffix(""))
                   for file in (conf_folder() / "at" / "small").rglob("*.yaml"))  # fmt: skip


@cache
def composed(name, scale="full"):
    """Read only: one for all tests."""
    with hydra_session():
        overrides = [f"experiment={name}", f"scale={scale}"]
        return compose(config_name="config", overrides=overrides, return_hydra_config=True)


def plain(cfg):
    return check({key: value for key, value in cfg.items() if key != "hydra"})


def test_only_experiments_are_shortened():
    assert set(SHORTENED) < set(EXPERIMENTS)


@pytest.mark.parametrize("name", SHORTENED)
def test_small_is_the_tiny_model_on_the_cpu_with_the_same_axes(name):
    large, small = composed(name), composed(name, "small")
    assert (small.model.name, small.cache.name, small.hardware.name) == ("tiny", "cramped", "cpu")
    assert small.workload.name == large.workload.name
    assert list(small.hydra.sweeper.params) == list(large.hydra.sweeper.params)
    assert small.hydra.sweeper.params.seed == "0"


@pytest.mark.parametrize("scale", ["full", "small"])
@pytest.mark.parametrize("name", SHORTENED)
def test_swept_fields_have_a_scalar_among_their_values(name, scale):
    cfg = composed(name, scale)
    axes = cfg.hydra.sweeper.params
    plain(cfg)
    for axis in axes:
        if "." in axis:
            assert str(OmegaConf.select(cfg, axis)).lower() in str(axes[axis]).split(","), axis


def test_no_two_experiments_are_the_same_jobs():
    named: dict[str, str] = {}
    for name, scale in [*((name, "full") for name in EXPERIMENTS), *((name, "small") for name in SHORTENED)]:
        cfg = composed(name, scale)
        jobs = OmegaConf.to_container(cfg)
        del jobs["hydra"], jobs["experiment_name"]
        known = named.setdefault(repr((jobs, cfg.hydra.sweeper.params)), f"{name} scale={scale}")
        assert known == f"{name} scale={scale}", f"{name} scale={scale} runs what {known} runs"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_begins_with_its_command_and_what_it_shows(name):
    _, command, *_ = (conf_folder() / "experiment" / f"{name}.yaml").read_text().splitlines()
    words = shlex.split(command, comments=False)
    assert words[1:4] == ["python", "runners/run.py", f"experiment={name}"]
    assert {"trials", "trials,"} & set(words)
    assert 20 < len(clause(name)) < 95
    assert f"  {name} " in choices()
    own = {"machine/fidelity_vllm": "prefix_cache", "peers/llama_cpp_cascade": "llama_cpp"}
    assert plain(composed(name)).baseline.name == own.get(name, "pensieve")
