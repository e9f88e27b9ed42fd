"""A sweep: what is done before and after its jobs, what each job does, and what is printed of a trial.

Before the jobs: preflight of each, and the sweep's row. After them: table, MLflow, figures, exit status. The jobs run as they
were composed and checked: real ones one after another, simulated ones side by side. Where Hydra is asked for more (a
launcher, a folder's name, a callback) it composes them again: an environment variable then says which sweep a job belongs to.
"""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write
from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.text import Text

from pensieve.device import shelf
from pensieve.errors import ConfigError, in_checkout
from pensieve.lab.compose.build import preflight
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.compose.explain import explain
from pensieve.lab.compose.plan import TrialPlan, awaits_profile, host_memory_bytes
from pensieve.lab.compose.settings import TrackingConfig, TrialConfig, check, resolved
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.environment import Owner, cores, git_commit, host, this_process
from pensieve.lab.results.frame import Cell, Panel, footer, mixtures
from pensieve.lab.results.identity import sweep_key
from pensieve.lab.results.mlflow_runs import URL_ENV, copy_sweep, copy_trial, import_mlflow
from pensieve.lab.results.notes import MOSTLY, load_changed, noted
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.trial.command import Jobs, in_turn
from pensieve.lab.trial.job import Job, Outcome, Tracking, end_with, marks_of, open_tracking
from pensieve.lab.trial.run import LOG_FILE, end_kept, log_to_stderr, logged_in, run_trial
from pensieve.lab.trial.terminal import (
    INTERRUPTED,
    command_line,
    console,
    discard_output,
    ends_interrupted,
    say,
)
from pensieve.units import NONE, duration, grid

log = logging.getLogger(__name__)

MEMBERSHIP = "PENSIEVE_SWEEP"
_SHOWN_FILES = (".png", ".md")  # of a figure's files: the picture, or the table


