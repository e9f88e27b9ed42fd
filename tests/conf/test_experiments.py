"""Each experiment composes at both scales, each swept field has a scalar of its own, and --help has a clause for each."""

import shlex
from functools import cache

import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from pensieve.lab.compose.conf import clause, conf_folder, experiments, options
from pensieve.lab.compose.settings import check
from pensieve.lab.trial.command import compose_jobs, plan_jobs
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


def commands_of(name):
    """Those at the head of its file, as words after runners/run.py, and how many trials it says that the first one has."""
    head = (conf_folder() / "experiment" / f"{name}.yaml").read_text().partition("\ndefaults:")[0]
    lines = [line.lstrip("# ") for line in head.replace("\\\n#", "").splitlines()]
    typed = [line.partition(" # ")[::2] for line in lines if line.startswith("python runners/run.py")]
    return [shlex.split(command)[2:] for command, _ in typed], int(typed[0][1].split()[0])


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
    check({key: value for key, value in cfg.items() if key != "hydra"})
    for axis in axes:
        if "." in axis:
            assert str(OmegaConf.select(cfg, axis)).lower() in str(axes[axis]).split(","), axis


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_begins_with_commands_that_run_it_and_what_it_shows(name):
    commands, trials = commands_of(name)
    counts = []
    for words in commands:
        assert words[0] == f"experiment={name}"
        with hydra_session():
            typed = [word for word in words if word != "-m"]
            hydra = GlobalHydra.instance().hydra
            config = hydra.compose_config("config", typed, RunMode.MULTIRUN, with_log_configuration=False)
            jobs = plan_jobs(config)
            check(next(compose_jobs(config, jobs)))
            counts.append(len(jobs.jobs))
    assert counts[0] == trials and min(counts) > 1
    assert 20 < len(clause(name)) < 95
    assert any(line.startswith(f"  {name} ") for line in experiments())
