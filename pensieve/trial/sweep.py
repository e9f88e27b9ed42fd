"""A sweep: what Hydra's callback does before and after the jobs, and the task function that runs one job.

Before the jobs: preflight of each, and the sweep's row. After them: table, figures, exit status. A launcher may run the jobs
in other processes, so each reads from a file in the sweep's folder which sweep it belongs to. A single run has no such file.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from pensieve.compose import TrialConfig, TrialPlan, check, conf_folder, plan_trial, preflight, resolved
from pensieve.compose.explain import explain
from pensieve.errors import PensieveError
from pensieve.results.environment import git_commit, host
from pensieve.results.identity import sweep_key
from pensieve.results.mlflow_runs import finish_parent, start_parent
from pensieve.results.process import Owner, this_process
from pensieve.results.store import ResultsStore
from pensieve.results.sweep_table import sweep_table
from pensieve.trial.fidelity import fidelity
from pensieve.trial.identity import marks_of
from pensieve.trial.inspection import is_inspection, print_inspections
from pensieve.trial.job import Job, Outcome
from pensieve.trial.jobs import Jobs, compose_job, plan_jobs
from pensieve.trial.liveness import end_with
from pensieve.trial.run import run_trial
from pensieve.trial.summary import brief, places, summary
from pensieve.trial.terminal import (
    FULL_TRACE,
    INTERRUPTED,
    close_at_exit,
    command_line,
    console,
    discard_output,
    leave_quietly,
    say,
    sweep_is_closed,
)
from pensieve.trial.tracking import Tracking, open_tracking

FIGURE_SCRIPT = "analysis/figures.py"
SWEEP_FILE = "sweep.json"
RESOLVED_FILE = "config.resolved.yaml"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepMembership:
    """What a job reads about its sweep. owner: the process of the sweep; when it is gone, its jobs end too."""

    sweep_id: int
    mlflow_run_id: str | None
    n_expected: int
    outputs: Path
    axes: tuple[str, ...] = ()
    owner: Owner | None = None


def write_membership(config: DictConfig, membership: SweepMembership) -> None:
    file = sweep_file(config.hydra)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(TypeAdapter(SweepMembership).dump_json(membership))


def sweep_file(hydra: Any) -> Path:
    """hydra: the node of Hydra's own configuration."""
    return Path(str(hydra.sweep.dir)).absolute() / SWEEP_FILE


def current_membership() -> tuple[SweepMembership, int] | None:
    """The sweep that this job belongs to, and the job's number in it; None for a single run."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    hydra = HydraConfig.get()
    file = sweep_file(hydra)
    if not file.is_file():
        return None
    return TypeAdapter(SweepMembership).validate_json(file.read_bytes()), int(hydra.job.num)


# -- before and after the jobs ------------------------------------------------------------------------------------------


class SweepCallback(Callback):
    """Hydra turns an exception in a callback into a warning and goes on, so a sweep is refused by SystemExit."""

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
        if any(is_inspection(one) for one in checked):
            print_inspections(checked)
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
            command=command_line(),
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
            tracking.outputs,
            tuple(jobs.axes) if jobs else (),
            this_process(),
        )
        write_membership(config, membership)
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
        """The sweep ends early. After Ctrl-C no table is shown."""
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
                for job in store.trials_of_sweep(self._sweep_id):
                    _print_fidelity(store, job.last.id)
                print(*places(tracking), sep="\n", flush=True)
        except BrokenPipeError:
            discard_output()  # the sweep is still to be closed, and its status to be returned
        if tracking.mlflow:
            finish_parent(tracking.outputs, store, self._sweep_id, table.text(), status)


def _print_fidelity(store: ResultsStore, trial_id: int) -> None:
    """Of a trial that replayed a real run, how far it is from it."""
    table = fidelity(store, trial_id)
    if table is not None:
        console().print(table)


def _fixed(config: DictConfig) -> list[str]:
    return [str(text) for text in config.hydra.overrides.task]


def _overlay(overrides: Iterable[str]) -> str | None:
    return next((text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")), None)


def _different(plans: Iterable[TrialPlan]) -> list[TrialPlan]:
    """Drop plans that preflight would judge the same: they differ only in the seed and other fields that it does not read."""
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
    """Draw the figures that the sweep has data for and return their paths; none without a checkout, which has the script.

    In a process of its own: the plotting libraries take seconds to import, and memory that the next trial could use.
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


