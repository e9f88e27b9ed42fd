"""The seam between deciding and doing."""

from __future__ import annotations

from typing import Protocol

from pensieve.core.plan import StartReport, StepPlan, StepResult

STAGING_BYTES = 256 * 2**20
"""What may wait in memory to be written to a tier below; a chunk that finds it full is not written: no step waits for it."""


class Worker(Protocol):
    """Performs plans, in order. Real, simulated and tensor-parallel workers fit this one protocol.

    `launch` never waits for the device. `collect` returns the oldest launched plan, or copies that finished since; on a
    virtual clock it is what moves time, never beyond `until_ns` unless a plan that started before ends after it. It
    returns None when nothing was launched, or nothing finished by `until_ns`.
    """

    depth: int
    """Plans in flight: 1 synchronous, 2 one step ahead."""

    computes: bool
    """False: it takes time only. No row needs the ids of its tokens then, and a plan may be repeated (StepPlan.repeat)."""

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self, until_ns: int | None) -> StepResult | None: ...

    def forget(self) -> None:
        """Nothing that the blocks hold is needed, and nothing is under way: memory that it took may go back to the system."""
        ...

    def close(self) -> None: ...
