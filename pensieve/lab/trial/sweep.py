"""A sweep: what is done before and after its jobs, what each job does, and what is printed of a trial.

Before the jobs: preflight of each, and the sweep's row. After them: table, MLflow, figures, exit status. Jobs run one after
another in this process, as they were composed and checked. Where Hydra is asked for more (a launcher, a folder's name, a
callback) it composes them again: an environment variable of the job then says which sweep it belongs to.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from omegaconf import DictConfig, open_dict, read_write
from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.text import Text

from pensieve.errors import ConfigError, in_checkout
from pensieve.lab.compose.build import preflight
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.compose.explain import explain
from pensieve.lab.compose.plan import TrialPlan, awaits_profile
from pensieve.lab.compose.schema import TrialConfig
from pensieve.lab.compose.settings import check, resolved
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.environment import Owner, git_commit, host, this_process
from pensieve.lab.results.frame import Cell, Panel, footer, mixtures
from pensieve.lab.results.identity import sweep_key
from pensieve.lab.results.mlflow_runs import URL_ENV, copy_sweep, copy_trial, log_drawn, remote_url
from pensieve.lab.results.notes import MOSTLY, load_changed, offered_rate, starting
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import SweepTable, sweep_table
from pensieve.lab.tables import grid
from pensieve.lab.trial.command import Jobs, asks_hydra, in_turn
from pensieve.lab.trial.fidelity import fidelity, fidelity_here
from pensieve.lab.trial.job import Job, Outcome, Tracking, marks_of, open_tracking
from pensieve.lab.trial.process import end_kept, end_with, logged_in
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.terminal import (
    INTERRUPTED,
    close_at_exit,
    command_line,
    console,
    discard_output,
    ends_interrupted,
    say,
    sweep_is_closed,
)
from pensieve.plugins.device import shelf
from pensieve.units import NONE, duration

FIGURE_SCRIPT = "analysis/figures.py"
MEMBERSHIP = "PENSIEVE_SWEEP"
LOG_FILE = "run.log"
RESOLVED_FILE = "config.resolved.yaml"
_SHOWN_FILES = (".png", ".md")  # of a figure's files: the picture, or the table

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepMembership:
    """What a job knows of its sweep. axes: the fields that it varies. owner: the process of the sweep; when it is gone, its
    jobs end too. keeps: see Job."""

    sweep_id: int
    n_expected: int
    outputs: Path
    axes: tuple[str, ...]
    owner: Owner
    keeps: bool = False


# -- before and after the jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSweep:
    """A sweep whose jobs run. config: of its first job."""

    config: TrialConfig
    membership: SweepMembership

    def run(
        self, config: DictConfig, jobs: Jobs, configs: Sequence[Mapping[str, Any]], plans: Sequence[TrialPlan]
    ) -> None:
        """Run the jobs one after another in this process. config: of the sweep, with Hydra's node. configs: resolved."""
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        with env_override({name: str(text) for name, text in config.hydra.job.env_set.items()}):
            for number, (plain, plan) in enumerate(zip(configs, plans, strict=True)):
                _run_job(
                    self.membership, number, jobs.jobs[number], plan.config, plain, folder / str(number), logs=True
                )

    def finish(self) -> bool:
        """After the jobs: table, MLflow, figures. Returns whether every trial completed."""
        sweep_is_closed()
        self._return_memory()
        tracking = open_tracking(self.config, self.membership.outputs)
        jobs = tracking.store.trials_of_sweep(self.membership.sweep_id)
        completed = len(jobs) >= self.membership.n_expected and all(job.last.status == "completed" for job in jobs)
        status = "completed" if completed else "failed"
        with ThreadPoolExecutor(
            1
        ) as beside:  # another process draws while this one makes the table and writes to MLflow
            drawn = None
            if tracking.kept and completed:
                drawn = beside.submit(draw_figures, tracking, self.config.tracking.url_env, self.membership.sweep_id)
            table = self._set_status(tracking, status, shown=True)
            self._to_mlflow(tracking, table)
            figures = drawn.result() if drawn else []
            for line in figure_lines(figures):
                print(line)
        if tracking.mlflow and figures:
            log_drawn(tracking.outputs, tracking.store, self.membership.sweep_id)
        return completed

    def close(self, status: str) -> None:
        """The sweep ends early. After Ctrl-C no table is shown."""
        self._return_memory()
        tracking = open_tracking(self.config, self.membership.outputs)
        table = self._set_status(tracking, status, shown=status != "interrupted")
        self._to_mlflow(tracking, table)

    def _return_memory(self) -> None:
        end_kept()
        if self.membership.keeps:
            shelf.close()

    def _set_status(self, tracking: Tracking, status: str, shown: bool) -> SweepTable:
        tracking.store.interrupt_dead()
        tracking.store.set_sweep(self.membership.sweep_id, status=status)
        table = sweep_table(tracking.store, self.membership.sweep_id)
        try:
            if shown:
                console().print(table.renderable)
                for job in tracking.store.trials_of_sweep(self.membership.sweep_id):
                    _print_fidelity(tracking.store, job.last.id)
                if (here := fidelity_here(tracking.store, self.membership.sweep_id)) is not None:
                    console().print(here)
                print(*places(tracking), sep="\n", flush=True)
        except BrokenPipeError:
            discard_output()  # the sweep is still to be closed, and its status to be returned
        return table

    def _to_mlflow(self, tracking: Tracking, table: SweepTable) -> None:
        if tracking.mlflow:
            copy_sweep(tracking.outputs, tracking.store, self.membership.sweep_id, table)


