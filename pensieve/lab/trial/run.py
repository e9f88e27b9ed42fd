"""Run one trial unless the database holds it: build the system, replay the workload, measure, record.

A trial in a process of its own may crash alone, by a native crash or by the out-of-memory killer. Trials of a sweep may
follow each other in one such process, which keeps the model (pensieve.device.shelf). A trial that does not complete
ends its process, and the next one gets a new one.
"""

import atexit
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.core.plan import StartReport
from pensieve.device import shelf
from pensieve.errors import (
    ConfigError,
    EngineMissing,
    PensieveError,
    PolicyError,
    RequestFailed,
    RequestRefused,
    TrialRunning,
    UnsupportedModel,
)
from pensieve.lab.bound import Prices, bound_metrics
from pensieve.lab.compose.build import (
    build_cluster,
    build_outside,
    build_simulated,
    build_system,
    build_workload,
    check_free_memory,
    preflight,
)
from pensieve.lab.compose.explain import explain, explain_crash
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import TrialPlan, awaits_profile, memory_limit_bytes, plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.metrics import MetricValue, summarise, thin_percentiles
from pensieve.lab.replay import ReplayRecord, replay
from pensieve.lab.results.environment import Owner, environment, git_commit, this_process
from pensieve.lab.results.identity import Identity, explain_difference, input_files
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.tokens import MOST_TURNS, TokenFile
from pensieve.lab.trial.fidelity import fidelity_metrics
from pensieve.lab.trial.job import (
    MEASURED_AT,
    Deadline,
    Job,
    Outcome,
    Tracking,
    contended,
    device_lock,
    end_with,
    heartbeat,
    identity_of,
    open_tracking,
)
from pensieve.lab.trial.samples import (
    MOST_MOMENTS,
    Neighbours,
    Sampler,
    allocator_peak_bytes,
    device_metrics,
    forget_allocator_peak,
    gauges_of,
    holding_metrics,
    ledger_of_holding,
    meter_of,
)
from pensieve.lab.trial.terminal import (
    TrialProgress,
    command_line,
    ends_interrupted,
    raise_if_interrupted,
    remember_interrupts,
    say,
)
from pensieve.lab.workload.base import OfRealRun, Workload, WorkloadPlan
from pensieve.lab.workload.cache_state import check_start, contamination, unverified
from pensieve.plugins.engines import process as processes
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import System
from pensieve.serve.systems.engine_system import EngineSystem
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.serve.tokenizer import Tokenizer
from pensieve.units import format_bytes

log = logging.getLogger(__name__)


TURNS_A_BATCH = 1000  # a transaction costs as much as some 200 rows


WAIT_S = 0.2  # between two looks whether the process that runs a trial has ended it
ORPHAN_S = 3.0  # how long a process without its sweep may take to notice, on a busy machine

_INTERRUPTED = "Interrupted by the user; the same command runs it again."

PERMANENT = (ConfigError, EngineMissing, PolicyError, UnsupportedModel, RequestRefused)
"""Errors that every attempt of the same configuration meets."""


