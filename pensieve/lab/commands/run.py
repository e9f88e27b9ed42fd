"""The command run, as Hydra calls it: the callback before and after the jobs of a sweep, and the task function of one job.

A mistake in the configuration is told before the libraries of a trial are imported: those of the database, of numbers and of
tables take longer than everything until then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from pensieve.lab.compose import TrialConfig, check, plan_trial, resolved
from pensieve.lab.trial.jobs import asks_hydra, compose_jobs, plan_jobs, refuse_missing_launcher
from pensieve.lab.trial.terminal import in_a_sentence

if TYPE_CHECKING:
    from pensieve.lab.trial.sweep import OpenSweep


def inspected(configs: Sequence[TrialConfig]) -> bool:
    """Whether workloads were to be described alone (workload.inspect); they are printed then."""
    if not any(config.workload.get("inspect") for config in configs):
        return False
    from pensieve.lab.commands.inspection import print_inspections

    print_inspections(configs)
    return True


class SweepCallback(Callback):
    """Hydra turns an exception in a callback into a warning and goes on, so a sweep is refused by SystemExit."""

    def __init__(self) -> None:
        self._sweep: OpenSweep | None = None  # plain values only: a launcher may send this object to other processes

    def on_multirun_start(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        with in_a_sentence(hydra_goes_on=True):
            refuse_missing_launcher(config)
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
            if not asks_hydra(config):
                self._sweep.run(config, jobs, configs, plans)  # Hydra would compose each of them twice more
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
