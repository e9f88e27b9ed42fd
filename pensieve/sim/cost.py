"""What a simulated worker asks of time, and which model of it a machine has. One model is wrong by a stated factor. How many
requests a second stateless serving could finish is the unit of a relative load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve.core.machine import CostModel
from pensieve.core.plan import NO_DECODES, Decodes
from pensieve.sim.machine_profile import ProfiledCost, read_profile
from pensieve.sim.measured import MeasuredCost
from pensieve.sim.roofline import Roofline, Run
from pensieve.specs import HardwareSpec, ModelSpec


class SimulatedCost(CostModel, Protocol):
    """Whole iterations and copies, beside the chunks that a cost model prices."""

    def iteration_s(self, runs: Iterable[Run], sampled: int, decodes: Decodes = NO_DECODES) -> float:
        """One iteration over attention rows of queries [start, stop) each, and decodes beside them; logits of `sampled`
        positions."""
        ...

    def following_s(self, runs: Sequence[Run], sampled: int, decodes: Decodes, most: int) -> NDArray[np.float64] | None:
        """So many iterations that follow one of these rows, each of which goes on by as many positions as it has. None: each
        has to be asked for by itself."""
        ...

    def ran(self, iterations: int) -> None:
        """So many of those that were told at once have run."""
        ...

    def transfer_s(self, blocks: int, to_gpu: bool, runs: int = 1) -> float:
        """Blocks over the link between CPU and GPU, in so many runs of blocks that are neighbours in both."""
        ...

    def extrapolated(self) -> dict[str, Any]:
        """What was asked beyond what was measured, by term; empty: nothing."""
        ...


def simulated_cost(model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> SimulatedCost:
    """By a profile of the whole machine, or tables of measured kernels, where it has either; else by its roofline."""
    if hardware.profile is not None:
        return ProfiledCost(read_profile(hardware.profile), model, hardware, chunk_tokens)
    if hardware.terms.get("projections", "roofline") == "roofline":
        return Roofline(model, hardware, chunk_tokens)
    return MeasuredCost(model, hardware, chunk_tokens)


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

    def describe(self) -> dict[str, Any]:
        return {**self._cost.describe(), "mistaken": {"compute": self._compute, "context": self._context}}


def mistaken(cost: CostModel, compute: float, context: float, chunk_tokens: int) -> CostModel:
    """The cost model itself where both factors are 1."""
    return cost if compute == context == 1.0 else MistakenCost(cost, compute, context, chunk_tokens)


Lengths = Sequence[tuple[int, int]]
"""(tokens of the whole prompt, history included; tokens of the reply) of each request."""


@dataclass(frozen=True, slots=True)
class Batches:
    """What bounds a batch. kv_tokens: of the pool that requests may fill; requests, positions: of one iteration."""

    kv_tokens: int
    requests: int
    positions: int


def stateless_capacity(cost: SimulatedCost, lengths: Lengths, batches: Batches) -> float:
    """Requests a second that stateless serving finishes when it never lacks work.

    Mean values of its steady state: as many requests run as the KV pool holds (or an iteration takes); each iteration
    decodes a token for all of them and prefills the prompts of as many as finish. Queueing, suspension, the spread of lengths
    and prompts that come whole rather than in even shares are left out: saturation lies near it, on either side (a simulated
    A100: OPT-13B at 1.07 times, Llama 2-13B with 10 KV heads beyond 1.3 times). It is a unit of load, not a result.
    """
    assert lengths, "no request to take the mean of"
    prompts = sum(prompt for prompt, _ in lengths)
    replies = sum(reply for _, reply in lengths)
    # A request holds its prompt and the reply so far, for as many iterations as its reply has tokens.
    held = sum(reply * (prompt + reply / 2) for prompt, reply in lengths) / replies
    prefilled = prompts / replies  # positions, for each one that is decoded
    running = min(batches.requests, batches.kv_tokens / held, batches.positions / (1 + prefilled))
    decodes = max(1, round(running))
    chunk = round(decodes * prefilled)
    middle = sum(prompt * prompt for prompt, _ in lengths) / prompts / 2  # the mean position of a prompt's tokens
    start = max(0, round(middle - chunk / 2))
    rows = [(round(held), round(held) + 1)] * decodes + ([(start, start + chunk)] if chunk else [])
    return decodes * len(lengths) / replies / cost.iteration_s(rows, decodes)
