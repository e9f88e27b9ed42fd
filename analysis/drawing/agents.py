"""What the figures of many agents share: latencies by stage, and where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from analysis.drawing import estimates
from analysis.drawing.source import BySession, Cell, Panel, Source, number
from pensieve.request import is_measured
from pensieve.statistics import Estimate, PairedRatio, paired_ratio

AXIS = "workload.agents"
STAGES = ("reason", "reflect")
COMMAND = "python runners/run.py experiment=agent_scaling -m"
PERCENTILES = {"p50": 0.50, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Load:
    """One baseline with so many agents. latency_ms: of completed turns by stage, arrival to last token; a stage that no
    turn completed is empty. out_of_memory: turns that did not get the memory they needed."""

    agents: int
    cell: Cell
    latency_ms: dict[str, BySession]
    out_of_memory: int

    @property
    def baseline(self) -> str:
        return self.cell.baseline

    def summary(self, stage: str) -> dict[str, Estimate | None]:
        """mean, p50 and p99 by name."""
        values = self.latency_ms[stage]
        if not values:
            return dict.fromkeys(("mean", *PERCENTILES))
        return {
            "mean": estimates.mean(values),
            **{name: estimates.percentile(values, p) for name, p in PERCENTILES.items()},
        }


@dataclass(frozen=True, slots=True)
class Scaling:
    """A baseline's loads by rising number of agents."""

    baseline: str
    loads: Sequence[Load]

    @property
    def out_of_memory_at(self) -> int | None:
        """The first number of agents at which a turn did not get the memory it needed; None: at none of them."""
        return next((load.agents for load in self.loads if load.out_of_memory), None)

    @property
    def density(self) -> int | None:
        """The largest number of agents before that; None where the first number is too many already."""
        limit = self.out_of_memory_at
        return max((load.agents for load in self.loads if limit is None or load.agents < limit), default=None)

    def at(self, agents: int) -> Load:
        return next(load for load in self.loads if load.agents == agents)


def applies(source: Source) -> bool:
    return any(job.last.workload == "agents" for job in source.jobs)


def read(source: Source) -> list[tuple[Panel, list[Scaling]]]:
    found = []
    for panel in source.panels(AXIS):
        scalings = []
        for name in panel.baselines:
            loads = [_load(source, cell) for cell in panel.of(name)]
            scalings.append(Scaling(name, sorted(loads, key=lambda load: load.agents)))
        found.append((panel, scalings))
    return found


def latency_ratio(one: Load, other: Load, stage: str) -> PairedRatio | None:
    """one over other, paired by seed and agent; None where they share no agent that completed the stage."""
    ours, theirs = (_means(load.latency_ms[stage]) for load in (one, other))
    return paired_ratio(ours, theirs) if ours.keys() & theirs.keys() else None


def stage_ratio(load: Load) -> PairedRatio | None:
    """Reason over reflect, paired by seed and agent."""
    ours, theirs = (_means(load.latency_ms[stage]) for stage in STAGES)
    return paired_ratio(ours, theirs) if ours.keys() & theirs.keys() else None


def fewest_turns(scalings: Sequence[Scaling]) -> int:
    """Behind any percentile of any of them."""
    counts = [
        sum(len(part) for part in load.latency_ms[stage].values())
        for scaling in scalings
        for load in scaling.loads
        for stage in STAGES
    ]
    return min(filter(None, counts), default=0)


def _load(source: Source, cell: Cell) -> Load:
    agents = number(cell.at[AXIS])
    assert agents is not None, f"{AXIS} is a number"
    latencies = {
        stage: source.by_session(
            cell, ("label", "latency_ms"), lambda row, stage=stage: row.latency_ms if row.label == stage else None
        )
        for stage in STAGES
    }
    return Load(int(agents), cell, latencies, sum(_without_memory(source, trial.id) for trial in cell.trials))


def _without_memory(source: Source, trial_id: int) -> int:
    """Refused because its context does not fit the GPU tier, or failed on a device that ran out of memory."""
    rows = source.store.turns_of(trial_id, "phase", "status", "finish_reason", "error")
    return sum(
        (row.status == "refused" and row.finish_reason == "capacity")
        or (row.status == "failed" and "memory" in (row.error or ""))
        for row in rows
        if is_measured(row.phase)
    )


def _means(values: BySession) -> dict[tuple[int, str], float]:
    return {key: fmean(found) for key, found in values.items()}
