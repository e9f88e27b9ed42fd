"""A cost model that is wrong by a stated factor: what decisions are worth when their prices are not."""

from __future__ import annotations

from typing import Any

from pensieve.core.cost import CostModel


class MistakenCost:
    """Another cost model's seconds, all computing taken `compute` times as long, and of a chunk's time what grows with its
    context `context` times more than that. Loads are priced as they are: with both wrong alike no choice between computing
    and loading would change.

    Only who decides asks it. What anything takes on a simulated machine its worker asks of a model of its own.
    """

    def __init__(self, cost: CostModel, compute: float, context: float, chunk_tokens: int) -> None:
        self._cost, self._compute, self._context = cost, compute, context
        self._first_s = cost.recompute_s(chunk_tokens)

    def recompute_s(self, context_tokens: int) -> float:
        grown = self._cost.recompute_s(context_tokens) - self._first_s
        return self._compute * (self._first_s + self._context * grown)

    def step_s(self) -> float:
        return self._compute * self._cost.step_s()

    def weights_s(self) -> float:
        return self._compute * self._cost.weights_s()

    def load_s(self) -> float:
        return self._cost.load_s()

    def hidden_copies(self) -> float | None:
        return self._cost.hidden_copies()

    def describe(self) -> dict[str, Any]:
        return {**self._cost.describe(), "mistaken": {"compute": self._compute, "context": self._context}}


def mistaken(cost: CostModel, compute: float, context: float, chunk_tokens: int) -> CostModel:
    """The cost model itself where both factors are 1."""
    return cost if compute == context == 1.0 else MistakenCost(cost, compute, context, chunk_tokens)
