"""One bench command: the device it measures, the limits of that device, the trials it runs, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pensieve.lab.bench import Options
from pensieve.lab.bench.case import Case, Measured, Result
from pensieve.lab.bench.record import Record, Setting, now
from pensieve.lab.bench.timer import interleaved
from pensieve.lab.compose import check, resolved
from pensieve.lab.compose.machine import Device
from pensieve.lab.compose.schema import HardwareConfig
from pensieve.lab.trial.job import Job, Outcome
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.tracking import Tracking

# Of what measures the limits.
_COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 64 * 2**20}  # beyond any cache, and short
_SQUARE = {"cuda": 8192, "cpu": 1024}
_ROUNDS = 7


@dataclass
class Bench:
    """What a target is given: the device, the options, `run_trial`, and `record`, by which each case reaches table and
    database.

    device: torch's. threads: for CPU operations; None on a GPU, for torch's own choice. limits: rates by name, shared by the
    targets of a command.
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

    def record(self, case: Case, measured: Sequence[Measured], began: Any = None) -> Result:
        """Record a case with what each backend made of it. began: when measuring it began."""
        result = Result(self.target, case, tuple(measured))
        setting = Setting(
            target=self.target,
            device=self.machine,
            hardware=self.hardware.name,
            model=self.model,
            dtype=str(self.dtype).removeprefix("torch."),
            threads=self.threads,
            seed=self.options.seed,
            contended=not self.options.exclusive,
        )
        self.records.add(setting, result, self.limits, began or now())
        self.results.append(result)
        return result

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
