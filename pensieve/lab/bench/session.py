"""One bench command: the device it measures, the limits of that device, the trials it runs, and its record: one sweep, with
one trial for each backend of each case."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from pensieve.lab.bench import Options
from pensieve.lab.bench.case import Case, Measured, Result
from pensieve.lab.bench.timer import interleaved
from pensieve.lab.compose import check, resolved
from pensieve.lab.compose.machine import Device
from pensieve.lab.compose.schema import HardwareConfig
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.environment import environment, git_commit, gpus, host
from pensieve.lab.results.identity import identify, sweep_key
from pensieve.lab.results.schema import BENCH
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.trial.job import Job, Outcome
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.tracking import Tracking

REPETITIONS = "repetitions"
# Of what measures the limits.
_COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 64 * 2**20}  # beyond any cache, and short
_SQUARE = {"cuda": 8192, "cpu": 1024}
_ROUNDS = 7


class Record:
    """The sweep of a bench command. Trials are numbered in the order in which they are linked."""

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


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Bench:
    """What a target is given: the device, the options, `run_trial`, and `record`, by which each case reaches table and
    database.

    device: torch's. threads: for CPU operations; None on a GPU, for torch's own choice. limits: rates by name, shared by the
    targets of a command. model: "none" where the target has none. began: when measuring the next case did.
    """

    target: str
    device: torch.device
    machine: Device
    hardware: HardwareConfig
    options: Options
    records: Record
    tracking: Tracking
    say: Callable[[str], None]
    threads: int | None = None
    model: str = "none"
    results: list[Result] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    began: datetime = field(default_factory=_now)

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def full(self) -> bool:
        return self.options.size == "full"

    @property
    def dtype(self) -> torch.dtype:
        """What models run in on this device."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def rounds(self, otherwise: int) -> int:
        """How many interleaved repetitions: bench.repeats, or the target's own choice."""
        return self.options.repeats or otherwise

    @property
    def copy_bytes_s(self) -> float:
        """Bytes a second, read plus written, of a plain copy within device memory: the best of this command."""
        if "copy_bytes_s" not in self.limits:
            self.measure_limits()
        return self.limits["copy_bytes_s"]

    @property
    def matrix_flops_s(self) -> float:
        """Operations a second (multiplies and adds) of a large square product in `dtype`: the best of this command."""
        if "matrix_flops_s" not in self.limits:
            self.measure_limits()
        return self.limits["matrix_flops_s"]

    def measure_limits(self) -> None:
        """Measure both rates (again) and keep the best: a limit measured at a busy moment would flatter ours."""
        for name, rate in (
            ("copy_bytes_s", _copy_bytes_s(self.device)),
            ("matrix_flops_s", _matrix_flops_s(self.device, self.dtype)),
        ):
            self.limits[name] = max(rate, self.limits.get(name, 0.0))

    def record(self, case: Case, measured: Sequence[Measured]) -> Result:
        """Every backend of a case becomes a trial; one that failed becomes a failed trial with its error."""
        result, store = Result(self.target, case, tuple(measured)), self.records.store
        known = {"limits": dict(self.limits), "runtime": _runtime()}
        for one in measured:
            trial_id = store.begin_trial(self._columns(case, one, known))
            self.records.link(trial_id)
            store.set_trial(trial_id, started_at=self.began)
            store.add_metrics(trial_id, _metrics(case, one))
            status = "completed" if one.values else "failed"
            store.finish_trial(trial_id, status, error=one.error, flags={"bench": True, "floor_is": case.floor_is})
        self.results.append(result)
        self.began = _now()
        return result

    def _columns(self, case: Case, measured: Measured, known: Mapping[str, Any]) -> dict[str, Any]:
        """A trial is identified by case and device, without repetitions and output paths: measured again, it is the same one.

        known: the rates measured in this run that the case's floor was computed from, and what it ran on.
        """
        machine, workload, dtype = self.machine, f"bench_{self.target}", str(self.dtype).removeprefix("torch.")
        config = {
            "bench": {"target": self.target, "case": case.label, "metric": case.metric, **case.parameters},
            "model": {"name": self.model, "dtype": dtype},
            "hardware": {"name": self.hardware.name, "threads": self.threads},
            "baseline": {"name": measured.backend},
            "workload": {"name": workload},
            "seed": self.options.seed,
        }
        device = {"name": machine.label, "count": machine.count, "threads": self.threads}
        identity = identify(config, machine.simulated, device, entry="pensieve.lab.bench.command")
        return {
            "fingerprint": identity.fingerprint,
            "config_hash": identity.config_hash,
            "code_hash": identity.code_hash,
            "platform": identity.platform,
            "experiment": BENCH,
            "model": self.model,
            "baseline": measured.backend,
            "workload": workload,
            "hardware": self.hardware.name,
            "seed": self.options.seed,
            "weights": "none" if self.model == "none" else "random",
            "dtype": dtype,
            "device": machine.label,
            "device_count": machine.count,
            "simulated": machine.simulated,
            "contended": not self.options.exclusive,
            "git_commit": git_commit(),
            "config": config,
            "environment": {**environment(), "code": dict(identity.code)},
            "engine": {
                "backend": measured.backend,
                "version": measured.version,
                "threads": self.threads,
                "values": list(measured.values),
                **measured.engine,
                **known,
            },
        }

    def run_trial(self, cfg: Any, title: str) -> Outcome:
        """Run a composed configuration, recorded like any trial and as part of the command; its error is in the outcome."""
        number = len(self.records.trials)
        folder = self.tracking.outputs / "runs" / "bench" / f"{self.records.sweep_id}-{number}"
        job = Job(title=title, folder=folder, sweep_id=self.records.sweep_id, number=number, preflight=False)
        outcome = run_trial(check(cfg), resolved(cfg), replace(self.tracking, mlflow=False), job, self.say)
        if outcome.trial_id:
            self.records.link(outcome.trial_id)
        return outcome

    def note(self, sentence: str) -> None:
        """A sentence that stands below the table, and in the Markdown."""
        self.sentences.append(sentence)

    @property
    def gaps(self) -> list[str]:
        """Why the command must not exit with 0, a sentence each."""
        return [gap for result in self.results for gap in result.gaps]


def _copy_bytes_s(device: torch.device) -> float:
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_s(lambda: target.copy_(source), device)


def _matrix_flops_s(device: torch.device, dtype: torch.dtype) -> float:
    n = _SQUARE[device.type]
    a = torch.randn(n, n, dtype=dtype, device=device)
    b = torch.randn(n, n, dtype=dtype, device=device)
    out = torch.empty(n, n, dtype=dtype, device=device)
    return 2 * n**3 / _best_s(lambda: torch.mm(a, b, out=out), device)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the best round: a limit is what the machine can do undisturbed."""
    with torch.inference_mode():
        times = interleaved({"": run}, _ROUNDS, device, at_least_ms=20.0)[""]
    assert times.error is None, times.error
    return min(times.values) / 1e3


def _metrics(case: Case, measured: Measured) -> list[MetricValue]:
    found = [MetricValue(f.name, f.value, case.label, limit_value=f.limit) for f in measured.figures]
    if not measured.values:
        return found
    low, high = measured.interval or (None, None)
    n = len(measured.values)
    main = MetricValue(case.metric, measured.value, case.label, n, REPETITIONS, low, high, limit_value=case.floor)
    return [main, *found]


def _runtime() -> dict[str, Any]:
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
