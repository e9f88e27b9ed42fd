"""A sweep: what is done before and after its jobs, what each job does, and what is printed of a trial.

Before the jobs: preflight of each, and the sweep's row. After them: table, MLflow, figures, exit status. The jobs run as they
were composed and checked: real ones one after another, simulated ones side by side where that is worth the start of
processes. Where Hydra is asked for more (a launcher, a folder's name, a callback) it composes them again: an environment
variable of the job then says which sweep it belongs to.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write
from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.text import Text

from pensieve.errors import ConfigError, in_checkout
from pensieve.lab.compose.build import preflight
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.compose.explain import explain
from pensieve.lab.compose.plan import TrialPlan, awaits_profile, cores, host_memory_bytes
from pensieve.lab.compose.settings import TrialConfig, check, resolved
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.environment import Owner, git_commit, host, this_process
from pensieve.lab.results.frame import Cell, Panel, footer, mixtures
from pensieve.lab.results.identity import sweep_key
from pensieve.lab.results.mlflow_runs import URL_ENV, copy_sweep, copy_trial, log_drawn, remote_url
from pensieve.lab.results.notes import MOSTLY, load_changed, noted
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.trial.command import Jobs, in_turn
from pensieve.lab.trial.job import (
    LOG_FILE,
    Asked,
    Job,
    Outcome,
    Tracking,
    end_kept,
    end_with,
    log_to_stderr,
    logged_in,
    marks_of,
    open_tracking,
)
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
from pensieve.units import NONE, duration, grid

log = logging.getLogger(__name__)

FIGURE_SCRIPT = "analysis/figures.py"
MEMBERSHIP = "PENSIEVE_SWEEP"
RESOLVED_FILE = "config.resolved.yaml"
_SHOWN_FILES = (".png", ".md")  # of a figure's files: the picture, or the table
WORTH_A_START_S = 5.0
"""What the rest of a sweep must take in this process for others to be started: each imports for a second."""


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

    def asked(self, number: int, overrides: Sequence[str], plain: dict[str, Any], folder: Path) -> Asked:
        """One job. overrides: its own. plain: its configuration, resolved."""
        swept = " ".join(text for text in overrides if text.partition("=")[0].lstrip("+") in self.axes)
        title = f"[{number + 1}/{self.n_expected}] {swept}"
        shown = self.owner == this_process()
        own = Job(title, folder, self.sweep_id, number, preflight=False, shown=shown, keeps=self.keeps)
        return Asked(plain, own)


# -- before and after the jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSweep:
    """A sweep whose jobs run. config: of its first job."""

    config: TrialConfig
    membership: SweepMembership

    def run(self, folder: Path, jobs: Jobs, configs: Sequence[dict[str, Any]], simulated: bool) -> None:
        """Run the jobs. folder: for theirs. configs: resolved. simulated: all of them, so that none disturbs another."""
        tracking = open_tracking(self.config, self.membership.outputs)
        under = folder if tracking.kept else tracking.outputs
        waiting = [
            self.membership.asked(number, overrides, plain, under / str(number))
            for number, (overrides, plain) in enumerate(zip(jobs.jobs, configs, strict=True))
        ]
        most = processes_here() if simulated and self.config.trial.isolate == "auto" else 1
        with _marked_if_interrupted(tracking, self.membership):
            began, place = time.monotonic(), 0
            with performing(tracking, 1) as perform:
                for place, (asked, outcome) in enumerate(perform(waiting), start=1):
                    _note(asked, outcome, tracking, self.membership)
                    took_s, began = time.monotonic() - began, time.monotonic()
                    if most > 1 and not outcome.reused and took_s * (len(waiting) - place) > WORTH_A_START_S:
                        break
            left = [replace(one, job=replace(one.job, shown=False)) for one in waiting[place:]]
            with performing(tracking, max(1, min(most, len(left)))) as perform:
                for asked, outcome in perform(left):
                    _note(asked, outcome, tracking, self.membership)

    def finish(self) -> bool:
        """After the jobs: table, MLflow, figures. Returns whether every trial completed."""
        sweep_is_closed()
        tracking = self._tracking()
        jobs = tracking.store.trials_of_sweep(self.membership.sweep_id)
        completed = len(jobs) >= self.membership.n_expected and all(job.last.status == "completed" for job in jobs)
        with ThreadPoolExecutor(1) as beside:  # a process draws while this one makes the table and writes to MLflow
            drawn = None
            if tracking.kept and completed:
                drawn = beside.submit(draw_figures, tracking, self.config.tracking.url_env, self.membership.sweep_id)
            self._end(tracking, "completed" if completed else "failed", shown=True)
            figures = drawn.result() if drawn else []
            for line in figure_lines(figures):
                print(line)
        if tracking.mlflow and figures:
            log_drawn(tracking.outputs, tracking.store, self.membership.sweep_id)
        return completed

    def close(self, status: str) -> None:
        """The sweep ends early. After Ctrl-C no table is shown."""
        self._end(self._tracking(), status, shown=status != "interrupted")

    def _tracking(self) -> Tracking:
        end_kept()
        if self.membership.keeps:
            shelf.close()
        return open_tracking(self.config, self.membership.outputs)

    def _end(self, tracking: Tracking, status: str, shown: bool) -> None:
        store, sweep_id = tracking.store, self.membership.sweep_id
        store.interrupt_dead()
        store.set_sweep(sweep_id, status=status)
        table = sweep_table(store, sweep_id)
        try:
            if shown:
                trials = [job.last for job in store.trials_of_sweep(sweep_id)]
                console().print(table.renderable, *fidelities(store, trials, sweep_id))
                print(*places(tracking), sep="\n", flush=True)
        except BrokenPipeError:
            discard_output()  # the sweep is still to be closed, and its status to be returned
        if tracking.mlflow:
            copy_sweep(tracking.outputs, store, sweep_id, table)


def open_sweep(
    config: DictConfig, jobs: Jobs, configs: Sequence[dict[str, Any]], plans: Sequence[TrialPlan]
) -> OpenSweep:
    """Preflight of the jobs, the sweep's row, and what tells a launcher's jobs of it. configs: resolved. Raises
    PensieveError."""
    here = in_turn(config)
    if not here and any(plan.config.trial.measure_machine is not None for plan in plans):
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
        experiment=next((text.partition("=")[2] for text in fixed if text.lstrip("+").startswith("experiment=")), None),
        command=command_line(),
        overrides={**dict(text.lstrip("+").partition("=")[::2] for text in fixed), **swept},
        n_expected=len(jobs.jobs),
        host=host(),
        git_commit=git_commit(),
        anew=any(plan.config.force for plan in plans),
    )
    keeps = here and not all(plan.device.simulated for plan in plans)
    membership = SweepMembership(sweep_id, len(jobs.jobs), tracking.outputs, tuple(jobs.axes), this_process(), keeps)
    sweep = OpenSweep(first, membership)
    if keeps:
        shelf.begin()
    close_at_exit(sweep.close)
    if not here:
        told = TypeAdapter(SweepMembership).dump_json(membership).decode().replace("'", "\\'")
        with read_write(config.hydra.overrides), open_dict(config.hydra.overrides):
            config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{MEMBERSHIP}='{told}'")
    say(f"Sweep of {len(jobs.jobs)} trials: " + ", ".join(f"{key} = {values}" for key, values in axes.items()))
    return sweep


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


def _different(plans: Iterable[TrialPlan]) -> Iterable[TrialPlan]:
    """Drop plans that preflight would judge the same: they differ only in the seed and other fields that it does not read."""
    ignored = {"seed", "repeat", "slo", "trial", "tracking"}
    return {plan.config.model_dump_json(exclude=ignored): plan for plan in plans}.values()


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


# -- several at a time, each process running one after another --------------------------------------------------------


Perform = Callable[[Sequence[Asked]], Iterator[tuple[Asked, Outcome]]]
"""Runs trials and gives the outcome of each when it is there, in any order."""

A_PROCESS_BYTES = 2**30
"""What a simulated trial may come to: a million turns need a little more."""


def processes_here() -> int:
    """Simulated trials that run here at a time."""
    free_bytes = min(int(psutil.virtual_memory().available), host_memory_bytes())
    return max(1, min(cores(), free_bytes // A_PROCESS_BYTES))


@contextmanager
def performing(tracking: Tracking, processes: int) -> Iterator[Perform]:
    """So many trials at a time; with one, in this process. After Ctrl-C those under way are found dead in the database."""
    if processes == 1:
        yield lambda trials: ((one, _logged(one, tracking, say)) for one in trials)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (this_process(),))

    def perform(trials: Sequence[Asked]) -> Iterator[tuple[Asked, Outcome]]:
        futures = {pool.submit(_outcome_here, one, tracking.outputs): one for one in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()

    try:
        yield perform
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:  # whoever asked may have had enough
        pool.shutdown(cancel_futures=True)


def _begin(owner: Owner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends this process
    log_to_stderr()
    end_with(owner)


def _outcome_here(asked: Asked, outputs: Path) -> Outcome:
    return _logged(asked, replace(open_tracking(check(asked.config), outputs), mlflow=False), lambda _: None)


def _logged(asked: Asked, tracking: Tracking, say: Callable[[str], None]) -> Outcome:
    with logged_in(asked.job.folder / LOG_FILE):
        return outcome_of(asked, tracking, say)


def outcome_of(asked: Asked, tracking: Tracking, say: Callable[[str], None]) -> Outcome:
    """Run the trial, whatever becomes of it."""
    try:
        return run_trial(check(asked.config), asked.config, tracking, asked.job, say)
    except Exception as error:  # before there was a trial to record it in; the others go on
        log.info("%s could not begin its trial", asked.job.title, exc_info=error)
        return Outcome(0, "failed", error=explain(error))


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
    tracking = open_tracking(check(plain), membership.outputs)
    with _marked_if_interrupted(tracking, membership):
        asked = membership.asked(int(hydra.job.num), texts, plain, folder)
        _note(asked, outcome_of(asked, tracking, say), tracking, membership)


def run_single(cfg: DictConfig, config: TrialConfig) -> None:
    """Run a trial by itself and print it. MLflow is written after that, however the trial ended."""
    tracking = open_tracking(config)
    folder = Path(HydraConfig.get().runtime.output_dir) if tracking.kept else tracking.outputs
    job = Job(f"{config.model.name} {config.baseline.name}", folder)
    plain, store = resolved(cfg), tracking.store
    keep_resolved(folder, plain)
    try:
        outcome = run_trial(config, plain, tracking, job, say)
    except KeyboardInterrupt:
        ends_interrupted()
        say("Interrupted; the trial is marked so, and the same command runs it again.")
        sys.exit(INTERRUPTED)
    try:
        if not outcome.completed:
            say(str(outcome.error))
            sys.exit(1)
        if outcome.reused:
            say(f"Trial {outcome.trial_id} is this one and is completed; force=true runs it again.")
        console().print(summary(store, outcome.trial_id), *fidelities(store, [store.trial(outcome.trial_id)]))
        print(*places(tracking), sep="\n", flush=True)
    finally:
        if tracking.mlflow and outcome.trial_id and store.trial(outcome.trial_id).mlflow_run_id is None:
            copy_trial(tracking.outputs, store, outcome.trial_id)


@contextmanager
def _marked_if_interrupted(tracking: Tracking, membership: SweepMembership) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        ends_interrupted()
        tracking.store.set_sweep(membership.sweep_id, status="interrupted")
        say("Interrupted; the trial is marked so, and the same command runs what is missing.")
        sys.exit(INTERRUPTED)


def _note(asked: Asked, outcome: Outcome, tracking: Tracking, membership: SweepMembership) -> None:
    """What became of a job: its files, its line, and what is real in MLflow at once; a simulated one takes less than the
    import."""
    title, store = asked.job.title, tracking.store
    keep_resolved(asked.job.folder, asked.config)
    if outcome.reused:
        say(f"{title}: trial {outcome.trial_id} is this one and is completed (force=true runs it again)")
    elif outcome.completed:
        say(f"{title}: {brief(store, outcome.trial_id)}{_time_left(store, membership)}")
    else:
        say(f"{title}: failed. {outcome.error}")
    if copied_at_once(tracking, outcome):
        copy_sweep(tracking.outputs, store, membership.sweep_id)


def copied_at_once(tracking: Tracking, outcome: Outcome) -> bool:
    return tracking.mlflow and bool(outcome.trial_id) and not tracking.store.trial(outcome.trial_id).simulated


def _time_left(store: ResultsStore, membership: SweepMembership) -> str:
    """ "; 3 of 18 trials done, about 12 min left", by what those that this sweep ran have taken together."""
    progress = store.progress_of(membership.sweep_id)
    waiting = membership.n_expected - progress.ended
    if waiting <= 0 or not progress.ran:
        return ""
    left_s = progress.elapsed_s / progress.ran * waiting
    return f"; {progress.ended} of {membership.n_expected} trials done, about {duration(left_s)} left"


def keep_resolved(folder: Path, plain: Mapping[str, Any]) -> None:
    """Write the resolved configuration into the folder for the trial's files: Hydra's own file has interpolations."""
    folder.mkdir(parents=True, exist_ok=True)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C where there is libyaml, ten times as fast
    text = yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True)
    (folder / RESOLVED_FILE).write_text(text, encoding="utf-8")


def fidelities(store: ResultsStore, trials: Iterable[Trial], sweep_id: int | None = None) -> Iterator[RenderableType]:
    """How far a trial that replayed a real run is from it; of a sweep on a machine and its profile, one from the other."""
    replayed = [trial for trial in trials if trial.workload == "vllm_run"]
    both = sweep_id is not None and len({trial.simulated for trial in trials}) > 1
    if not replayed and not both:
        return
    from pensieve.lab.trial.fidelity import fidelity, fidelity_here

    tables = [fidelity(store, trial.id) for trial in replayed]
    tables += [fidelity_here(store, sweep_id)] if both and sweep_id is not None else []
    yield from (table for table in tables if table is not None)


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
    cut = noted(load_changed([Panel({}, [Cell(trial.baseline, {}, [trial])])]))
    first = [note.text for note in cut]
    waited, ttft = (one.value if (one := metrics.get((f"{what}_ms_p50", ""))) else None for what in ("queue", "ttft"))
    if waited and ttft and waited > MOSTLY * ttft:  # its times are of the queue, and grow with the length of the run
        first.append(
            f"Near saturation: {waited:,.0f} of {ttft:,.0f} ms of TTFT (p50) is queueing. It grows with the run."
        )
    return Group(*map(Text, first), table, *(Text(line) for line in [*told, *footer([trial])]))


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
