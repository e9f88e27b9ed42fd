"""Benchmarks in the results database: one sweep a command, one trial for each backend of each case."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pensieve.lab.bench.case import Case, Measured, Result
from pensieve.lab.compose.machine import Device
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.environment import environment, git_commit, gpus, host
from pensieve.lab.results.identity import Identity, identify, sweep_key
from pensieve.lab.results.schema import BENCH
from pensieve.lab.results.store import ResultsStore

REPETITIONS = "repetitions"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all trials of a target share. dtype, model: "none" where the target has no model."""

    target: str
    device: Device
    hardware: str
    model: str
    dtype: str
    threads: int | None
    seed: int
    contended: bool


class Record:
    """The record of one bench command. Trials are numbered in the order in which they are added."""

    def __init__(self, store: ResultsStore, name: str, overrides: Mapping[str, str], device: Device) -> None:
        self.store = store
        self.trials: list[int] = []
        typed = [f"{key}={value}" for key, value in overrides.items() if key != "bench.markdown"]
        self.sweep_id = store.open_sweep(
            key=sweep_key(["bench", f"device={device.identity}", *typed], {}),
            name=f"bench_{name}",
            experiment=BENCH,
            command=command(),
            overrides=overrides,
            n_expected=0,
            host=host(),
            git_commit=git_commit(),
        )

    def add(self, setting: Setting, result: Result, limits: Mapping[str, Any], began: datetime) -> None:
        """Every backend of a case becomes a trial; one that failed becomes a failed trial with its error.

        limits: the rates measured in this run that the case's floor was computed from.
        """
        known = {"limits": dict(limits), "runtime": runtime()}
        for measured in result.measured:
            identity, config = _identity(setting, result.case, measured.backend)
            trial_id = self.store.begin_trial(_columns(setting, measured, identity, config, known))
            self.link(trial_id)
            self.store.set_trial(trial_id, started_at=began)
            self.store.add_metrics(trial_id, _metrics(result.case, measured))
            status = "completed" if measured.values else "failed"
            self.store.finish_trial(
                trial_id, status, error=measured.error, flags={"bench": True, "floor_is": result.case.floor_is}
            )

    def link(self, trial_id: int) -> None:
        """Count a trial, also one that was recorded elsewhere, as part of this command."""
        self.store.link(self.sweep_id, trial_id, len(self.trials), reused=False)
        self.trials.append(trial_id)

    def close(self, status: str) -> None:
        """status: completed, failed or interrupted."""
        self.store.set_sweep(self.sweep_id, status=status, n_expected=len(self.trials))


def command() -> str:
    """The command as it was typed in the checkout's folder."""
    return shlex.join(["python", *sys.argv])


def now() -> datetime:
    return datetime.now(UTC)


def _identity(setting: Setting, case: Case, backend: str) -> tuple[Identity, dict[str, Any]]:
    """Identify a backend's trial by case and device, without repetitions and output paths: measured again, it is the same
    one."""
    config = {
        "bench": {"target": setting.target, "case": case.label, "metric": case.metric, **case.parameters},
        "model": {"name": setting.model, "dtype": setting.dtype},
        "hardware": {"name": setting.hardware, "threads": setting.threads},
        "baseline": {"name": backend},
        "workload": {"name": f"bench_{setting.target}"},
        "seed": setting.seed,
    }
    device = {"name": setting.device.label, "count": setting.device.count, "threads": setting.threads}
    return identify(config, setting.device.simulated, device, entry="pensieve.lab.bench.command"), config


def _columns(
    setting: Setting, measured: Measured, identity: Identity, config: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "fingerprint": identity.fingerprint,
        "config_hash": identity.config_hash,
        "code_hash": identity.code_hash,
        "platform": identity.platform,
        "experiment": BENCH,
        "model": setting.model,
        "baseline": measured.backend,
        "workload": f"bench_{setting.target}",
        "hardware": setting.hardware,
        "seed": setting.seed,
        "weights": "none" if setting.model == "none" else "random",
        "dtype": setting.dtype,
        "device": setting.device.label,
        "device_count": setting.device.count,
        "simulated": setting.device.simulated,
        "contended": setting.contended,
        "git_commit": git_commit(),
        "config": dict(config),
        "environment": {**environment(), "code": dict(identity.code)},
        "engine": {
            "backend": measured.backend,
            "version": measured.version,
            "threads": setting.threads,
            "values": list(measured.values),
            **measured.engine,
            **known,
        },
    }


def _metrics(case: Case, measured: Measured) -> list[MetricValue]:
    found = [MetricValue(f.name, f.value, case.label, limit_value=f.limit) for f in measured.figures]
    if not measured.values:
        return found
    low, high = measured.interval or (None, None)
    n = len(measured.values)
    main = MetricValue(case.metric, measured.value, case.label, n, REPETITIONS, low, high, limit_value=case.floor)
    return [main, *found]


def runtime() -> dict[str, Any]:
    """Return the versions that only loaded libraries know, and the present clocks of the devices."""
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {"gpus": gpus()}
    if torch is not None:
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        if torch.version.cuda is not None:
            found["cudnn"] = torch.backends.cudnn.version()
    triton = sys.modules.get("triton")
    if triton is not None:
        found["triton"] = triton.__version__
    return found
