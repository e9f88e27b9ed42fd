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
