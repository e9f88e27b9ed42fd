"""Workers on the virtual clock of a simulated one: plans of one iteration, faults by count, and torch's own tokens.

Their times come from the cost model, so no decision depends on how fast this machine is.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pensieve.core.plan import GPU, Moved, StartReport, StepPlan, StepResult
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
        self._stores: set[int] = set()  # tickets of what goes to a tier below
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
            reads = [move.ticket for move in plan.moves if move.keys and move.target == GPU]
            self._stores.update(move.ticket for move in plan.moves if move.keys and move.target != GPU)
            self._counted_plans += bool(plan.rows)
            if plan.rows and self._counted_plans % FAILS == 0:
                self._never_told.update(move.ticket for move in plan.moves)
                result = replace(result, error="The device failed.", tokens={}, h2d_bytes=0, d2h_bytes=0)
            elif reads:
                self._counted_loads += 1
                unread = reads if self._counted_loads % MISREADS == 0 else []
        stored = [one for one in result.moved if one.ticket in self._stores]
        told = (one.ticket for one in result.moved if one.ticket not in self._stores)
        ended = [ticket for ticket in told if ticket not in self._never_told and ticket not in unread]
        self._never_told.update(unread)
        moved = []
        for ticket in ended:
            self._counted_copies += 1
            moved.append(Moved(ticket, ok=self._counted_copies % COPY_FAILS != 0))
        return replace(result, moved=(*stored, *moved, *(Moved(ticket, ok=False) for ticket in unread)))


class Twin(Stepwise):
    """Has torch perform each plan too, and reports torch's tokens and margins at the simulated times.

    drawn: by key of the noise and position, each token that torch drew with its margin. The outputs of its requests should
    be forced, so that no later input hangs on a tie.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Any,
        clock: Any,
        chunk_tokens: int,
        depth: int,
        below_bw: float,
        disk_blocks: int,
    ) -> None:
        super().__init__(model, hardware, clock, chunk_tokens, depth, below_bw)
        from pensieve.device.worker import TorchOptions, TorchWorker
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
        assert all(one.ok for one in computed.moved), "torch did what was asked"
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
    from pensieve.device.asked import ModelAsked
    from pensieve.device.model import load_model

    return load_model(ModelAsked(replace(model, dtype="float32"), threads=1))
