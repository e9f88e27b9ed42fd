"""The command run, as Hydra calls it: the callback before and after the jobs of a sweep, and the task function of one job.

A mistake in the configuration is told before the libraries of a trial are imported: those of the database, of numbers and of
tables take longer than everything until then.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pensieve.errors import PensieveError
from pensieve.lab.compose import TrialConfig, check, plan_trial, resolved
from pensieve.lab.compose.explain import explain, explain_crash, is_the_users
from pensieve.lab.trial.jobs import asks_hydra, compose_jobs, plan_jobs, refuse_missing_plugins
from pensieve.lab.trial.terminal import FULL_TRACE, leave_quietly

if TYPE_CHECKING:
    from pensieve.lab.trial.sweep import OpenSweep


def is_inspection(config: TrialConfig) -> bool:
    return bool(config.workload.get("inspect"))


class SweepCallback(Callback):
    """Hydra turns an exception in a callback into a warning and goes on, so a sweep is refused by SystemExit."""

    def __init__(self) -> None:
        self._sweep: OpenSweep | None = None  # plain values only: a launcher may send this object to other processes

    def on_multirun_start(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        try:
            self._start(config)
        except BrokenPipeError:
            leave_quietly()
        except (PensieveError, HydraException, OmegaConfBaseException, OSError) as error:
            if FULL_TRACE:
                traceback.print_exc()
            sys.exit(explain(error, sys.argv[1:]))
        except Exception as error:  # Hydra would run the jobs without their sweep
            if is_the_users(error) and not FULL_TRACE:
                sys.exit(explain_crash(error))
            traceback.print_exc()  # a bug of ours
            sys.exit(1)

    def on_multirun_end(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        if self._sweep is not None:
            self._finish(self._sweep)

    def _finish(self, sweep: OpenSweep) -> None:
        """Table, MLflow, figures; leaves with status 1 where a trial did not complete."""
        try:
            completed = sweep.finish()
        except (PensieveError, OSError) as error:
            sys.exit(explain(error))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        if not completed:
            sys.exit(1)

    def _start(self, config: DictConfig) -> None:
        refuse_missing_plugins(config)
        jobs = plan_jobs(config)
        configs, checked, plans = [], [], []
        for cfg in compose_jobs(config, jobs):  # a mistake is told before the other jobs are composed
            configs.append(resolved(cfg))
            checked.append(check(configs[-1]))
            if not is_inspection(checked[-1]):
                plans.append(plan_trial(checked[-1]))
        if len(plans) < len(checked):
            _inspect(checked)
            sys.exit(0)

        from pensieve.lab.trial.sweep import open_sweep

        self._sweep = open_sweep(config, jobs, configs, plans)
        if jobs is not None and not asks_hydra(config):
            self._sweep.run(config, jobs, configs, plans)  # Hydra would compose each of them twice more
            self._finish(self._sweep)
            sys.exit(0)


def run_job(cfg: DictConfig) -> None:
    """Run the trial that Hydra composed, alone or in its sweep."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:  # checked with the others before the sweep began
        from pensieve.lab.trial.sweep import run_composed

        run_composed(cfg)
        return
    try:
        _single(cfg)
    except BrokenPipeError:
        leave_quietly()
    except (PensieveError, OSError) as error:
        if FULL_TRACE:
            raise
        sys.exit(explain(error))  # raised through Hydra, it would come with lines of Hydra's own
    except Exception as error:
        if FULL_TRACE or not is_the_users(error):
            raise
        sys.exit(explain_crash(error))


def _single(cfg: DictConfig) -> None:
    config = check(cfg)
    if is_inspection(config):
        _inspect([config])
        return
    plan_trial(config)  # a mistake is told before the libraries of a trial are imported

    from pensieve.lab.trial.sweep import run_single

    run_single(cfg, config)


def _inspect(configs: Iterable[TrialConfig]) -> None:
    from pensieve.lab.commands.inspection import print_inspections

    print_inspections(configs)
