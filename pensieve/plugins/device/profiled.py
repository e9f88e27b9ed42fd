"""A worker whose steps leave a trace: torch's profiler around some hundred of them, as a file for a trace viewer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pensieve.core.plan import StartReport, StepPlan, StepResult
from pensieve.device.worker import TorchWorker
from pensieve.errors import ResultsError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when the first trace begins: nothing of its own on the terminal
os.environ.setdefault("TEARDOWN_CUPTI", "0")  # taken down and brought up again beside CUDA graphs, it crashes

SKIPPED_STEPS = 8  # first steps touch memory and choose kernels; they would hide what a step costs
TRACED_STEPS = 200  # some ten thousand events each on a large model: more makes viewers unusable


class ProfiledWorker:
    """A TorchWorker with a profiler: `path` (ending in .json.gz) holds a Chrome trace of the steps after the first few.

    Steps that measure the device before the first request (step -1) are not counted. A trial with fewer steps is traced
    to its end. The profiler belongs to the thread that launches, so `close` must be called there. Its own cost is in
    every timing of such a trial.
    """

    def __init__(
        self, worker: TorchWorker, path: Path, skipped: int = SKIPPED_STEPS, traced: int = TRACED_STEPS
    ) -> None:
        self.path = path
        self._worker, self._skipped, self._traced = worker, skipped, traced
        self.depth: int = worker.depth
        self.computes = worker.computes
        self._steps = 0
        self._profiler: profile | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)  # all that the protocol does not name, as the worker itself has it

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        report = self._worker.start(gpu_blocks, cpu_blocks)
        self.depth = self._worker.depth
        settings = {**report.settings, "profiled_steps": [self._skipped, self._skipped + self._traced]}
        return replace(report, settings=settings)

    def launch(self, plan: StepPlan) -> None:
        if plan.step >= 0:
            self._steps += 1
            if self._steps == self._skipped + 1:
                self._begin()
            elif self._steps == self._skipped + self._traced + 1:
                self._write()
        with record_function(f"launch step {plan.step}: {len(plan.rows)} rows"):
            self._worker.launch(plan)

    def collect(self, until_ns: int | None) -> StepResult | None:
        with record_function("collect"):
            return self._worker.collect(until_ns)

    def forget(self) -> None:
        self._worker.forget()

    def close(self) -> None:
        self._write()
        self._worker.close()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._worker.model.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._worker.model.device.type == "cuda":
            torch.cuda.synchronize(self._worker.model.device)  # kernels under way belong to the steps that were traced
        profiler.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            raise ResultsError(f"The trace cannot be written to {self.path} ({error}); free some disk space.") from None