@dataclass(frozen=True, slots=True)
class OpenSweep:
    """A sweep whose jobs run; a launcher's jobs read it from the environment. axes: the fields that it varies. owner: the
    process of the sweep; when it is gone, its jobs end too."""

    sweep_id: int
    n_expected: int
    outputs: Path
    axes: tuple[str, ...]
    owner: Owner
    tracking: TrackingConfig

    def opened(self) -> Tracking:
        return open_tracking(self.tracking, self.outputs)

    def job(self, number: int, overrides: Sequence[str], config: dict[str, Any], folder: Path) -> Job:
        """overrides: its own. config: resolved."""
        swept = " ".join(text for text in overrides if text.partition("=")[0].lstrip("+") in self.axes)
        title, shown = f"[{number + 1}/{self.n_expected}] {swept}", self.owner == this_process()
        return Job(title, folder, config, self.sweep_id, number, shown)

    @contextmanager
    def running(self) -> Iterator[Tracking]:
        """Where jobs are recorded that run in the block; that the sweep ends with it early is recorded, too."""
        tracking = self.opened()
        try:
            yield tracking
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted:
                ends_interrupted()
            tracking.store.interrupt_dead()
            tracking.store.set_sweep(self.sweep_id, status="interrupted" if interrupted else "failed")
            if not interrupted:
                raise
            say("Interrupted; the trial is marked so, and the same command runs what is missing.")
            sys.exit(INTERRUPTED)
        finally:
            end_kept()

    def run(self, folder: Path, jobs: Jobs, configs: Sequence[dict[str, Any]]) -> None:
        """Run the jobs, of which real ones share a model. folder: for theirs. configs: resolved."""
        simulated = all(config["hardware"]["simulated"] for config in configs)
        with self.running() as tracking, nullcontext() if simulated else shelf.open_shelf():
            under = folder if tracking.kept else tracking.outputs
            waiting = [
                self.job(number, overrides, config, under / str(number))
                for number, (overrides, config) in enumerate(zip(jobs.jobs, configs, strict=True))
            ]
            with performing(waiting, tracking) as performed:
                for job, outcome in performed:
                    self.note(job, outcome, tracking)

    def note(self, job: Job, outcome: Outcome, tracking: Tracking) -> None:
        """What became of a job: its line, and what is real in MLflow at once; a simulated one takes less than the
        import."""
        store = tracking.store
        if outcome.reused:
            say(f"{job.title}: trial {outcome.trial_id} is this one and is completed (force=true runs it again)")
        elif outcome.completed:
            say(f"{job.title}: {brief(store, outcome.trial_id)}{self._time_left(store)}")
        else:
            say(f"{job.title}: failed. {outcome.error}")
        if copied_at_once(tracking, outcome):
            copy_sweep(tracking.outputs, store, self.sweep_id)

    def _time_left(self, store: ResultsStore) -> str:
        """ "; 3 of 18 trials done, about 12 min left", by what those that this sweep ran have taken together."""
        ended, each_s = store.progress_of(self.sweep_id)
        if ended >= self.n_expected or each_s is None:
            return ""
        left_s = each_s * (self.n_expected - ended)
        return f"; {ended} of {self.n_expected} trials done, about {duration(left_s)} left"

    def finish(self) -> bool:
        """After the jobs: table, MLflow, figures. Returns whether every trial completed."""
        tracking = self.opened()
        store = tracking.store
        store.interrupt_dead()
        jobs = store.trials_of_sweep(self.sweep_id)
        completed = len(jobs) >= self.n_expected and all(job.last.status == "completed" for job in jobs)
        store.set_sweep(self.sweep_id, status="completed" if completed else "failed")
        drawn = drawing(tracking, self.tracking.url_env, self.sweep_id) if completed else nullcontext(list)
        with drawn as figures:  # while this process makes the table and writes to MLflow
            table = sweep_table(store, self.sweep_id)
            try:
                console().print(table.renderable, *fidelities(store, [job.last for job in jobs], self.sweep_id))
                print(*places(tracking), sep="\n", flush=True)
            except BrokenPipeError:
                discard_output()  # the sweep is still to be copied, and its status to be returned
            if tracking.mlflow:
                copy_sweep(tracking.outputs, store, self.sweep_id, table.text(), figures=False)
            paths = figures()
        print_figures(paths)
        if tracking.mlflow and paths:
            copy_sweep(tracking.outputs, store, self.sweep_id, table.text())
        return completed


# -- before the jobs ----------------------------------------------------------------------------------------------------


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
    ignored = {"seed", "repeat", "slo", "trial", "tracking"}  # which preflight does not read
    for plan in {plan.config.model_dump_json(exclude=ignored): plan for plan in known}.values():
        preflight(plan)
    for budget in dict.fromkeys(plan.budget() for plan in known):
        say(budget)
    first = plans[0].config
    tracking = open_tracking(first.tracking)
    tracking.store.interrupt_dead()
    axes = {key: ",".join(values) for key, values in jobs.axes.items()}
    # An objective that an overlay sets counts as typed: the sweep records what its views judge by.
    given = {text.lstrip("+").partition("=")[0]: text for text in jobs.overrides}
    asked = {f"slo.{name}": most for name, most in first.slo.model_dump().items() if most is not None}
    fixed = [*jobs.overrides, *(f"{name}={most}" for name, most in asked.items() if name not in given)]
    key = sweep_key(fixed, axes, [{**_asked(c), **marks_of(p)} for c, p in zip(configs, plans, strict=True)])
    values = dict(text.lstrip("+").partition("=")[::2] for text in fixed)
    sweep_id = tracking.store.open_sweep(
        key=key,
        name=first.experiment_name,
        experiment=values.get("experiment"),
        command=command_line(),
        overrides={**values, **{key: list(swept) for key, swept in jobs.axes.items()}},
        n_expected=len(jobs.jobs),
        host=host(),
        git_commit=git_commit(),
        anew=any(plan.config.force for plan in plans),
    )
    sweep = OpenSweep(sweep_id, len(jobs.jobs), tracking.outputs, tuple(jobs.axes), this_process(), first.tracking)
    if not here:
        told = TypeAdapter(OpenSweep).dump_json(sweep).decode().replace("'", "\\'")
        with read_write(config.hydra.overrides), open_dict(config.hydra.overrides):
            config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{MEMBERSHIP}='{told}'")
    say(f"Sweep of {len(jobs.jobs)} trials: " + ", ".join(f"{key} = {values}" for key, values in axes.items()))
    return sweep


