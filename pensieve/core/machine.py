"""What the core asks of a machine: to perform plans, to tell the time, and to say what computing and moving take."""

from typing import Any, Protocol

from pensieve.core.plan import StartReport, StepPlan, StepResult


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


class Clock(Protocol):
    """Nanoseconds since the clock was made; never steps back."""

    virtual: bool

    def now_ns(self) -> int: ...

    def now_s(self) -> float: ...


class CostModel(Protocol):
    """Marginal seconds, not those of a lone chunk: a forward of 32 tokens would measure weight loading and turn the
    retention value into LRU."""

    def recompute_s(self, context_tokens: int) -> float:
        """One chunk that ends at `context_tokens`, computed as part of a longer prefill (paper section 4.3.1)."""
        ...

    def step_s(self) -> float:
        """What an iteration costs before it computes anything."""
        ...

    def weights_s(self) -> float:
        """What the linear layers of an iteration take at least, however few its tokens: the reading of the weights."""
        ...

    def load_s(self) -> float:
        """One chunk from CPU to GPU."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the trial's record."""
        ...
