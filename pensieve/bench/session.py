"""One bench command: the device it measures, the limits of that device, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from pensieve.bench.bandwidth import copy_bytes_s, matrix_flops_s
from pensieve.bench.case import Case, Figure, Measured, Result
from pensieve.bench.record import Record, Setting, now
from pensieve.bench.timer import interleaved
from pensieve.compose.machine import Device
from pensieve.compose.schema import HardwareConfig
from pensieve.trial.tracking import Tracking

Size = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Options:
    """The fields of conf/bench.yaml, decided. None: the target's own choice."""

    size: Size
    repeats: int | None
    model: str | None
    seed: int
    exclusive: bool
    markdown: Path | None = None
    only: str | None = None


@dataclass
class Bench:
    """What a target is given. `measure` times and records a case; `record` records what was timed otherwise.

    device: of torch. dtype: what models run in there. threads: of CPU operations, None for torch's own choice on a GPU.
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
        return torch.bfloat16 if self.on_gpu else torch.float32

    def rounds(self, otherwise: int) -> int:
        """How many interleaved repetitions: bench.repeats, or what the target thinks right."""
        return self.options.repeats or otherwise

    @property
    def copy_bytes_s(self) -> float:
        """Of a plain copy within device memory (bytes read and written): the best seen in this command."""
        if "copy_bytes_s" not in self.limits:
            self.measure_limits()
        return self.limits["copy_bytes_s"]

    @property
    def matrix_flops_s(self) -> float:
        """Of a large square product in `dtype`: the best seen in this command."""
        if "matrix_flops_s" not in self.limits:
            self.measure_limits()
        return self.limits["matrix_flops_s"]

    def measure_limits(self) -> None:
        """Measure both rates (again) and keep the best: a limit that was taken at a busy moment would flatter us."""
        for name, rate in (
            ("copy_bytes_s", copy_bytes_s(self.device)),
            ("matrix_flops_s", matrix_flops_s(self.device, self.dtype)),
        ):
            self.limits[name] = max(rate, self.limits.get(name, 0.0))

    def measure(
        self,
        case: Case,
        backends: Mapping[str, Callable[[], object]],
        *,
        rounds: int = 9,
        versions: Mapping[str, str] | None = None,
        engines: Mapping[str, Mapping[str, Any]] | None = None,
        absent: Mapping[str, str] | None = None,
        at_least_ms: float = 5.0,
    ) -> Result:
        """Time the backends of a case in interleaved rounds, in milliseconds a call, and record them.

        absent: backends that cannot run here, with the reason: recorded as failed trials, so that nobody takes their
        absence for an oversight. A backend that raises is recorded likewise, and the others go on.
        """
        began = now()
        with torch.inference_mode():
            times = interleaved(backends, self.rounds(rounds), self.device, at_least_ms)
        measured = [
            Measured(name, t.values, (versions or {}).get(name), (engines or {}).get(name, {}), error=t.error)
            for name, t in times.items()
        ]
        measured += [Measured(name, error=reason) for name, reason in (absent or {}).items()]
        return self.record(case, measured, began)

    def record(self, case: Case, measured: Sequence[Measured], began: Any = None) -> Result:
        """Record a case whose backends were timed by the target itself, interleaved as Bench.measure does it."""
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

    def note(self, sentence: str) -> None:
        """A sentence that stands below the table, and in the Markdown."""
        self.sentences.append(sentence)

    @property
    def gaps(self) -> list[str]:
        """Why the command must not exit with 0."""
        return [gap for result in self.results for gap in result.gaps]


__all__ = ["Bench", "Case", "Figure", "Measured", "Options", "Result"]