def run_trial(job: Job, tracking: Tracking) -> Outcome:
    """Run a job unless the database holds its trial; whatever happens is recorded.

    Errors of the trial end up in the outcome; those that leave nothing to record (an unknown field or device, an unreadable
    size, what preflight refuses) are raised. KeyboardInterrupt passes through, after the trial is marked. trial.retries
    further attempts follow a failure, and trial.isolate puts each in a process of its own.
    """
    config = check(job.config)
    plan = plan_trial(config)
    if awaits_profile(config):
        raise ConfigError(
            f"There is no {config.hardware.profile} yet: a real trial of the same repeat measures the machine and writes it. "
            "Run hardware=local before hardware=sim_paired, as experiment=machine/fidelity does, one job after the other; "
            "where its trials are there already and the file is gone, add force=true."
        )
    identity = identity_of(plan, job.config)
    if not config.force:
        known = _known(tracking, job, identity)
        older = known or tracking.store.completed_by_config(identity.config_hash)
        if older is not None and (known is not None or config.resume == "config"):
            return _reuse(older, tracking, job)
        if older is not None and (job.number == 0 or identity.unstated):  # other jobs of the sweep have the same reason
            say(explain_difference(older, identity))
    awaited = plan.device.simulated and config.hardware.profile == config.trial.measure_machine is not None
    built = None
    if job.sweep_id is None or awaited:  # a mistake in the configuration is no trial: it leaves nothing in the database
        built = preflight(plan)
    if job.sweep_id is None:
        say(plan.budget())
    asked = config.trial.isolate
    isolated = plan.device.kind == "cuda" if asked == "auto" else asked
    # In one process with the trial before it, whose model it then finds; an engine of others may leave anything behind.
    keeps = asked == "auto" and config.baseline.engine is None
    for attempts_left in range(config.trial.retries, -1, -1):
        if isolated:
            outcome = run_isolated(job, tracking, config.trial.timeout_s, keeps)
        else:
            outcome = Attempt(plan, identity, tracking, job, built).run()
            built = None
        if outcome.completed or outcome.permanent or attempts_left == 0:
            break
        say(f"{job.title}: failed, and is tried again ({attempts_left} more). {outcome.error}")
    return outcome


