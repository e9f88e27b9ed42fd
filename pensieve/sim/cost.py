"""What a simulated worker asks of time, and which model of it a machine has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from pensieve.core.cost import CostModel
from pensieve.sim.machine_profile import ProfiledCost, read_profile
from pensieve.sim.measured import MeasuredCost
from pensieve.sim.roofline import Roofline, Run
from pensieve.specs import HardwareSpec, ModelSpec


class SimulatedCost(CostModel, Protocol):
    """Whole iterations and copies, beside the chunks that a cost model prices."""

    def iteration_s(self, runs: Iterable[Run], sampled: int) -> float:
        """One iteration over attention rows of queries [start, stop) each; logits of `sampled` positions."""
        ...

    def following_s(self, runs: Sequence[Run], sampled: int) -> Iterator[float]:
        """The iterations that follow one of these rows, each of which goes on by as many positions as it has; without end."""
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
