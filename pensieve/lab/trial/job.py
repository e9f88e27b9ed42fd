"""A trial as it is asked for: what makes two the same, where it is recorded, what became of it, what holds while it runs.

Its identity is the configuration, what `auto` comes to on this machine, and how the trial is run. It is asked before every
trial, so it must cost next to nothing where the trial is then reused: no torch is imported for a CPU, and a server that
somebody else started is asked three pages.
"""

import functools
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pensieve.errors import ConfigError, EngineMissing, HardwareMissing, ResultsError, TrialTimeout
from pensieve.lab.compose.build import outside_engine
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.model_files import weights_identity
from pensieve.lab.compose.plan import Device, TrialPlan, plans_in_flight
from pensieve.lab.compose.settings import TrackingConfig
from pensieve.lab.results.environment import Owner, is_alive, this_process
from pensieve.lab.results.identity import Identity, identify
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.trial.terminal import say

MEASURED_AT = "machine_measured_at"
"""In a real trial's column `engine`: when the profile was measured that it wrote beside itself."""

HEARTBEAT_S = 15.0  # well below the 60 s after which a silent trial counts as dead
OWNER_CHECK_S = 0.25
ORPHANED = 3  # exit status; nobody is left to read it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A trial that any process may run. title: for the progress bar and messages. folder: for the trial's files. config:
    resolved, as plain values, which is what identifies it.

    sweep_id: None for a single run; a sweep has done the preflight of all its jobs. shown: a bar tells how far the trial is;
    not where others run beside it.
    """

    title: str
    folder: Path
    config: Mapping[str, Any]
    sweep_id: int | None = None
    number: int = 0
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: completed, failed or interrupted. error: the sentence, where it is not completed.

    reused: the database held the trial already, and nothing ran. permanent: the same configuration would fail in the same
    way again, so that another attempt is wasted.
    """

    trial_id: int
    status: str
    reused: bool = False
    error: str | None = None
    permanent: bool = False

    @property
    def completed(self) -> bool:
        return self.status == "completed"


@dataclass(frozen=True, slots=True)
class Tracking:
    """kept: False for tracking=off, whose outputs folder is thrown away when the process ends."""

    outputs: Path
    store: ResultsStore
    mlflow: bool
    kept: bool


def open_tracking(tracking: TrackingConfig, outputs: Path | None = None) -> Tracking:
    """outputs: that of the sweep, where the trial belongs to one. Raises ConfigError, ResultsError."""
    kept = tracking.name != "off"
    url = os.environ.get(tracking.url_env) if tracking.url_env else None
    if tracking.url_env and not url:
        raise ConfigError(
            f"tracking={tracking.name} reads the database's URL from {tracking.url_env}, which is not "
            "set; export it, or use tracking=local."
        )
    folder = outputs or (outputs_folder() if kept else Path(_thrown_away().name))
    return Tracking(folder, open_store(folder, url), tracking.mlflow and kept, kept)


