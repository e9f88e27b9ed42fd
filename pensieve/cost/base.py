"""What the cache and the scheduler ask of time: seconds to recompute or to move a chunk."""

from __future__ import annotations

from typing import Any, Protocol


class CostModel(Protocol):
    """Marginal seconds, not those of a lone chunk: a forward of 32 tokens would measure weight loading and turn the
    retention value into LRU."""

    def recompute_s(self, context_tokens: int) -> float:
        """One chunk that ends at `context_tokens`, computed as part of a longer prefill (paper section 4.3.1)."""
        ...

    def load_s(self) -> float:
        """One chunk from CPU to GPU."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the trial's record."""
        ...