def _known(tracking: Tracking, job: Job, identity: Identity) -> Trial | None:
    """The completed trial that is the same one; where the job of the sweep shows such a one already, a newer one does not
    replace it there."""
    if identity.unstated:
        return None
    if job.sweep_id is not None:
        shown = tracking.store.shown_trial(job.sweep_id, job.number)
        if shown is not None and shown.fingerprint == identity.fingerprint:
            return shown
    return tracking.store.completed_trial(identity.fingerprint)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a trial, in this process."""

    plan: TrialPlan
    identity: Identity
    tracking: Tracking
    job: Job
    built: tuple[Workload, WorkloadPlan] | None = None
    """The workload and its description, where it was made for a check; nobody has started it."""

    def run(self) -> Outcome:
        """The trial is reused only where another process completes it meanwhile."""
        store = self.tracking.store
        try:
            begun = self._begin()
        except KeyboardInterrupt:  # its row may be there already
            ends_interrupted()
            store.close_trial_of(os.getpid(), _INTERRUPTED, None, "interrupted")
            raise
        if isinstance(begun, Trial):
            return _reuse(begun, self.tracking, self.job)
        trial_id, deadline = begun, Deadline(self.plan.config.trial.timeout_s)
        try:
            if self.job.sweep_id is not None:
                store.link(self.job.sweep_id, trial_id, self.job.number, reused=False)
            with store.database.held(), heartbeat(store, trial_id):
                self._measure(trial_id, deadline)
        except KeyboardInterrupt:
            ends_interrupted()
            _close(self.tracking, trial_id, "interrupted", _INTERRUPTED, None)
            raise
        except Exception as error:
            sentence = explain_crash(error)
            # torch's error for a full device is known by its name, since this module imports no torch.
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                sentence = f"Memory ran out ({explain(error).rstrip('.')}); use a smaller cache or model."
            log.info("trial %s failed", trial_id, exc_info=error)  # to the run folder's log, not to the terminal
            _close(self.tracking, trial_id, "failed", sentence, traceback.format_exc())
            shelf.empty()  # it may have broken what the next one would use
            return Outcome(trial_id, "failed", error=sentence, permanent=isinstance(error, PERMANENT))
        return Outcome(trial_id, "completed")

    def _begin(self) -> int | Trial:
        """Begin the trial and return its id; or return the trial that another process completed meanwhile.

        While another process runs it, this one waits, and says so where that process is not one whose sweep was killed: such
        a process ends by itself within ORPHAN_S.
        """
        columns = trial_columns(self.plan, self.identity, self.job.config)
        again = self.plan.config.force or self.identity.unstated is not None
        told_at = time.monotonic() + ORPHAN_S
        while True:
            try:
                return self.tracking.store.claim_trial(columns, again)
            except TrialRunning as running:
                if time.monotonic() > told_at:
                    say(f"{self.job.title}: {running}")
                    told_at = inf
            raise_if_interrupted()
            time.sleep(WAIT_S)

    def _measure(self, trial_id: int, deadline: Deadline) -> None:
        plan, store = self.plan, self.tracking.store
        config = plan.config
        tokenizer = build_tokenizer(config.model, plan.model.vocab, plan.device.simulated)
        workload, described = self.built or build_workload(plan, tokenizer)
        with device_lock(plan.device, config.trial.exclusive):
            outside = config.baseline.engine is not None and not plan.device.simulated
            if outside or plan.computes_elsewhere:
                shelf.empty()  # others load the model
            check_free_memory(plan)
            measured_at = None
            if config.trial.measure_machine is not None:
                from pensieve.lab.trial.machine import measure_beside

                measured_at = measure_beside(plan)
            forget_allocator_peak()
            system = _system(plan, tokenizer, described)
            neighbours = Neighbours()
            try:
                raise_if_interrupted()
                started = system.start()
                if isinstance(system, EngineSystem):
                    system.watch_content()
                    system.count_holding()
                deadline.check()
                effective = _effective(system, plan, described, started)
                effective["engine"].update({MEASURED_AT: measured_at} if measured_at else {})
                store.set_trial(trial_id, **effective)
                meter, gauges = meter_of(plan.device, plan.computes_elsewhere), gauges_of(system)
                sampler = Sampler(store, trial_id, meter, system.clock) if meter else None
                occupancy = Sampler(store, trial_id, gauges, system.clock, most=MOST_MOMENTS) if gauges else None
                limit_bytes = memory_limit_bytes(config.hardware)
                ours = processes.with_children if plan.computes_elsewhere else processes.this_process
                own = processes.MemoryWatch(limit_bytes, ours) if limit_bytes is not None and not outside else None
                with sampler or nullcontext(), occupancy or nullcontext(), own or nullcontext():
                    record = self._replay(trial_id, system, workload, described, deadline)
                others = neighbours.share()
                counted = system.counters()
                held = system.holdings() if isinstance(system, EngineSystem) else {}
            finally:
                system.close()
        raise_if_interrupted()
        if own is not None:
            if own.exceeded:
                limit = f"hardware.cpu_memory={config.hardware.cpu_memory}"
                raise MemoryError(f"this process had {format_bytes(own.peak_bytes)} resident, and {limit}")
            counted = {"processes_peak_bytes": own.peak_bytes}
        turns = record.measurement.turns
        if not len(turns.measured.completed):  # there is no latency to report
            reason = next(filter(None, turns.words("error")), "the workload has none")
            raise RequestFailed(f"No measured turn completed: {reason}")
        check_start(described, turns, system.can.starts_empty)
        metrics = summarise(record.measurement, started)
        start_s, end_s = record.measurement.measure_start_s, record.measurement.measure_end_s
        output = next((metric.value for metric in metrics if metric.name == "throughput_output_tok_s"), None)
        metrics += device_metrics(sampler.readings() if sampler else (), start_s, end_s, output)
        metrics += _processes(counted)
        metrics.append(MetricValue("allocator_peak_bytes", allocator_peak_bytes(plan.device, plan.computes_elsewhere)))
        prices = Prices(system.cost, system.chunk_tokens) if isinstance(system, EngineSystem) else None
        settings = system.settings()
        capacity = sum(int(settings.get(name) or 0) for name in ("gpu_tokens", "cpu_tokens", "disk_tokens"))
        metrics += bound_metrics(turns, capacity, prices)
        if isinstance(system, EngineSystem) and prices is not None:
            holdings = ledger_of_holding(held, turns, system.block_bytes)
            store.add_holdings(trial_id, holdings)
            metrics += holding_metrics(holdings, prices, turns, system.chunk_tokens)
        if isinstance(workload, OfRealRun):
            metrics += fidelity_metrics(workload.real, workload.seen, turns)
        store.add_metrics(trial_id, metrics)
        said = started.settings
        fell_back = f"attention_backend={said.get('attention_backend')} and the {said.get('forward')} forward served. "
        fell_back += " ".join(filter(None, (said.get("attention_note"), said.get("forward_note"))))
        told: dict[str, object] = {
            "others_cpu_share": None if plan.device.simulated else round(others, 3),
            "contaminated": contamination(described, turns),
            "cache_state_unverified": unverified(described, turns, system.can.starts_empty),
            "extrapolated": (system.extrapolated() if isinstance(system, InlineSystem) else None) or None,
            "fell_back": fell_back if said.get("fell_back") else None,
            "thin_percentiles": thin_percentiles(metrics) or None,
        }
        flags = {**record.flags, "load": record.load, "drain_share": record.drain_share}
        flags |= {name: value for name, value in told.items() if value is not None}
        store.finish_trial(trial_id, "completed", flags=flags, measure_start_s=start_s, measure_end_s=end_s)

    def _replay(
        self, trial_id: int, system: System, workload: Workload, described: WorkloadPlan, deadline: Deadline
    ) -> ReplayRecord:
        """Replay the workload. Turns go to the database and their tokens to Parquet as they complete; memory holds neither.

        Raises TrialTimeout past the deadline: when a turn progresses, and on a wall clock also when none does.
        """
        store = self.tracking.store
        bar = TrialProgress(self.job.title, described.turns, shown=self.job.shown)

        def on_batch(turns: Sequence[TurnRecord]) -> None:
            store.add_turns(trial_id, turns)
            if (described.turns or 0) <= MOST_TURNS:
                tokens.add(turns)

        def on_progress(turns: int, output_tokens: int) -> None:
            raise_if_interrupted()
            deadline.check()
            bar.update(turns, output_tokens)

        try:
            with TokenFile(self.job.folder / "tokens.parquet") as tokens:
                record = replay(
                    system,
                    workload,
                    on_batch=on_batch,
                    batch_size=TURNS_A_BATCH,
                    progress=on_progress,
                    deadline_s=None if system.clock.virtual else deadline.left_s,
                    keep_turns=False,
                )
                deadline.check()
            if tokens.path.is_file():
                store.add_artifact(trial_id, "tokens", tokens.path)
        finally:
            bar.close()
        return record


def _reuse(known: Trial, tracking: Tracking, job: Job) -> Outcome:
    """Show the known trial."""
    if job.sweep_id is not None:
        tracking.store.link(job.sweep_id, known.id, job.number, reused=True)
    return Outcome(known.id, "completed", reused=True)


def _system(plan: TrialPlan, tokenizer: Tokenizer, described: WorkloadPlan) -> System:
    baseline, hardware = plan.config.baseline, plan.config.hardware
    if baseline.engine is not None:
        return build_simulated(plan) if plan.device.simulated else build_outside(plan, tokenizer, described)
    if hardware.router == "single":
        return build_system(plan, tokenizer, described)
    if plan.device.simulated:
        return build_cluster(plan, tokenizer, described)
    from pensieve.plugins.replicas.system import build_replicas

    return build_replicas(plan, hardware.replicas, hardware.router)


def _processes(counted: Mapping[str, float]) -> list[MetricValue]:
    """Of the processes of a whole trial, where somebody watched them. counted: what a system counts, from its start on."""
    found, starts = list[MetricValue](), int(counted.get("process_starts", 0))
    if (peak := counted.get("processes_peak_bytes")) is not None:
        found.append(MetricValue("processes_peak_bytes", float(peak)))
    for name in ("process_load_ms", "process_start_ms") if starts else ():
        found.append(MetricValue(f"{name}_mean", counted[name] / starts, n=starts, n_unit="processes"))
    return found


def trial_columns(plan: TrialPlan, identity: Identity, resolved: Mapping[str, Any]) -> dict[str, Any]:
    c = plan.config
    groups = ("model", "baseline", "scheduler", "cache", "hardware")
    return {
        **{name: getattr(identity, name) for name in ("fingerprint", "config_hash", "code_hash", "platform")},
        **{group: getattr(c, group).name for group in groups},
        **{name: getattr(plan, name) for name in ("weights", "gpu_bytes", "cpu_bytes")},
        "experiment": c.experiment_name,
        "eviction": c.eviction.get("name"),
        "workload": str(c.workload.get("name")),
        "seed": c.seed,
        "repeat": c.repeat,
        "model_revision": c.model.revision,
        "dtype": plan.model.dtype,
        "device": plan.device.label,
        "device_count": plan.device.count,
        "simulated": plan.device.simulated,
        "contended": contended(plan),
        "gpu_tokens": plan.gpu_blocks * plan.chunk_tokens,
        "cpu_tokens": plan.cpu_blocks * plan.chunk_tokens,
        "kv_bytes_per_token": plan.model.kv_bytes_per_token,
        "git_commit": git_commit(),
        "config": dict(resolved),
        "environment": {
            **environment(),
            "inputs": input_files(resolved),
            "command": command_line(),
        },
    }


_OF_WORKLOAD = ("load", "sessions", "turns", "warmup_turns", "cache_state")


def _effective(system: System, plan: TrialPlan, described: WorkloadPlan, started: StartReport) -> dict[str, Any]:
    """What the started system reports about itself, and the workload's description."""
    settings = {**system.settings(), **started.settings}
    sizes = ("gpu_tokens", "cpu_tokens", "gpu_bytes", "cpu_bytes", "kv_bytes_per_token", "dtype")
    # None: the engine has no such limit, or does not say.
    effective: dict[str, Any] = {name: settings[name] for name in sizes if name in settings}
    if settings.get("revision"):
        effective["model_revision"] = settings["revision"]
    engine = {
        **settings,
        "budget_gpu_tokens": plan.budget_gpu_blocks * plan.chunk_tokens,
        "budget_cpu_tokens": plan.budget_cpu_blocks * plan.chunk_tokens,
        "budget_disk_tokens": plan.disk_blocks * plan.chunk_tokens,
        "workload": {**{name: getattr(described, name) for name in _OF_WORKLOAD}, **described.facts},
    }
    return {**effective, "working_set_tokens": described.working_set_tokens, "engine": engine}


