"""What the cache and the scheduler ask of time: seconds to recompute or to move a chunk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class CostModel(Protocol):
    """Marginal seconds, not those of a lone chunk: a forward of 32 tokens would measure weight loading and turn the
    retention value into LRU."""

    def recompute_s(self, context_tokens: int) -> float:
        """One chunk that ends at `context_tokens`, computed as part of a longer prefill (paper section 4.3.1)."""
        ...

    def step_s(self) -> float:
        """What an iteration costs before it computes anything."""
        ...

    def load_s(self) -> float:
        """One chunk from CPU to GPU."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the trial's record."""
        ...


def predicted_s(cost: CostModel, runs: Iterable[tuple[int, int]], chunk_tokens: int) -> float:
    """An iteration that computes these positions of one conversation, chunk by chunk as the eviction policy counts them."""
    seconds = cost.step_s()
    for start, stop in runs:
        while start < stop:
            end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
            seconds += cost.recompute_s(end) * (end - start) / chunk_tokens
            start = end
    return seconds
