"""Workers on the virtual clock of a simulated one: plans of one iteration, faults by count, and torch's own tokens.

Their times come from the cost model, so no decision depends on how fast this machine is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pensieve.core.plan import StartReport, StepPlan, StepResult
from pensieve.sim.worker import SimulatedWorker
from pensieve.specs import ModelSpec

FAILS, COPY_FAILS, MISREADS = 37, 23, 3  # every so many plans with rows, copies, and loads from disk


class Stepwise(SimulatedWorker):
    """Gets a plan for each iteration, as a worker that computes."""

    computes = True


class Faulty(Stepwise):
    """Fails plans, copies and loads from disk, each after a fixed count."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counted_plans = self._counted_copies = self._counted_loads = 0
        self._sent: list[StepPlan] = []
        self._never_told: set[int] = set()  # tickets of failed plans, which are never reported

    def launch(self, plan: StepPlan) -> None:
        self._sent.append(plan)
        super().launch(plan)

    def collect(self, until_ns: int | None) -> StepResult | None:
        result = super().collect(until_ns)
        if result is None:
            return None
        unread: list[int] = []
        if result.step is not None:
            plan = self._sent.pop(0)
            reads = [one.ticket for one in plan.disk if hasattr(one, "ticket")]
            self._counted_plans += bool(plan.rows)
            if plan.rows and self._counted_plans % FAILS == 0:
                self._never_told.update([*(copy.ticket for copy in (*plan.swap_in, *plan.swap_out)), *reads])
                result = replace(result, error="The device failed.", tokens={}, h2d_bytes=0, d2h_bytes=0)
            elif reads:
                self._counted_loads += 1
                unread = reads if self._counted_loads % MISREADS == 0 else []
        ended = [ticket for ticket in result.done if ticket not in self._never_told and ticket not in unread]
        self._never_told.update(unread)
        failed = []
        for ticket in ended:
            self._counted_copies += 1
            if self._counted_copies % COPY_FAILS == 0:
                failed.append(ticket)
        done = tuple(ticket for ticket in ended if ticket not in failed)
        return replace(result, done=done, failed=tuple(failed), unread=tuple(unread))


class Twin(Stepwise):
    """Has torch perform each plan too, and reports torch's tokens and margins at the simulated times.

    drawn: by key of the noise and position, each token that torch drew with its margin. The outputs of its requests should
    be forced, so that no later input hangs on a tie.
    """

    def __init__(
        self, model: ModelSpec, hardware: Any, clock: Any, chunk_tokens: int, depth: int, disk_blocks: int
    ) -> None:
        super().__init__(model, hardware, clock, chunk_tokens, depth)
        from pensieve.device.options import TorchOptions
        from pensieve.device.worker import TorchWorker
        from pensieve.plugins.tiers.disk_transfer import DiskOptions

        options = TorchOptions(depth=depth)
        if disk_blocks:
            folder = Path(mkdtemp())
            options = replace(options, transfer=DiskOptions(folder / "pool.kv", folder, bytes(32), disk_blocks))
        self._torch = TorchWorker(_loaded(model), chunk_tokens, clock, options=options)
        self._plans: list[StepPlan] = []
        self.drawn: dict[tuple[int, int], tuple[int, float]] = {}

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        self._torch.start(gpu_blocks, cpu_blocks)
        return super().start(gpu_blocks, cpu_blocks)

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self._torch.launch(plan)
        self._plans.append(plan)

    def collect(self, until_ns: int | None) -> StepResult | None:
        result = super().collect(until_ns)
        if result is None or result.step is None:
            return result
        computed = self._torch.collect(None)
        assert computed is not None and computed.step == result.step and computed.error is None, computed
        assert not (computed.failed or computed.unread or computed.unkept), "torch did what was asked"
        for row in self._plans.pop(0).rows:
            if row.sample is not None:
                drawn = (computed.tokens[row.slot], computed.margins[row.slot])
                self.drawn[row.sample.key, row.sample.position] = drawn
        return replace(result, tokens=computed.tokens, margins=computed.margins)

    def close(self) -> None:
        self._torch.close()
        super().close()


@cache
def _loaded(model: ModelSpec) -> Any:
    """In float32, with random weights."""
    from pensieve.device.model import load_model

    return load_model(replace(model, dtype="float32"), "random", None, None, 0, "cpu", threads=1)