def _close(tracking: Tracking, trial_id: int, status: str, error: str, trace: str | None) -> None:
    """Record how the trial ended. An error of the database is logged: it must not hide the trial's own error."""
    try:
        tracking.store.finish_trial(trial_id, status, error=error, traceback=trace)
    except PensieveError as second:
        log.error("trial %s cannot be closed: %s", trial_id, second)


# -- in a process of its own ----------------------------------------------------------------------------------------------

CRASH_FILE = "crash.log"  # in the job's folder: Python's stack, where a native crash left time to write it
LOG_FILE = "run.log"
LOG_FORM = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"  # as in conf/hydra/job_logging
GRACE_S = 30.0  # beyond trial.timeout_s, for the imports before it and for a trial that ends itself in time


class _Apart(NamedTuple):
    """A process that runs trials one after another, as they are asked for, and a pipe to it."""

    process: SpawnProcess
    pipe: Connection


_kept: list[_Apart] = []
"""The process that the next trial may run in, if there is one."""


def run_isolated(job: Job, tracking: Tracking, timeout_s: float | None, keeps: bool = False) -> Outcome:
    """One attempt in another process. If that dies, the trial is recorded as failed; Ctrl-C is passed on to it.

    keeps: in the process that completed the trial before this one, if that kept it too, and leave it to the next one, until
    `end_kept`. Otherwise the process is new and ends with the trial, and one that was kept ends before.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    crash = job.folder / CRASH_FILE
    crash.unlink(missing_ok=True)
    if not (keeps and _kept and _kept[0].process.is_alive()):
        end_kept()
        _kept.append(_start())
    process, pipe = _kept[0]
    outcome: Outcome | None = None
    late = False
    try:
        pipe.send((job, tracking.outputs))
        late = not pipe.poll(None if timeout_s is None else timeout_s + GRACE_S)
        if not late:
            outcome = pipe.recv()
    except (EOFError, ConnectionError):  # it died
        process.join()
    except KeyboardInterrupt:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        pipe.poll(GRACE_S)
        raise
    finally:
        if not keeps or outcome is None or not outcome.completed:
            end_kept()
    return _record_death(process, tracking, crash, timeout_s if late else None) if outcome is None else outcome


def _start() -> _Apart:
    spawn = multiprocessing.get_context("spawn")  # a fork would share the parent's CUDA context and threads
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, this_process()))
    process.start()
    theirs.close()
    atexit.register(end_kept)  # before multiprocessing waits for its processes
    return _Apart(process, ours)


def end_kept() -> None:
    """End the process that was kept for the next trial, if there is one, and with it what it holds."""
    while _kept:
        process, pipe = _kept.pop()
        if process.is_alive():
            process.kill()
        process.join()
        pipe.close()


def _record_death(process: BaseProcess, tracking: Tracking, crash: Path, late_s: float | None) -> Outcome:
    """Record the trial of a process that died as failed, with what is known of the reason."""
    code, pid = process.exitcode, process.pid
    assert code is not None and pid is not None
    if late_s is not None:
        sentence = f"The trial ran past trial.timeout_s={late_s:g}, did not stop by itself, and was killed."
    elif code == -signal.SIGKILL:
        sentence = (
            "The trial's process was killed (signal 9), most likely because memory ran out. Use a smaller cache or "
            "model, or run the same command again if you ended it yourself."
        )
    else:
        how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        sentence = f"The trial's process {how}; see the trial's traceback and the log in {crash.parent}."
    stack = crash.read_text(encoding="utf-8", errors="replace") if crash.is_file() else ""
    trial_id = tracking.store.close_trial_of(pid, sentence, stack or None)
    return Outcome(trial_id or 0, "failed", error=sentence)


@contextmanager
def logged_in(file: Path) -> Iterator[None]:
    """What is logged in this process goes to the file, too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, delay=True)
    handler.setFormatter(logging.Formatter(LOG_FORM))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def log_to_stderr() -> None:
    """In a new process: warnings, as conf/hydra/job_logging has it."""
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format=LOG_FORM, handlers=[console], force=True)


def _serve(pipe: Connection, parent: Owner) -> None:
    """Run what comes through the pipe, until the parent ends this process."""
    os.setsid()  # Ctrl-C on the terminal reaches it once, through the parent
    os.dup2(2, 1)  # what a trial prints is no result
    end_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where the shell told our parent to ignore it
    remember_interrupts()
    log_to_stderr()
    with shelf.open_shelf(), suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(_attempt(*pipe.recv()))


def _attempt(job: Job, outputs: Path) -> Outcome:
    file = job.folder / CRASH_FILE
    with logged_in(job.folder / LOG_FILE), file.open("w", encoding="utf-8") as crash:
        faulthandler.enable(crash)  # a native crash leaves Python's stack there
        try:
            config = check(job.config)
            tracking, plan = open_tracking(config.tracking, outputs), plan_trial(config)
            return Attempt(plan, identity_of(plan, job.config), tracking, job).run()
        except PensieveError as error:
            return Outcome(0, "failed", error=str(error))
        finally:
            faulthandler.disable()
            file.unlink(missing_ok=True)
