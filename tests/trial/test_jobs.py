import math

import pytest
from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import open_dict

from pensieve.errors import ConfigError
from pensieve.lab.trial.command import compose_jobs, plan_jobs, run_job
from pensieve.lab.trial.job import Outcome
from tests.composed import hydra_session


def sweep_config(*overrides):
    hydra = GlobalHydra.instance().hydra
    return hydra.compose_config("config", list(overrides), RunMode.MULTIRUN, with_log_configuration=False)


BASELINES = ("pensieve", "gpu_only", "stateless", "prefix_cache")


@pytest.fixture(autouse=True)
def session():
    with hydra_session():
        yield


def test_the_default_sweep_runs_seeds_outside_and_baselines_inside():
    jobs = plan_jobs(sweep_config())
    assert list(jobs.axes.items()) == [("seed", ("0", "1", "2", "3", "4")), ("baseline", BASELINES)]
    assert jobs.jobs[:2] == (("seed=0", "baseline=pensieve"), ("seed=0", "baseline=gpu_only"))
    assert len(jobs.jobs) == 20


@pytest.mark.parametrize(
    "overrides",
    [
        ("hardware=sim_h100", "baseline=pensieve", "model.seed=1,2", "seed=0,x"),
        ("seed=0,007", "baseline=pensieve,stateless"),
        ("seed=1,null", "++seed=2", "sweep=none"),
        ("experiment=paper/ablation_eviction", "eviction=lru", "baseline=pensieve"),
    ],
)
def test_each_job_is_what_hydra_composes_of_it(overrides):
    """Though jobs that differ in the seed alone are composed once, and share nothing."""
    config = sweep_config(*overrides)
    jobs = plan_jobs(config)
    plain = [compose(config_name="config", overrides=[*_typed(config, jobs), *job]) for job in jobs.jobs]
    for cfg, expected in zip(compose_jobs(config, jobs), plain, strict=True):
        assert cfg == expected
        with open_dict(cfg):
            cfg.workload.users, cfg.cache = 99, None


def _typed(config, jobs):
    """What was typed and is in no job."""
    return [
        text for text in config.hydra.overrides.task if all(text not in job for job in jobs.jobs) and "," not in text
    ]


def test_a_sweep_composes_jobs_that_differ_in_the_seed_once(monkeypatch, tmp_path):
    composed = []
    load = ConfigLoaderImpl._load_configuration_impl

    def counted(self, *given, **named):
        composed.append(named["overrides"])
        return load(self, *given, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    ran = []
    monkeypatch.setattr(
        "pensieve.lab.trial.sweep.run_trial", lambda job, *_: ran.append(job.config) or Outcome(0, "failed")
    )
    monkeypatch.setattr("pensieve.lab.trial.sweep.OpenSweep.finish", lambda sweep: True)
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    words = "hydra.mode=MULTIRUN model=llama3_8b hardware=sim_h100 tracking=off trial.isolate=false seed=0,1,2"
    axes = ["baseline=pensieve,gpu_only,stateless", "cache=small,medium"]
    with pytest.raises(SystemExit) as ended:
        GlobalHydra.instance().hydra.multirun("config", run_job, [*words.split(), *axes])
    assert ended.value.code == 0
    assert [one["seed"] for one in ran] == [0] * 6 + [1] * 6 + [2] * 6
    assert [one["baseline"]["name"] for one in ran[:3]] == ["pensieve", "gpu_only", "stateless"]
    assert len(composed) == 1 + 6, composed


@pytest.mark.parametrize(
    ("typed", "axes"),
    [
        (("baseline=pensieve,stateless", "seed=range(2)"), {"seed": 2, "baseline": 2}),  # in place of the default
        (("sweep=none", "eviction=retention_value,lru"), {"eviction": 2}),
        (("experiment=peers/prefix_invalidation",), {"workload.blocks": 3, "baseline": 2}),  # its own
    ],
)
def test_the_axes_are_those_typed_or_of_the_overlay_or_the_default(typed, axes):
    jobs = plan_jobs(sweep_config(*typed))
    assert {name: len(values) for name, values in jobs.axes.items()} == axes and list(jobs.axes) == list(axes)
    assert len(jobs.jobs) == math.prod(axes.values())


@pytest.mark.parametrize("typed", ["experiment=demo,paper/ablation_eviction", "slo.ttft_ms=1,2"])
def test_what_cannot_be_swept_is_refused(typed):
    with pytest.raises(ConfigError, match=f"{typed.partition('=')[0]} cannot be swept"):
        plan_jobs(sweep_config(typed))


@pytest.mark.parametrize("typed", ["seed=0,0,1", "workload.pressure=2,3,2.0", "baseline=pensieve,pensieve"])
def test_a_value_typed_twice_would_count_one_trial_as_two(typed):
    with pytest.raises(ConfigError, match="names a value twice"):
        plan_jobs(sweep_config(typed))
