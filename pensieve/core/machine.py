"""What the core asks of a machine: to perform plans, to tell the time, and to say what computing and moving take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

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


class Clock(Protocol):
    """Nanoseconds since the clock was made; never steps back."""

    virtual: bool

    def now_ns(self) -> int: ...

    def now_s(self) -> float: ...


class WallClock:
    """The machine's monotonic clock: a change of the wall time does not reach it."""

    virtual = False

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def now_s(self) -> float:
        return self.now_ns() / 1e9


class VirtualClock:
    """A counter that only a simulated worker or an idle engine moves.

    Integer nanoseconds, so that summing many short steps gives the same time as one long one.
    """

    virtual = True

    def __init__(self) -> None:
        self._now_ns = 0
        self.on_advance: Callable[[int], None] | None = None
        """Called with the new time just before the clock moves there: nothing changes in between."""

    def now_ns(self) -> int:
        return self._now_ns

    def now_s(self) -> float:
        return self._now_ns / 1e9

    def advance_to(self, ns: int) -> None:
        """Move forward to `ns`; an earlier time leaves the clock where it is."""
        if ns > self._now_ns:
            if self.on_advance is not None:
                self.on_advance(ns)
            self._now_ns = ns


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


def marginal_s(cost: CostModel, start: int, stop: int, chunk_tokens: int) -> float:
    """Positions [start, stop) of a conversation, computed as part of a longer prefill."""
    seconds = 0.0
    while start < stop:
        end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        seconds += cost.recompute_s(end) * (end - start) / chunk_tokens
        start = end
    return seconds


def predicted_s(cost: CostModel, runs: Iterable[tuple[int, int]], chunk_tokens: int) -> float:
    """An iteration that computes these positions of one conversation, chunk by chunk as the eviction policy counts them, and
    what the weights of a short one take beyond their arithmetic."""
    marginal, tokens = 0.0, 0
    for start, stop in runs:
        tokens += stop - start
        marginal += marginal_s(cost, start, stop, chunk_tokens)
    linear = cost.recompute_s(chunk_tokens) * tokens / chunk_tokens  # a first chunk attends to next to nothing
    return cost.step_s() + marginal + max(0.0, cost.weights_s() - linear)