# -- one job ------------------------------------------------------------------------------------------------------------


def run_job(cfg: DictConfig) -> None:
    """Run the trial that Hydra composed. In a sweep a failed trial is recorded and the next one runs."""
    membership = current_membership()
    if membership is not None:
        _of_sweep(cfg, *membership)
        return
    try:
        _single(cfg)
    except BrokenPipeError:
        leave_quietly()
    except (PensieveError, OSError) as error:
        if FULL_TRACE:
            raise
        sys.exit(explain(error))  # raised through Hydra, it would come with lines of Hydra's own


def _single(cfg: DictConfig) -> None:
    config, plain = check(cfg), resolved(cfg)
    if is_inspection(config):
        print_inspections([config])
        return
    tracking = open_tracking(config)
    job = Job(title=f"{config.model.name} {config.baseline.name}", folder=_folder(cfg, tracking.kept, tracking.outputs))
    try:
        outcome = run_trial(config, plain, tracking, job, say)
    except KeyboardInterrupt:
        say("Interrupted; the trial is marked so, and the same command runs it again.")
        sys.exit(INTERRUPTED)
    if not outcome.completed:
        say(str(outcome.error))
        sys.exit(1)
    if outcome.reused:
        say(f"Trial {outcome.trial_id} is this one and is completed; force=true runs it again.")
    console().print(summary(tracking.store, outcome.trial_id))
    _print_fidelity(tracking.store, outcome.trial_id)
    for line in places(tracking):
        print(line)


def _of_sweep(cfg: DictConfig, membership: SweepMembership, number: int) -> None:
    if membership.owner is not None:
        end_with(membership.owner)
    config = check(cfg)
    tracking = open_tracking(config, membership.outputs)
    if config.trial.fail_fast and tracking.store.sweep(membership.sweep_id).status == "failed":
        return  # not by exiting: Hydra would then skip on_multirun_end, and with it the sweep's table
    try:
        _record(cfg, config, tracking, membership, number)
    except KeyboardInterrupt:
        tracking.store.set_sweep(membership.sweep_id, status="interrupted")
        say("Interrupted; the trial is marked so, and the same command runs what is missing.")
        sys.exit(INTERRUPTED)


def _record(cfg: DictConfig, config: TrialConfig, tracking: Tracking, membership: SweepMembership, number: int) -> None:
    swept = " ".join(str(text) for text in HydraConfig.get().overrides.task if _key(text) in membership.axes)
    title = f"[{number + 1}/{membership.n_expected}] {swept}"
    try:
        job = Job(
            title=title,
            folder=_folder(cfg, tracking.kept, tracking.outputs / str(number)),
            sweep_id=membership.sweep_id,
            number=number,
            mlflow_run_id=membership.mlflow_run_id,
            preflight=False,
        )
        outcome = run_trial(config, resolved(cfg), tracking, job, say)
    except Exception as error:  # before there was a trial to record it in; the others go on
        log.info("job %s could not begin its trial", number, exc_info=error)
        outcome = Outcome(0, "failed", error=explain(error))
    if outcome.reused:
        say(f"{title}: trial {outcome.trial_id} is this one and is completed (force=true runs it again)")
    elif outcome.completed:
        say(f"{title}: {brief(tracking.store, outcome.trial_id)}")
    else:
        say(f"{title}: failed. {outcome.error}")
        if config.trial.fail_fast:
            tracking.store.set_sweep(membership.sweep_id, status="failed")
            say("trial.fail_fast=true: no further trial of this sweep begins.")


def _key(override: object) -> str:
    return str(override).partition("=")[0].lstrip("+")


def _folder(cfg: DictConfig, kept: bool, otherwise: Path) -> Path:
    """Write the resolved configuration into Hydra's folder of this job, and return the folder for the trial's files."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    plain = OmegaConf.create(resolved(cfg))
    (folder / RESOLVED_FILE).write_text(OmegaConf.to_yaml(plain), encoding="utf-8")
    return folder if kept else otherwise