@functools.lru_cache(maxsize=1)
def _thrown_away() -> tempfile.TemporaryDirectory[str]:
    """One a process, so that the trials of a sweep meet in one database; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pensieve-off-")


def identity_of(plan: TrialPlan, resolved: Mapping[str, Any]) -> Identity:
    """What a completed trial must share with this one to be reused for it."""
    weights = None if plan.device.simulated else weights_identity(plan.config.model)
    marks = {**marks_of(plan), **({} if weights is None else {"weights_content": weights})}
    return identify(resolved, plan.device.simulated, device_facts(plan), marks)


def marks_of(plan: TrialPlan) -> dict[str, bool]:
    """The options of `trial` that change what it measures; the others only say how it is run."""
    return {"contended": True} if contended(plan) else {}


def contended(plan: TrialPlan) -> bool:
    """Whether other trials may run on the same device at the same time."""
    return not plan.config.trial.exclusive and not plan.device.simulated


def device_facts(plan: TrialPlan) -> dict[str, Any]:
    """The device and how it will be used, for results.identity.platform_of.

    attention: the backend expected to serve; the self-check at the start may fall back to another one, which the trial's
    column `engine` then names. copy_ahead: none without a CPU tier; what auto comes to follows from the device and the
    sizes. compiler: the C compiler of the native kernels. wait_policy: of OpenMP's threads on a CPU, as the environment
    says it.
    """
    hardware, kind = plan.config.hardware, plan.device.kind
    device: dict[str, Any] = {"name": plan.device.label, "count": plan.device.count}
    if plan.device.simulated:
        return device
    from pensieve.device.asked import CAPTURED, expected, physical_cores  # whose package sets a wait policy

    device["threads"] = hardware.threads or physical_cores()
    if (policy := os.environ.get("OMP_WAIT_POLICY")) and kind == "cpu":
        device["wait_policy"] = policy.upper()
    device["dtype"] = plan.model.dtype
    if plan.config.baseline.engine is not None:
        said = dict(outside_engine(plan).identity())
        return {**device, "packages": said.pop("packages", "").split(), **said}
    attention, compiler = expected(plan.config.attention_backend, kind, plan.chunk_tokens), None
    if attention == "native":
        from pensieve.compiler import compiler_version, find_compiler

        with suppress(EngineMissing):  # the backend was asked for, and the start reports what it lacks
            compiler = compiler_version(find_compiler()).replace(";", ",")
    recorded = hardware.graphs == "auto" and kind == "cuda" and attention == CAPTURED and not plan.device.divided
    return {
        **device,
        "attention": attention,
        "compiler": compiler,
        "graphs": "on" if recorded else "off",
        "copy_ahead": plan.config.scheduler.copy_ahead if plan.cpu_blocks else "none",
        "depth": plans_in_flight(plan.device, hardware.depth),
    }


# -- while it runs: heartbeat, deadline, its end when the process that started it is gone, the lock of its device ------------


@contextmanager
def heartbeat(store: ResultsStore, trial_id: int, interval_s: float = HEARTBEAT_S) -> Iterator[None]:
    """Writes the trial's heartbeat while the block runs. A write that fails is logged, and the next one is tried."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s):
            try:
                store.heartbeat(trial_id)
            except ResultsError as error:
                log.warning("heartbeat of trial %s: %s", trial_id, error)

    thread = threading.Thread(target=beat, name=f"heartbeat-{trial_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@functools.lru_cache(maxsize=8)  # a process that runs many jobs of one sweep watches once
def end_with(owner: Owner) -> None:
    """End this process at once when the owner is gone. An owner on another host, or this process itself, is not watched.

    The trial's row stays `running` with a dead process; the next run then marks it interrupted.
    """
    me = this_process()
    if owner.host == me.host and owner.pid != me.pid:
        threading.Thread(target=_watch, args=(owner,), name=f"orphan-{owner.pid}", daemon=True).start()


def _watch(owner: Owner) -> None:
    pause = threading.Event()
    while not pause.wait(OWNER_CHECK_S):
        now = datetime.now(UTC)
        if not is_alive(owner, now, now):
            log.error("process %s, which started this trial, is gone; the trial ends too", owner.pid)
            os._exit(ORPHANED)  # no thread of ours can stop the others in any other way


class Deadline:
    """Counts from its construction. timeout_s: trial.timeout_s; None: no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s, self._began = timeout_s, time.monotonic()

    @property
    def left_s(self) -> float | None:
        return None if self._timeout_s is None else max(0.0, self._began + self._timeout_s - time.monotonic())

    def check(self) -> None:
        """Raises TrialTimeout once the time is up."""
        if self.left_s == 0.0:
            raise TrialTimeout(
                f"The trial ran past trial.timeout_s={self._timeout_s:g}; raise it, or ask for less work a trial."
            )


def lock_files(device: Device) -> list[Path]:
    """One file for each device of this machine, in the temporary folder that all users share: their trials count too. Several
    are always taken in this order, so that nobody waits in a circle."""
    identities = sorted((device.identity, *device.others))
    return [Path(tempfile.gettempdir()) / f"pensieve-{re.sub(r'[^A-Za-z0-9-]', '-', one)}.lock" for one in identities]


@contextmanager
def device_lock(device: Device, exclusive: bool) -> Iterator[None]:
    """Lock the device while the block runs; that another trial has it is said once. A simulated one needs no lock."""
    if device.simulated or not exclusive:
        yield
        return
    with ExitStack() as held:
        for path in lock_files(device):
            lock = FileLock(path, mode=0o666)
            try:
                with suppress(Timeout):
                    held.enter_context(lock.acquire(timeout=0))
                    continue
                say(
                    f"Waiting for {device.label}: another trial runs on it (trial.exclusive=false would run beside it)."
                )
                held.enter_context(lock.acquire())
            except OSError as error:
                raise HardwareMissing(
                    f"The lock {path} of {device.label} cannot be taken ({error.strerror}); delete it if nobody else uses "
                    "the device, or use trial.exclusive=false."
                ) from error
        yield
