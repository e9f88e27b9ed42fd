"""What happens once a sweep: preflight and the sweep's row before its jobs, table, figure and exit status after them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pensieve.compose import TrialConfig, TrialPlan, check, conf_folder, plan_trial, preflight, resolved
from pensieve.compose.explain import explain
from pensieve.errors import PensieveError
from pensieve.results.environment import git_commit, host
from pensieve.results.identity import sweep_key
from pensieve.results.mlflow_runs import finish_parent, start_parent
from pensieve.results.process import this_process
from pensieve.results.sweep_table import sweep_table
from pensieve.trial.inspection import show, wanted
from pensieve.trial.jobs import Jobs, SweepMembership, compose_job, plan_jobs, sweep_folder, write_membership
from pensieve.trial.run import marks_of
from pensieve.trial.summary import places
from pensieve.trial.terminal import (
    FULL_TRACE,
    close_at_exit,
    console,
    discard_output,
    leave_quietly,
    say,
    sweep_is_closed,
)
from pensieve.trial.tracking import Tracking, open_tracking

FIGURE_SCRIPT = "analysis/figures.py"


class SweepCallback(Callback):
    """Hydra turns an exception in a callback into a warning and goes on, so refusals leave by SystemExit."""

    def __init__(self) -> None:
        # Plain values only: a launcher may send this object to other processes.
        self._config: TrialConfig | None = None
        self._outputs: Path | None = None
        self._sweep_id = 0
        self._n_expected = 0

    def on_multirun_start(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        try:
            self._start(config, config_name or "config")
        except BrokenPipeError:
            leave_quietly()
        except (PensieveError, HydraException, OmegaConfBaseException, OSError) as error:
            if FULL_TRACE:
                traceback.print_exc()
            sys.exit(explain(error, sys.argv[1:]))
        except Exception:  # a bug of ours: Hydra would run the jobs without their sweep
            traceback.print_exc()
            sys.exit(1)

    def on_multirun_end(self, config: DictConfig, config_name: str | None = None, **_: Any) -> None:
        if self._config is None:
            return
        try:
            completed = self._finish()
        except (PensieveError, OSError) as error:
            sys.exit(explain(error))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        if not completed:
            sys.exit(1)

    def _start(self, config: DictConfig, config_name: str) -> None:
        jobs = plan_jobs(config)
        if jobs is None:
            configs = [compose_job(config_name, _fixed(config))]
        else:
            configs = [compose_job(config_name, job) for job in jobs.jobs]
        checked = [check(cfg) for cfg in configs]
        if any(wanted(one) for one in checked):
            show(checked)
            sys.exit(0)
        plans = [plan_trial(c) for c in checked]
        for plan in _different(plans):
            preflight(plan)
        for budget in dict.fromkeys(plan.budget() for plan in plans):
            say(budget)
        first = checked[0]
        tracking = open_tracking(first)
        tracking.store.interrupt_dead()
        self._config, self._outputs = first, tracking.outputs
        self._n_expected = len(jobs.jobs) if jobs else 0
        axes = {key: ",".join(values) for key, values in jobs.axes.items()} if jobs else {}
        ranges = {} if jobs else {str(k): str(v) for k, v in (config.hydra.sweeper.get("params") or {}).items()}
        fixed = list(jobs.overrides) if jobs else _fixed(config)
        self._sweep_id = tracking.store.open_sweep(
            key=sweep_key(fixed, axes, [{**resolved(c), **marks_of(p)} for c, p in zip(configs, plans, strict=True)]),
            name=first.experiment_name,
            experiment=_overlay(fixed),
            command=shlex.join(["python", *sys.argv]),
            overrides={**ranges, **dict(text.lstrip("+").partition("=")[::2] for text in fixed), **axes},
            n_expected=self._n_expected,
            host=host(),
            git_commit=git_commit(),
        )
        close_at_exit(self._close)
        parent = None
        if tracking.mlflow:
            parent = start_parent(tracking.outputs, tracking.store, self._sweep_id, first.experiment_name)
        membership = SweepMembership(
            self._sweep_id,
            parent,
            self._n_expected,
            str(tracking.outputs),
            tuple(jobs.axes) if jobs else (),
            this_process(),
        )
        write_membership(sweep_folder(config), membership)
        say(_announcement(jobs, axes))

    def _finish(self) -> bool:
        assert self._config is not None
        sweep_is_closed()
        tracking = open_tracking(self._config, self._outputs)
        jobs = tracking.store.trials_of_sweep(self._sweep_id)
        completed = all(job.last.status == "completed" for job in jobs) and len(jobs) >= max(1, self._n_expected)
        self._end(tracking, "completed" if completed else "failed", shown=True)
        if tracking.kept and completed:
            for figure in _draw(tracking, self._config.tracking.url_env, self._sweep_id):
                print(f"Figure:   {figure}")
        return completed

    def _close(self, status: str) -> None:
        """The sweep ends before its time. Whoever pressed Ctrl-C asked for no table."""
        assert self._config is not None
        self._end(open_tracking(self._config, self._outputs), status, shown=status != "interrupted")

    def _end(self, tracking: Tracking, status: str, shown: bool) -> None:
        store = tracking.store
        store.interrupt_dead()
        store.set_sweep(self._sweep_id, status=status)
        table = sweep_table(store, self._sweep_id)
        try:
            if shown:
                console().print(table.renderable)
                print(*places(tracking), sep="\n", flush=True)
        except BrokenPipeError:
            discard_output()  # the sweep is still to be closed, and its status to be returned
        if tracking.mlflow:
            finish_parent(tracking.outputs, store, self._sweep_id, table.text(), status)


def _fixed(config: DictConfig) -> list[str]:
    return [str(text) for text in config.hydra.overrides.task]


def _overlay(overrides: Iterable[str]) -> str | None:
    return next((text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")), None)


def _different(plans: Iterable[TrialPlan]) -> list[TrialPlan]:
    """One plan for each thing that preflight looks at: a sweep's seeds and the like change none of it."""
    ignored = {"seed", "repeat", "slo", "trial", "tracking"}
    found: dict[str, TrialPlan] = {}
    for plan in plans:
        found.setdefault(plan.config.model_dump_json(exclude=ignored), plan)
    return list(found.values())


def _announcement(jobs: Jobs | None, axes: dict[str, str]) -> str:
    if jobs is None:
        return "Sweep: the sweeper chooses its trials as it goes."
    return f"Sweep of {len(jobs.jobs)} trials: " + ", ".join(f"{key} = {values}" for key, values in axes.items())


def _draw(tracking: Tracking, url_env: str | None, sweep_id: int) -> list[str]:
    """The figures that the sweep supports, by the script that draws them for anyone; none where it is not there.

    In a process of its own: the figure's libraries take seconds to import and memory that the next trial could use.
    """
    script = conf_folder().parent / FIGURE_SCRIPT
    if not script.is_file():
        return []
    where = ["--url-env", url_env] if url_env else []
    command = [sys.executable, str(script), "--sweep", str(sweep_id), "--quiet", *where]
    path = os.pathsep.join(filter(None, [str(script.parents[1]), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, "PENSIEVE_OUTPUTS": str(tracking.outputs), "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        say(f"Not every figure was drawn: {reason[-1]}")
    return [line for line in done.stdout.splitlines() if line.endswith(".png")]
