"""The command run, as Hydra calls it: the jobs of a sweep, the callback before and after them, and the task function of one.

A mistake in the configuration is told before the libraries of a trial are imported: those of the database, of numbers and of
tables take longer than everything until then.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from pensieve.errors import ConfigError
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import TrialConfig, check, resolved
from pensieve.lab.results.identity import numbers_by_value
from pensieve.lab.trial.terminal import in_a_sentence

if TYPE_CHECKING:
    from pensieve.lab.trial.sweep import OpenSweep


BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
INNERMOST = "baseline"
_SEED = re.compile(r"seed=(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Jobs:
    """overrides: shared by all jobs. axes: the values of each swept field, outermost first. jobs: each one's overrides."""

    overrides: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    jobs: tuple[tuple[str, ...], ...]


def in_turn(config: DictConfig) -> bool:
    """Whether the sweep runs its jobs itself. It does not where something is set that Hydra alone does for a job: a launcher,
    a name of its folder, a working directory, variables of the environment, a callback."""
    hydra = config.hydra
    folder = OmegaConf.to_container(hydra.sweep, resolve=False)
    assert isinstance(folder, dict)
    plain = folder["subdir"] == "${hydra.job.num}" and not hydra.job.chdir and not hydra.job.env_set
    return bool(hydra.launcher._target_ == BASIC_LAUNCHER and plain and list(hydra.callbacks) == ["sweep"])


def plan_jobs(config: DictConfig) -> Jobs:
    """Make baseline the innermost axis in the sweeper's own parameters, then list the jobs.

    Raises ConfigError where `experiment` is swept (the axes that an overlay states would be ignored), or a field of slo, or
    by a sweeper that chooses its jobs as it goes.
    """
    if config.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
        raise ConfigError("A sweep runs every combination of its axes; leave hydra/sweeper as it is.")
    given = [str(text) for text in config.hydra.overrides.task]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    typed = {o.get_key_element(): o for o in parser.parse_overrides(given)}
    params = {str(k): str(v) for k, v in (config.hydra.sweeper.params or {}).items()}
    params |= {key: str(o.input_line).partition("=")[2] for key, o in typed.items() if o.is_sweep_override()}
    # baseline varies fastest, so that baselines interleave.
    params = dict(sorted(params.items(), key=lambda one: one[0] == INNERMOST))
    with read_write(config.hydra.sweeper), open_dict(config.hydra.sweeper):
        config.hydra.sweeper.params = params
    overrides = parser.parse_overrides([f"{key}={value}" for key, value in params.items()] + given)
    final = {o.get_key_element(): o for o in overrides}
    axes = {key: tuple(o.sweep_string_iterator()) for key, o in final.items() if o.is_sweep_override()}
    if "experiment" in axes:
        raise ConfigError(
            "experiment cannot be swept: the axes that an overlay states would be ignored; run one after another."
        )
    for key, values in axes.items():
        if key.startswith("slo."):
            raise ConfigError(
                f"{key} cannot be swept: it runs nothing, and a sweep is judged by one objective at a time."
            )
        if len({numbers_by_value(value) for value in values}) < len(values):
            raise ConfigError(f"{key}={','.join(values)} names a value twice; each is one trial.")
    fixed = tuple(sorted(str(o.input_line) for key, o in final.items() if key not in axes))
    return Jobs(fixed, axes, tuple(tuple(job) for job in BasicSweeper.split_arguments(overrides, None)[0]))


def compose_jobs(config: DictConfig, jobs: Jobs) -> Iterator[DictConfig]:
    """The configuration of each job, without Hydra's own part, composed when it is asked for. config: that of the sweep.

    Jobs that differ only in the seed are composed once: it is a plain field, on which no choice of an option depends."""
    loader = GlobalHydra.instance().config_loader()
    kept: dict[tuple[str, ...], bytes] = {}  # pickled: read back faster than copied
    for overrides in jobs.jobs:
        seeds = [text for text in overrides if text.lstrip("+~").startswith("seed=")]
        seed = _SEED.fullmatch(seeds[0]) if len(seeds) == 1 else None
        alike = tuple(text for text in overrides if seed is None or text not in seeds)
        if alike not in kept:
            composed = loader.load_sweep_config(config, list(overrides))
            with open_dict(composed):
                del composed["hydra"]
            kept[alike] = pickle.dumps(composed, protocol=pickle.HIGHEST_PROTOCOL)
        found = pickle.loads(kept[alike])
        assert isinstance(found, DictConfig)
        if seed is not None:
            found.seed = int(seed[1])
        yield found


def inspected(configs: Sequence[TrialConfig]) -> bool:
    """Whether workloads were to be described alone (workload.inspect); they are printed then."""
    if not any(config.workload.get("inspect") for config in configs):
        return False
    from pensieve.lab.trial.inspection import print_inspections

    print_inspections(configs)
    return True


class SweepCallback(Callback):
    """Hydra turns an exception in a callback into a warning and goes on, so a sweep is refused by SystemExit."""

    def __init__(self) -> None:
        self._sweep: OpenSweep | None = None  # plain values only: a launcher may send this object to other processes

    def on_multirun_start(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        with in_a_sentence(hydra_goes_on=True):
            jobs = plan_jobs(config)
            configs, checked, plans = [], [], []
            for cfg in compose_jobs(config, jobs):  # a mistake is told before the other jobs are composed
                configs.append(resolved(cfg))
                checked.append(check(configs[-1]))
                plans += [] if checked[-1].workload.get("inspect") else [plan_trial(checked[-1])]
            if inspected(checked):
                sys.exit(0)

            from pensieve.lab.trial.sweep import open_sweep

            self._sweep = open_sweep(config, jobs, configs, plans)
            if in_turn(config):  # Hydra would compose each of them twice more
                self._sweep.run(Path(str(config.hydra.sweep.dir)).absolute(), jobs, configs)
                sys.exit(0 if self._sweep.finish() else 1)

    def on_multirun_end(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        """Table, MLflow, figures; leaves with status 1 where a trial did not complete."""
        if self._sweep is not None:
            with in_a_sentence(hydra_goes_on=True):
                if not self._sweep.finish():
                    sys.exit(1)


def run_job(cfg: DictConfig) -> None:
    """Run the trial that Hydra composed, alone or in its sweep."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:  # checked with the others before the sweep began
        from pensieve.lab.trial.sweep import run_composed

        run_composed(cfg)
        return
    with in_a_sentence():
        config = check(cfg)
        if inspected([config]):
            return
        plan_trial(config)  # a mistake is told before the libraries of a trial are imported

        from pensieve.lab.trial.sweep import run_single

        run_single(cfg, config)