def open_sweep(
    config: DictConfig, jobs: Jobs, configs: Sequence[dict[str, Any]], plans: Sequence[TrialPlan]
) -> OpenSweep:
    """Preflight of the jobs, the sweep's row, and what tells a launcher's jobs of it. configs: resolved. Raises
    PensieveError."""
    if not in_turn(config) and any(plan.config.trial.measure_machine is not None for plan in plans):
        raise ConfigError(
            "trial.measure_machine: its trials follow each other in one process; leave hydra/launcher out."
        )
    known = [plan for plan in plans if not awaits_profile(plan.config)]
    for plan in _different(known):
        preflight(plan)
    for budget in dict.fromkeys(plan.budget() for plan in known):
        say(budget)
    first = plans[0].config
    tracking = open_tracking(first)
    tracking.store.interrupt_dead()
    swept = {key: list(values) for key, values in jobs.axes.items()}
    axes = {key: ",".join(values) for key, values in swept.items()}
    fixed = [*jobs.overrides, *_objective(first, jobs.overrides)]
    key = sweep_key(fixed, axes, [{**_asked(c), **marks_of(p)} for c, p in zip(configs, plans, strict=True)])
    sweep_id = tracking.store.open_sweep(
        key=key,
        name=first.experiment_name,
        experiment=_overlay(fixed),
        command=command_line(),
        overrides={**dict(text.lstrip("+").partition("=")[::2] for text in fixed), **swept},
        n_expected=len(jobs.jobs),
        host=host(),
        git_commit=git_commit(),
        anew=any(plan.config.force for plan in plans),
    )
    keeps = in_turn(config) and not all(plan.device.simulated for plan in plans)
    membership = SweepMembership(sweep_id, len(jobs.jobs), tracking.outputs, tuple(jobs.axes), this_process(), keeps)
    sweep = OpenSweep(first, membership)
    if keeps:
        shelf.begin()
    close_at_exit(sweep.close)
    if asks_hydra(config):
        told = TypeAdapter(SweepMembership).dump_json(membership).decode().replace("'", "\\'")
        with read_write(config.hydra.overrides), open_dict(config.hydra.overrides):
            config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{MEMBERSHIP}='{told}'")
    say(f"Sweep of {len(jobs.jobs)} trials: " + ", ".join(f"{key} = {values}" for key, values in axes.items()))
    return sweep


def _print_fidelity(store: ResultsStore, trial_id: int) -> None:
    """Print how far a trial that replayed a real run is from it; nothing for any other."""
    table = fidelity(store, trial_id)
    if table is not None:
        console().print(table)


