"""In-engine systems over workers that tests can hold up, on either clock, without torch."""

import threading
from typing import Any

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.machine import CostModel
from pensieve.core.plan import Moved, StartReport, StepPlan, StepResult
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.serve.systems.base import WallClock
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.serve.systems.threaded_system import ThreadedSystem
from pensieve.sim.roofline import Roofline
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from tests.simulated import MACHINE, MODEL
from tests.waiting import PATIENCE_S


class HeldWorker:
    """Computes at once, as soon as `gate` is open. entered: set while a plan is held up. failure: what a plan raises."""

    depth = 1
    computes = True

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._plan: StepPlan | None = None
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.closed = 0

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        return StartReport(load_s=0.0, warmup_ms=0.0)

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self, until_ns: int | None) -> StepResult | None:
        plan, self._plan = self._plan, None
        if plan is None:
            return None
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        tokens = {row.slot: 1 for row in plan.rows if row.sample is not None}
        moved = tuple(Moved(move.ticket) for move in plan.moves)
        return StepResult(plan.step, tokens, ended_ns=self._clock.now_ns(), moved=moved)

    def close(self) -> None:
        self.closed += 1


class PricedSystem(ThreadedSystem):
    """With the costs of a toy machine, which nobody measures."""

    def _prices(self, report: StartReport) -> CostModel:
        return Roofline(self._model, self._hardware, self.chunk_tokens)


def parts(**changed: Any) -> dict[str, Any]:
    """What an EngineSystem takes beside its worker and clock."""
    return {
        "model": MODEL,
        "hardware": MACHINE,
        "cache": TwoTierCache,
        "policy": RetentionValue,
        "scheduler": SchedulerSettings(),
        "gpu_blocks": 512,
        "cpu_blocks": 512,
        "chunk_tokens": 4,
        **changed,
    }


def threaded(**changed: Any) -> tuple[ThreadedSystem, HeldWorker]:
    clock = WallClock()
    worker = HeldWorker(clock)
    return PricedSystem(worker=worker, clock=clock, **parts(**changed)), worker


def inline(worker: type[SimulatedWorker] = SimulatedWorker, **changed: Any) -> InlineSystem:
    clock = VirtualClock()
    return InlineSystem(worker=worker(MODEL, MACHINE, clock, 4), clock=clock, **parts(**changed))
