"""What a trial is started with, what makes two of them the same, where it is recorded, and what became of it.

Its identity is the configuration, what `auto` comes to on this machine, and how the trial is run. It is asked before every
trial, so it must cost next to nothing where the trial is then reused: no torch is imported for a CPU, and a server that
somebody else started is asked three pages.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError, EngineMissing
from pensieve.lab.compose.build import outside_engine
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.model_files import weights_identity
from pensieve.lab.compose.plan import TrialPlan
from pensieve.lab.compose.schema import TrackingConfig, TrialConfig
from pensieve.lab.results.identity import RUNS_TRIALS, Identity, identify
from pensieve.lab.results.mlflow_runs import remote_url
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.trial.terminal import Shown
from pensieve.plugins.engines.ray_cluster import ray_version

MEASURED_AT = "machine_measured_at"
"""In a real trial's column `engine`: when the profile was measured that it wrote beside itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """title: for the progress bar and messages. folder: for the trial's files.

    sweep_id: None for a single run. preflight: False where the sweep has done it for all its jobs. reproduces: the trial
    that this one repeats, to be compared with it. progress: of its turns, see terminal.Shown. keeps: the process that an
    isolated trial runs in may stay for the next one, since whoever runs both ends it when they are over.
    """

    title: str
    folder: Path
    sweep_id: int | None = None
    number: int = 0
    preflight: bool = True
    reproduces: int | None = None
    progress: Shown = "bar"
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A trial that another process is asked to run. config: resolved."""

    config: dict[str, Any]
    job: Job


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: completed, failed or interrupted. error: the sentence, where it is not completed.

    reused: the database held the trial already, and nothing ran. note: what a user should know besides. permanent: the
    same configuration would fail in the same way again, so that another attempt is wasted.
    """

    trial_id: int
    status: str
    reused: bool = False
    error: str | None = None
    note: str | None = None
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


def open_tracking(config: TrialConfig, outputs: Path | None = None) -> Tracking:
    """outputs: that of the sweep, where the trial belongs to one. Raises ConfigError, ResultsError."""
    return open_named(config.tracking, outputs)


def open_named(tracking: TrackingConfig, outputs: Path | None = None) -> Tracking:
    """As open_tracking, from an option of conf/tracking alone: a benchmark has no composed trial."""
    kept = tracking.name != "off"
    url = None
    if tracking.url_env:
        url = os.environ.get(tracking.url_env)
        if not url:
            raise ConfigError(
                f"tracking={tracking.name} reads the database's URL from {tracking.url_env}, which is not "
                "set; export it, or use tracking=local."
            )
    if tracking.mlflow and kept:
        remote_url()  # a mistake in it is told before anything is opened
    folder = outputs or (outputs_folder() if kept else Path(_thrown_away().name))
    return Tracking(folder, open_store(folder, url), tracking.mlflow and kept, kept)


@functools.lru_cache(maxsize=1)
def _thrown_away() -> tempfile.TemporaryDirectory[str]:
    """One a process, so that the trials of a sweep meet in one database; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pensieve-off-")


def identity_of(
    plan: TrialPlan, resolved: Mapping[str, Any], reproduces: int | None = None, entry: str = RUNS_TRIALS
) -> Identity:
    """What a completed trial must share with this one to be reused for it.

    reproduces: the trial that this one repeats; a repetition is never reused in its place. entry: the module that runs it.
    """
    weights = None if plan.device.simulated else weights_identity(plan.config.model)
    told = {"weights_content": weights, "reproduces": reproduces}
    marks = {**marks_of(plan), **{name: value for name, value in told.items() if value is not None}}
    return identify(resolved, plan.device.simulated, device_facts(plan), marks, entry)


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
    device: dict[str, Any] = {"name": plan.device.label, "count": plan.device.count}
    if plan.device.simulated:
        return device
    if plan.config.baseline.engine is not None:
        return {**device, **_waiting(plan), **_outside_facts(plan)}
    from pensieve.device.asked import physical_cores
    from pensieve.device.kernels.backends import CAPTURING, expected
    from pensieve.lab.compose.plan import plans_in_flight

    hardware, kind = plan.config.hardware, plan.device.kind
    attention = expected(plan.config.attention_backend, kind, plan.chunk_tokens)
    recorded = hardware.torch.graphs == "auto" and kind == "cuda" and attention in CAPTURING and not plan.device.divided
    return {
        **device,
        **({} if hardware.cluster.router == "single" else {"ray": ray_version()}),
        "threads": hardware.torch.threads or physical_cores(),
        **_waiting(plan),
        "dtype": plan.model.dtype,
        "attention": attention,
        "compiler": _compiler() if attention == "native" else None,
        "graphs": "on" if recorded else "off",
        "copy_ahead": plan.config.scheduler.copy_ahead if plan.cpu_blocks else "none",
        "depth": plans_in_flight(plan.device, hardware.torch.depth),
    }


def _waiting(plan: TrialPlan) -> dict[str, Any]:
    """How threads of OpenMP wait for each other in our engine and in all that this process starts."""
    import pensieve.device  # noqa: F401 - sets what is used where the environment names none

    policy = os.environ.get("OMP_WAIT_POLICY")
    return {"wait_policy": policy.upper()} if policy and plan.device.kind == "cpu" else {}


def _outside_facts(plan: TrialPlan) -> dict[str, Any]:
    from pensieve.device.asked import physical_cores

    said = dict(outside_engine(plan).identity())
    packages = said.pop("packages", "").split()
    return {
        "threads": plan.config.hardware.torch.threads or physical_cores(),
        "dtype": plan.model.dtype,
        "packages": packages,
        **said,
    }


def _compiler() -> str | None:
    """Name the C compiler; None where attention_backend=native is given and none is found, which the start reports."""
    from pensieve.compiler import compiler_version, find_compiler

    try:
        return compiler_version(find_compiler()).replace(";", ",")
    except EngineMissing:
        return None
