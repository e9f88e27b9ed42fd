import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from pensieve.errors import ConfigError
from pensieve.trial.jobs import compose_jobs, plan_jobs
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


def test_baseline_stays_innermost_whatever_else_is_swept():
    config = sweep_config("cache=small,medium", "model=llama3_8b", "seed=5")
    jobs = plan_jobs(config)
    assert list(jobs.axes) == ["cache", "baseline"]
    swept = [dict(text.split("=") for text in job) for job in jobs.jobs]
    assert [job["baseline"] for job in swept] == [*BASELINES] * 2
    assert {job["seed"] for job in swept} == {"5"}
    assert set(jobs.overrides) == {"model=llama3_8b", "seed=5"}
    # What the sweeper itself reads has the same order.
    assert list(OmegaConf.to_container(config.hydra.sweeper.params)) == ["seed", "cache", "baseline"]


def test_each_job_is_what_hydra_composes_of_it():
    """Though jobs that differ in the seed alone are composed once, and share nothing."""
    config = sweep_config("hardware=sim_h100", "baseline=pensieve", "model.seed=1,2", "seed=0,x")
    jobs = plan_jobs(config)
    for job, cfg in zip(jobs.jobs, compose_jobs("config", config, jobs), strict=True):
        assert cfg == compose(config_name="config", overrides=list(job))
        with open_dict(cfg):
            cfg.workload.users, cfg.cache = 99, None


def test_a_swept_baseline_on_the_command_line_replaces_the_default():
    jobs = plan_jobs(sweep_config("baseline=pensieve,stateless", "seed=range(2)"))
    assert jobs.axes == {"seed": ("0", "1"), "baseline": ("pensieve", "stateless")}


def test_none_leaves_the_axes_to_the_command_line():
    jobs = plan_jobs(sweep_config("sweep=none", "eviction=retention_value,lru"))
    assert jobs.axes == {"eviction": ("retention_value", "lru")}
    assert jobs.jobs == (("eviction=retention_value", "sweep=none"), ("eviction=lru", "sweep=none"))


def test_an_overlay_states_its_own_axes():
    jobs = plan_jobs(sweep_config("experiment=sim_eviction"))
    assert list(jobs.axes) == ["seed", "eviction", "baseline"]
    assert len(jobs.jobs) == 12


def test_sweeping_experiment_is_refused():
    with pytest.raises(ConfigError, match="experiment cannot be swept"):
        plan_jobs(sweep_config("experiment=sim_eviction,sim_llama3_8b"))


def test_a_value_typed_twice_is_one_job_for_us_and_for_the_sweeper():
    config = sweep_config("seed=0,0,1", "baseline=pensieve")
    assert plan_jobs(config).axes == {"seed": ("0", "1")}
    assert list(config.hydra.overrides.task) == ["seed=0,1", "baseline=pensieve"]
    one = sweep_config("seed=0,0", "baseline=pensieve,pensieve")
    assert len(plan_jobs(one).jobs) == 1


def test_a_job_is_composed_when_it_is_asked_for(monkeypatch):
    composed = []

    def counted(name, overrides):
        composed.append(overrides)
        return OmegaConf.create({"seed": None})

    monkeypatch.setattr("pensieve.trial.jobs.compose_job", counted)
    config = sweep_config()
    configs = compose_jobs("config", config, plan_jobs(config))
    next(configs)
    assert len(composed) == 1
    assert [cfg.seed for cfg in configs] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    assert len(composed) == len(BASELINES), "once a baseline, whatever the seed"