def _asked(found: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a job, for the key of its sweep: without the content of a file that a job of it writes."""
    if found["hardware"]["profile"] == found["trial"]["measure_machine"]:
        return {**found, "hardware": {**found["hardware"], "profile": None}}
    return found


# -- after them ---------------------------------------------------------------------------------------------------------


@contextmanager
def drawing(tracking: Tracking, url_env: str | None, sweep_id: int) -> Iterator[Callable[[], list[Path]]]:
    """Draw the figures that the sweep has data for beside the block, which calls what it is given for the paths of pictures
    and tables: in another process, a fork where there are such."""
    if not tracking.kept:
        yield list
        return
    with ProcessPoolExecutor(1, _FORK) as beside:
        drawn = beside.submit(_draw, tracking.outputs, url_env, sweep_id)

        def paths() -> list[Path]:
            try:
                printed, problems = drawn.result()
            except Exception as error:  # a package is missing, or the process was killed
                printed, problems = "", str(error) or type(error).__name__
            if problems:
                say(f"Not every figure was drawn: {problems.splitlines()[-1]}")
            return [Path(line) for line in printed.splitlines() if line.endswith(_SHOWN_FILES)]

        yield paths


def _draw(outputs: Path, url_env: str | None, sweep_id: int) -> tuple[str, str]:
    """What drawing prints, and why not all of it was drawn, empty if it was."""
    os.environ["PENSIEVE_OUTPUTS"] = str(outputs)
    sys.path.insert(0, str(conf_folder().parent))
    figures = import_module("analysis.figures")
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as told:
        status = figures.main(["--sweep", str(sweep_id), *(["--url-env", url_env] if url_env else [])])
    return out.getvalue(), told.getvalue().strip() or "no reason given" if status else ""


def print_figures(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"{'Figure' if path.suffix == '.png' else 'Table'}:".ljust(10) + str(path), flush=True)


# -- several at a time, each process running one after another --------------------------------------------------------


A_PROCESS_BYTES = 2**30
"""What a simulated trial may come to: a million turns need a little more."""
_FORK = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
"""A fork brings all that was imported and read here, which takes as long as a short trial."""


def processes_here() -> int:
    """Simulated trials that run here at a time."""
    free_bytes = min(int(psutil.virtual_memory().available), host_memory_bytes())
    return max(1, min(cores(), free_bytes // A_PROCESS_BYTES))


@contextmanager
def performing(jobs: Sequence[Job], tracking: Tracking) -> Iterator[Iterator[tuple[Job, Outcome]]]:
    """Run the jobs: real ones in turn, simulated ones side by side unless trial.isolate says otherwise. Each comes with its
    outcome when it is there, in any order. After Ctrl-C those under way are dead."""
    beside = all(job.config["hardware"]["simulated"] and job.config["trial"]["isolate"] == "auto" for job in jobs)
    processes = min(processes_here(), len(jobs)) if beside else 1
    if processes == 1:
        yield ((job, outcome_of(job, tracking)) for job in jobs)
        return
    for late in ("pyarrow.parquet", "scipy.special"):
        import_module(late)  # once here, not in each process
    with ProcessPoolExecutor(processes, _FORK, _begin, (this_process(),)) as pool:
        futures = {pool.submit(_outcome_here, replace(job, shown=False), tracking.outputs): job for job in jobs}
        try:
            yield ((futures[future], future.result()) for future in as_completed(futures))
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _copying(asked: TrackingConfig, tracking: Tracking) -> Iterator[Callable[[int], None]]:
    """What copies a trial to MLflow: a process that imports MLflow while the block runs, as long as a short trial takes. A
    copy that was begun goes to its end, also after Ctrl-C: a store that MLflow has half made is of no use any more."""
    ours, theirs = _FORK.Pipe()
    beside = _FORK.Process(target=_copy_later, args=(theirs, this_process(), asked, tracking.outputs))  # type: ignore[attr-defined]
    beside.start()
    begun = False

    def copied(trial_id: int) -> None:
        nonlocal begun
        begun = True
        ours.send(trial_id)
        beside.join()
        if beside.exitcode:  # it was killed
            copy_trial(tracking.outputs, tracking.store, trial_id)

    try:
        yield copied
    finally:
        if not begun:
            beside.kill()


def _copy_later(told: Connection, owner: Owner, asked: TrackingConfig, outputs: Path) -> None:
    _begin(owner)
    with suppress(Exception):  # the copy says why
        import_mlflow()
    copy_trial(outputs, open_tracking(asked, outputs).store, told.recv())


def _begin(owner: Owner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends this process
    log_to_stderr()
    end_with(owner)


def _outcome_here(job: Job, outputs: Path) -> Outcome:
    return outcome_of(job, open_tracking(TrackingConfig.model_validate(job.config["tracking"]), outputs))


def outcome_of(job: Job, tracking: Tracking) -> Outcome:
    """Run the trial, whatever becomes of it."""
    with logged_in(job.folder / LOG_FILE):
        try:
            return run_trial(job, tracking)
        except Exception as error:  # before there was a trial to record it in; the others go on
            log.info("%s could not begin its trial", job.title, exc_info=error)
            return Outcome(0, "failed", error=explain(error))


# -- one job ------------------------------------------------------------------------------------------------------------


def run_composed(cfg: DictConfig) -> None:
    """Run one job of a sweep that Hydra launched: a failed trial is recorded and the next one runs. Raises ConfigError where
    the sweep's folder is not: the trial would be recorded in another database."""
    told = os.environ.get(MEMBERSHIP)
    if told is None:  # Hydra went on without the sweep's callback
        run_single(cfg, check(cfg))
        return
    sweep = TypeAdapter(OpenSweep).validate_json(told)
    if not sweep.outputs.is_dir():
        raise ConfigError(
            f"This job of a sweep finds no {sweep.outputs} on {host()}. Set PENSIEVE_OUTPUTS to a folder that every "
            "node sees under the same name, also for the launcher's processes."
        )
    end_with(sweep.owner)
    hydra = HydraConfig.get()
    texts, folder = [str(text) for text in hydra.overrides.task], Path(hydra.runtime.output_dir)
    with sweep.running() as tracking:
        job = sweep.job(int(hydra.job.num), texts, resolved(cfg), folder)
        sweep.note(job, outcome_of(job, tracking), tracking)


def run_single(cfg: DictConfig, config: TrialConfig) -> None:
    """Run a trial by itself and print it. MLflow is written after that, however the trial ended."""
    tracking = open_tracking(config.tracking)
    folder = Path(HydraConfig.get().runtime.output_dir) if tracking.kept else tracking.outputs
    job, store = Job(f"{config.model.name} {config.baseline.name}", folder, resolved(cfg)), tracking.store
    here = partial(copy_trial, tracking.outputs, store)
    beside = tracking.mlflow and config.hardware.simulated and installed("mlflow")
    with _copying(config.tracking, tracking) if beside else nullcontext(here) as copied:
        try:
            outcome = run_trial(job, tracking)
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
                copied(outcome.trial_id)


def copied_at_once(tracking: Tracking, outcome: Outcome) -> bool:
    return tracking.mlflow and bool(outcome.trial_id) and not tracking.store.trial(outcome.trial_id).simulated


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
    elif tracking.mlflow and os.environ.get(URL_ENV):
        lines.append(f"MLflow:   the server that {URL_ENV} names")
    elif tracking.mlflow:
        file = tracking.outputs / "mlflow.db"
        ui = f"make ui (reads {file})" if in_checkout() else f"mlflow ui --backend-store-uri sqlite:///{file}"
        lines.append(f"MLflow:   {ui}, then {UI_ADDRESS}/#/experiments")
    return lines


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