def _asked(found: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a job, for the key of its sweep: without the content of a file that a job of it writes."""
    if found["hardware"]["profile"] == found["trial"]["measure_machine"]:
        return {**found, "hardware": {**found["hardware"], "profile": None}}
    return found


def _objective(config: TrialConfig, typed: Iterable[str]) -> list[str]:
    """The objective that an overlay sets, as an override: the sweep records what its views judge by."""
    given = {text.lstrip("+").partition("=")[0] for text in typed}
    asked = {f"slo.{name}": most for name, most in config.slo.model_dump().items() if most is not None}
    return [f"{name}={most}" for name, most in asked.items() if name not in given]


def _overlay(overrides: Iterable[str]) -> str | None:
    return next((text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")), None)


def _different(plans: Iterable[TrialPlan]) -> list[TrialPlan]:
    """Drop plans that preflight would judge the same: they differ only in the seed and other fields that it does not read."""
    ignored = {"seed", "repeat", "slo", "trial", "tracking"}
    found: dict[str, TrialPlan] = {}
    for plan in plans:
        found.setdefault(plan.config.model_dump_json(exclude=ignored), plan)
    return list(found.values())


def draw_figures(tracking: Tracking, url_env: str | None, sweep_id: int) -> list[Path]:
    """Draw the figures that the sweep has data for and return the paths of pictures and tables.

    In a process of its own: the plotting libraries take seconds to import, and memory that the next trial could use.
    """
    script = conf_folder().parent / FIGURE_SCRIPT
    where = ["--url-env", url_env] if url_env else []
    command = [sys.executable, str(script), "--sweep", str(sweep_id), *where]
    path = os.pathsep.join(filter(None, [str(script.parents[1]), os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, "PENSIEVE_OUTPUTS": str(tracking.outputs), "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        say(f"Not every figure was drawn: {reason[-1]}")
    return [Path(line) for line in done.stdout.splitlines() if line.endswith(_SHOWN_FILES)]


def figure_lines(drawn: Sequence[Path]) -> list[str]:
    return [f"{'Figure' if path.suffix == '.png' else 'Table'}:".ljust(10) + str(path) for path in drawn]


# -- one job ------------------------------------------------------------------------------------------------------------


def run_composed(cfg: DictConfig) -> None:
    """Run one job of a sweep that Hydra launched: a failed trial is recorded and the next one runs. Raises ConfigError where
    the sweep's folder is not: the trial would be recorded in another database."""
    told = os.environ.get(MEMBERSHIP)
    if told is None:  # Hydra went on without the sweep's callback
        run_single(cfg, check(cfg))
        return
    membership = TypeAdapter(SweepMembership).validate_json(told)
    if not membership.outputs.is_dir():
        raise ConfigError(
            f"This job of a sweep finds no {membership.outputs} on {host()}. Set PENSIEVE_OUTPUTS to a folder that every "
            "node sees under the same name, also for the launcher's processes."
        )
    end_with(membership.owner)
    plain, hydra = resolved(cfg), HydraConfig.get()
    texts, folder = [str(text) for text in hydra.overrides.task], Path(hydra.runtime.output_dir)
    _run_job(membership, int(hydra.job.num), texts, check(plain), plain, folder)


def run_single(cfg: DictConfig, config: TrialConfig) -> None:
    """Run a trial by itself and print it. MLflow is written after that, however the trial ended."""
    plain = resolved(cfg)
    tracking = open_tracking(config)
    folder = _with_resolved(Path(HydraConfig.get().runtime.output_dir) if tracking.kept else tracking.outputs, plain)
    job = Job(title=f"{config.model.name} {config.baseline.name}", folder=folder)
    try:
        outcome = run_trial(config, plain, tracking, job, say)
    except KeyboardInterrupt:
        ends_interrupted()
        say("Interrupted; the trial is marked so, and the same command runs it again.")
        sys.exit(INTERRUPTED)
    store = tracking.store
    try:
        if not outcome.completed:
            say(str(outcome.error))
            sys.exit(1)
        if outcome.reused:
            say(f"Trial {outcome.trial_id} is this one and is completed; force=true runs it again.")
        console().print(summary(store, outcome.trial_id))
        _print_fidelity(store, outcome.trial_id)
        print(*places(tracking), sep="\n", flush=True)
    finally:
        if tracking.mlflow and outcome.trial_id and store.trial(outcome.trial_id).mlflow_run_id is None:
            copy_trial(tracking.outputs, store, outcome.trial_id)


def _run_job(
    membership: SweepMembership,
    number: int,
    overrides: Sequence[str],
    config: TrialConfig,
    plain: Mapping[str, Any],
    folder: Path,
    logs: bool = False,
) -> None:
    """One job, its record and its line. logs: into a file of the folder, as Hydra does for the jobs that it launches."""
    tracking = open_tracking(config, membership.outputs)
    if config.trial.fail_fast and tracking.store.sweep(membership.sweep_id).status == "failed":
        return
    swept = " ".join(text for text in overrides if text.partition("=")[0].lstrip("+") in membership.axes)
    title = f"[{number + 1}/{membership.n_expected}] {swept}"
    job = Job(
        title=title,
        folder=_with_resolved(folder if tracking.kept else tracking.outputs / str(number), plain),
        sweep_id=membership.sweep_id,
        number=number,
        preflight=False,
        progress="bar" if membership.owner == this_process() else "lines",
        keeps=membership.keeps,
    )
    try:
        with logged_in(job.folder / LOG_FILE) if logs else nullcontext():
            _record(config, plain, tracking, membership, job)
    except KeyboardInterrupt:
        ends_interrupted()
        tracking.store.set_sweep(membership.sweep_id, status="interrupted")
        say("Interrupted; the trial is marked so, and the same command runs what is missing.")
        sys.exit(INTERRUPTED)


def _record(
    config: TrialConfig, plain: Mapping[str, Any], tracking: Tracking, membership: SweepMembership, job: Job
) -> None:
    title = job.title
    try:
        outcome = run_trial(config, plain, tracking, job, say)
    except Exception as error:  # before there was a trial to record it in; the others go on
        log.info("job %s could not begin its trial", job.number, exc_info=error)
        outcome = Outcome(0, "failed", error=explain(error))
    if outcome.reused:
        how = "this sweep ran it before" if config.force else "force=true runs it again"
        say(f"{title}: trial {outcome.trial_id} is this one and is completed ({how})")
    elif outcome.completed:
        left = _time_left(tracking.store, membership)
        say(f"{title}: {brief(tracking.store, outcome.trial_id)}{left}")
    else:
        say(f"{title}: failed. {outcome.error}")
        if config.trial.fail_fast:
            tracking.store.set_sweep(membership.sweep_id, status="failed")
            say("trial.fail_fast=true: no further trial of this sweep begins.")
    if copied_at_once(tracking, outcome):
        copy_sweep(tracking.outputs, tracking.store, membership.sweep_id)


def copied_at_once(tracking: Tracking, outcome: Outcome) -> bool:
    """Whether MLflow gets a trial before its sweep has ended: a real one. A simulated one takes less than the import."""
    return tracking.mlflow and bool(outcome.trial_id) and not tracking.store.trial(outcome.trial_id).simulated


def _time_left(store: ResultsStore, membership: SweepMembership) -> str:
    """ "; 3 of 18 trials done, about 12 min left", by what those that this sweep ran have taken together."""
    progress = store.progress_of(membership.sweep_id)
    waiting = membership.n_expected - progress.ended
    if waiting <= 0 or not progress.ran:
        return ""
    left_s = progress.elapsed_s / progress.ran * waiting
    return f"; {progress.ended} of {membership.n_expected} trials done, about {duration(left_s)} left"


def _with_resolved(folder: Path, plain: Mapping[str, Any]) -> Path:
    """Write the resolved configuration into the folder for the trial's files, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C where there is libyaml, ten times as fast
    text = yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True)
    (folder / RESOLVED_FILE).write_text(text, encoding="utf-8")
    return folder


ROWS = (
    ("TTFT p50", "ttft_ms_p50", "ms"),
    ("TTFT p99", "ttft_ms_p99", "ms"),
    ("time per output token", "tpot_ms_mean", "ms"),
    ("output", "throughput_output_tok_s", "tokens/s"),
    ("hits on GPU", "gpu_hit_rate", "share"),
    ("hits on CPU", "cpu_hit_rate", "share"),
    ("hits on disk", "disk_hit_rate", "share"),
    ("recomputed", "miss_rate", "share"),
    ("scheduler a step", "schedule_ms_mean", "ms"),
)
UI_ADDRESS = "http://127.0.0.1:5000"
"""Of `make ui`, unless PORT is set."""
TOLD = ("failures", "contaminated", "cache_state_unverified", "held_whole", "late_sends", "oom")
"""Flags of a trial without which its numbers would mislead, beside those for which it must not be compared (mixtures)."""


def summary(store: ResultsStore, trial_id: int) -> RenderableType:
    trial = store.trial(trial_id)
    metrics = {(m.name, m.label): m for m in store.metrics_of(trial_id)}
    kind = "simulated" if trial.simulated else f"{trial.weights} weights"
    of_turns = [(f"TTFT, {name} turn (p50)", ("ttft_ms_p50", turn), "ms") for turn, name in _turns(metrics)]
    rows = [*of_turns, *((title, (name, ""), unit) for title, name, unit in ROWS)]
    table = grid(
        [{"": title, "value": _text(metrics[key], unit)} for title, key, unit in rows if key in metrics],
        f"trial {trial_id}: {trial.model} ({kind}) on {trial.device}, baseline {trial.baseline}, seed {trial.seed}",
        heads=False,
    )
    told = [str(trial.flags[flag]) for flag in TOLD if flag in trial.flags]
    told += [f"One of the {why.what}: do not compare its times, and {why.remedy}." for why in mixtures([trial])]
    cut = load_changed([Panel({}, [Cell(trial.baseline, {}, [trial])])])
    first = [*(note.text for note in cut), *_overloaded(trial, metrics)]
    return Group(*map(Text, first), table, *(Text(line) for line in [*told, *footer([trial])]))


def _overloaded(trial: Trial, metrics: Mapping[tuple[str, str], MetricValue]) -> list[str]:
    """Where the median request mostly waits for others, its times are of the queue, and grow with the length of the run."""
    waited, ttft, rate = (
        one.value if (one := metrics.get((name, ""))) else None
        for name in ("queue_ms_p50", "ttft_ms_p50", "throughput_req_s")
    )
    if not waited or not ttft or waited <= MOSTLY * ttft:
        return []
    offered = None if starting([trial]) else offered_rate([trial])
    kept_up = f" Finished {rate:.3g} of {offered:.3g} requests/s offered." if rate and offered else ""
    return [
        f"Near saturation: {waited:,.0f} of {ttft:,.0f} ms of TTFT (p50) is queueing. It grows with the run.{kept_up}"
    ]


def places(tracking: Tracking) -> list[str]:
    """Lines that say where the records are."""
    if not tracking.kept:
        return ["Nothing was kept (tracking=off)."]
    lines = [f"Database: {tracking.store.database.shown}"]
    if tracking.mlflow and not installed("mlflow"):
        lines.append("MLflow:   not installed, so nothing is there; the database is complete without it")
    elif tracking.mlflow and remote_url() is not None:
        lines.append(f"MLflow:   the server that {URL_ENV} names")
    elif tracking.mlflow:
        lines.append(f"MLflow:   {_ui(tracking.outputs / 'mlflow.db')}, then {UI_ADDRESS}/#/experiments")
    return lines


def _ui(store: Path) -> str:
    return f"make ui (reads {store})" if in_checkout() else f"mlflow ui --backend-store-uri sqlite:///{store}"


def installed(package: str) -> bool:
    """Whether it could be imported, without the seconds that importing it takes."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def brief(store: ResultsStore, trial_id: int) -> str:
    """A completed trial's main results in one line, for a sweep."""
    metrics = {(m.name, m.label): m for m in store.metrics_of(trial_id)}
    shown = [f"TTFT {name} turn {_text(metrics[('ttft_ms_p50', turn)], 'ms')}" for turn, name in _turns(metrics)]
    output = metrics.get(("throughput_output_tok_s", ""))
    return ", ".join([*shown, _text(output, "tokens/s")] if output else shown)


def _turns(metrics: dict[tuple[str, str], MetricValue]) -> list[tuple[str, str]]:
    """The labels of the first and the last turn that were measured."""
    numbers = sorted(int(label[5:]) for name, label in metrics if name == "ttft_ms_p50" and label.startswith("turn="))
    ends = dict.fromkeys((*numbers[:1], *numbers[-1:]))
    return [(f"turn={number}", name) for number, name in zip(ends, ("first", "last"), strict=False)]


def _text(metric: MetricValue, unit: str) -> str:
    value = metric.value
    if value is None:
        return NONE
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
