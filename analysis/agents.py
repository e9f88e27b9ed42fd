"""Agents that share an engine: their latency against how many there are, and where memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis import estimates, marks, style, tables
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Panel, Source, number
from pensieve.lab.metric_registry import PERCENTILES
from pensieve.lab.results.frame import ByConversation, by_conversation, positive_ratio
from pensieve.lab.statistics import Estimate, PairedRatio, enough_for

AXIS, PROMPT = "workload.agents", "workload.reason_tokens"
STAGES = ("reason", "reflect")
COMMAND = "python runners/run.py experiment=agents/scaling -m"
NOTHING = Estimate(float("nan"), None, None, 0, 0)  # of a stage that no turn completed


@dataclass(frozen=True, slots=True)
class Load:
    """One baseline with so many agents. latency_ms: of completed turns by stage, arrival to last token; a stage that no
    turn completed is empty. out_of_memory: turns that did not get the memory they needed."""

    agents: int
    cell: Cell
    latency_ms: dict[str, ByConversation]
    out_of_memory: int

    def mean(self, stage: str) -> Estimate | None:
        values = self.latency_ms[stage]
        return estimates.mean(values) if values else None

    def percentile(self, stage: str, name: str) -> Estimate | None:
        """name: p50 or p99."""
        values = self.latency_ms[stage]
        return estimates.percentile(values, PERCENTILES[name]) if values else None


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

    @property
    def most(self) -> int | None:
        """More than these it does not carry; None where it met no limit. Between the two nothing was tried."""
        limit = self.out_of_memory_at
        return None if limit is None else limit - 1

    @property
    def carries(self) -> str:
        if self.most is None:
            return tables.NONE if self.density is None else f"≥ {self.density}"
        if self.most == 0:
            return "none"
        return f"{self.density}" if self.density == self.most else f"{self.density or 0} to {self.most}"

    def at(self, agents: int) -> Load | None:
        """None: no such trial completed."""
        return next((load for load in self.loads if load.agents == agents), None)


def _several(source: Source) -> bool:
    return source.has_workload("agents") and len(source.swept(AXIS)) > 1


def read(source: Source) -> Iterator[tuple[Panel, list[Scaling]]]:
    for panel in source.panels(AXIS, partial=True):  # what takes too long at many agents was measured at few
        yield (
            panel,
            [
                Scaling(name, sorted((_load(source, cell) for cell in panel.of(name)), key=lambda load: load.agents))
                for name in panel.baselines
            ],
        )


def _load(source: Source, cell: Cell) -> Load:
    agents = number(cell.at[AXIS])
    assert agents is not None, f"{AXIS} is a number"
    every, latencies = source.turns(cell, measured=False), _latencies(source, cell)
    asked = every[every["label"].isin(STAGES)]
    refused = (asked["status"] == "refused") & (asked["finish_reason"] == "capacity")  # more than the GPU tier holds
    failed = (asked["status"] == "failed") & asked["error"].fillna("").str.contains("memory")  # the device ran out
    return Load(int(agents), cell, latencies, int((refused | failed).sum()))


def _latencies(source: Source, cell: Cell) -> dict[str, ByConversation]:
    """Of completed turns by stage."""
    turns = source.turns(cell)
    return {stage: by_conversation(turns.loc[turns["label"] == stage, "latency_ms"]) for stage in STAGES}


@figure(
    "agent_scaling",
    "Latency against the number of agents",
    shows="99th percentile of latency against the number of agents, by stage",
    command=COMMAND,
    applies=_several,
)
def agent_scaling(source: Source) -> Iterator[Plot]:
    for panel, scalings in read(source):
        picture, [grid] = style.new_grid(1.8, 1, len(STAGES), sharey=True)
        rows: list[Row] = []
        for axes, stage in zip(grid, STAGES, strict=True):
            found = {
                scaling.baseline: {load.agents: load.percentile(stage, "p99") for load in scaling.loads}
                for scaling in scalings
            }
            for order, scaling in enumerate(scalings):
                points = [(agents, one) for agents, one in found[scaling.baseline].items() if one is not None]
                if points:
                    marks.line(axes, scaling.baseline, points, order=order)
                _mark_limit(axes, scaling, dict(points))
            rows += [
                {
                    "baseline": scaling.baseline,
                    "stage": stage,
                    "agents": load.agents,
                    **columns("latency_ms_p99", found[scaling.baseline][load.agents] or NOTHING),
                    "out_of_memory_turns": load.out_of_memory,
                    "trials": load.cell.ids,
                }
                for scaling in reversed(scalings)
                for load in scaling.loads
            ]
            marks.mark_counts(axes, sorted({load.agents for scaling in scalings for load in scaling.loads}))
            axes.set_title(stage, fontweight="bold", color=style.GREY)
            axes.set_xlabel("agents")
        marks.plain_log(grid[0], "y")
        grid[0].set_ylabel("p99 latency (ms)")
        style.legend(picture)
        yield Plot(panel, picture, scaling_lead(scalings), rows)


def scaling_lead(scalings: Sequence[Scaling]) -> str:
    """What a point is, and how much it says."""
    counts = [
        sum(map(len, load.latency_ms[stage].values()))
        for scaling in scalings
        for load in scaling.loads
        for stage in STAGES
    ]
    fewest, enough = min(filter(None, counts), default=0), enough_for(PERCENTILES["p99"])
    thin = f" (a p99 of fewer than {enough:,} turns rests on less than ten; the fewest here are {fewest})"
    short = "; × memory ran out" if any(scaling.out_of_memory_at for scaling in scalings) else ""
    return f"99th percentile over turns, nearest rank, with its 95 % interval{thin if fewest < enough else ''}{short}"


def _mark_limit(axes: Axes, scaling: Scaling, points: Mapping[int, Estimate]) -> None:
    """A cross at the first number of agents at which memory ran out: on the line, or where it would go on."""
    limit = scaling.out_of_memory_at
    if limit is None:
        return
    near = min(points, key=lambda agents: abs(agents - limit), default=None)
    axes.plot(
        [limit], [points[near].value if near is not None else 1.0], marker="x", markersize=7, markeredgewidth=1.6,
        color=style.colour(scaling.baseline), linestyle="none", gid=f"{scaling.baseline}/out of memory",
        label="memory ran out",
    )  # fmt: skip


@figure(
    "agent_table",
    "Latency of agents (ms)",
    shows="agents in numbers: mean, median, 99th percentile, memory's limit",
    command=COMMAND,
    applies=lambda source: source.has_workload("agents"),
)
def agent_table(source: Source) -> Iterator[Plot]:
    lead = (
        "Latency (arrival to last token) of completed turns, over seeds, agents and steps; percentiles by nearest rank. Out "
        "of memory: turns refused or failed for want of it"
    )
    for panel, scalings in read(source):
        table, rows = [], []
        for scaling in scalings:
            for load in scaling.loads:
                line = {"baseline": scaling.baseline if load is scaling.loads[0] else "", "agents": str(load.agents)}
                for stage in STAGES:
                    found = {"mean": load.mean(stage), **{p: load.percentile(stage, p) for p in ("p50", "p99")}}
                    for name, one in found.items():  # a percentile's interval is in the CSV: six do not fit a column
                        text = tables.estimated(one)
                        line[f"{stage}\n{name}"] = text if name == "mean" else text.partition("\n")[0]
                        rows.append(
                            {
                                "baseline": scaling.baseline,
                                "agents": load.agents,
                                "stage": stage,
                                "quantity": f"latency_ms_{name}",
                                **columns("value", one or NOTHING),
                                "out_of_memory_turns": load.out_of_memory,
                                "trials": load.cell.ids,
                            }
                        )
                table.append({**line, "out of\nmemory": str(load.out_of_memory or tables.NONE)})
        yield Plot(panel, None, lead, rows, table)


@figure(
    "agent_ratios",
    "Agents: density and latency",
    shows="how many agents a baseline carries, and how fast beside the first",
    command=COMMAND,
    applies=_several,
)
def agent_ratios(source: Source) -> Iterator[Plot]:
    for panel, scalings in read(source):
        first = scalings[0]
        together = [
            load.agents  # where memory ran out, those that are left have the machine to themselves
            for load in first.loads
            if all(
                (there := scaling.at(load.agents)) is not None and there.latency_ms[stage] and not there.out_of_memory
                for scaling in scalings
                for stage in STAGES
            )
        ]
        most = max(together, default=None)
        lead = (
            "Carries: the largest number of agents at which no turn ran out of memory, up to one less than the first at "
            f"which some did. Density: that number over {first.baseline}'s. "
        ) + (
            f"Latency: of a baseline over {first.baseline} with {most} agents, geometric mean of the pairs of one seed "
            f"and agent, with its 95 % interval. Reason / reflect: of the same baseline with {most} agents"
            if most is not None
            else "At no number of agents do all baselines complete turns of both stages without running out of memory"
        )
        ratios = {scaling.baseline: _ratios(scaling, first, most) for scaling in scalings}
        table = [_ratio_line(scaling, first, ratios[scaling.baseline]) for scaling in scalings]
        rows = [_ratio_row(scaling, first, ratios[scaling.baseline], most) for scaling in scalings]
        yield Plot(panel, None, lead, rows, table)


def _by_prompt(source: Source) -> bool:
    """Not where prompts are as long as the KV that replicas send each other."""
    alone = len(source.swept("hardware.migration")) < 2
    return source.has_workload("agents") and len(source.swept(PROMPT)) > 1 and alone


@dataclass(frozen=True, slots=True)
class Stages:
    """Of one length of the reason's prompt. latency_ms: means of completed turns by stage. ratio: reason over reflection,
    paired by seed and agent."""

    prompt: float
    cell: Cell
    latency_ms: Mapping[str, Estimate]
    ratio: Estimate


@figure(
    "agent_stages",
    "A reflection beside the reason before it",
    shows="how many times as fast a reflection is as the reason before it, against the length of the reason's prompt",
    command="python runners/run.py experiment=agents/stages hardware=sim_h100 model=llama3_1_8b cache=large -m",
    applies=_by_prompt,
)
def agent_stages(source: Source) -> Iterator[Plot]:
    for panel in source.panels(PROMPT):
        found = {
            name: sorted((_stages(source, cell) for cell in panel.of(name)), key=lambda one: one.prompt)
            for name in panel.baselines
        }
        picture, [[axes]] = style.new_grid(2.0, 1)
        for order, (name, stages) in enumerate(found.items()):
            marks.line(axes, name, [(one.prompt, one.ratio) for one in stages], order=order)
        marks.mark_counts(axes, sorted({one.prompt for stages in found.values() for one in stages}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1000:.2g}"))
        marks.plain_log(axes, "y")
        axes.set_xlabel("thousand tokens in the reason's prompt")
        axes.set_ylabel("latency of a reason\nover a reflection's (×)")
        style.legend(picture)
        lead = "Geometric mean over the pairs of one seed and agent, arrival to last token, with its 95 % interval"
        pairs = [(name, one) for name, stages in found.items() for one in stages]
        rows = [
            {
                "baseline": name,
                "reason_tokens": one.prompt,
                **columns("reason_over_reflect", one.ratio),
                **{f"{stage}_ms_mean": one.latency_ms[stage].value for stage in STAGES},
                "trials": one.cell.ids,
            }
            for name, one in pairs
        ]
        table = [
            {
                "baseline": name,
                "prompt (tokens)": f"{one.prompt:,.0f}",
                **{f"{stage} (ms)": tables.estimated(one.latency_ms[stage]) for stage in STAGES},
                "reason / reflect (×)": tables.estimated(one.ratio),
            }
            for name, one in pairs
        ]
        yield Plot(panel, picture, lead, rows, table)


def _stages(source: Source, cell: Cell) -> Stages:
    latencies, prompt = _latencies(source, cell), number(cell.at[PROMPT])
    ratio = _paired(*(latencies[stage] for stage in STAGES))
    if ratio is None or prompt is None:
        raise source.lacks(f"agent of {cell.baseline} that reasoned and reflected with {PROMPT}={cell.at[PROMPT]}")
    means = {stage: estimates.mean(latencies[stage]) for stage in STAGES}
    return Stages(prompt, cell, means, estimates.as_estimate(ratio))


def density_ratio(one: Scaling, other: Scaling) -> tuple[float | None, str]:
    """Agents that `one` carries over those that `other` does, where both are known, and as text: bounds where loads between
    what is carried and what is not were not tried."""
    if one is other:
        return 1.0, "1"
    least = one.density / other.most if one.density and other.most else None
    most = one.most / other.density if one.most and other.density else None
    if least == most:
        return least, tables.NONE if least is None else f"{least:.3g}"
    if least is None or most is None:
        return None, f"≤ {most:.3g}" if least is None else f"≥ {least:.3g}"
    return None, f"{least:.3g} to {most:.3g}"


def _ratios(scaling: Scaling, first: Scaling, most: int | None) -> dict[str, PairedRatio | None]:
    """Latency by stage over the first baseline's, and reason over reflect, paired by seed and agent."""
    if most is None:
        return dict.fromkeys((*STAGES, "stages"))
    own, other = scaling.at(most), first.at(most)
    assert own is not None and other is not None, "all baselines have trials of so many"
    ours, theirs = own.latency_ms, other.latency_ms
    return {
        **{stage: _paired(ours[stage], theirs[stage]) for stage in STAGES},
        "stages": _paired(*(ours[stage] for stage in STAGES)),
    }


def _paired(*sides: ByConversation) -> PairedRatio | None:
    """Of the means of each agent; None where they share none."""
    return positive_ratio(*({key: fmean(found) for key, found in side.items()} for side in sides))


def _ratio_line(scaling: Scaling, first: Scaling, found: Mapping[str, PairedRatio | None]) -> dict[str, str]:
    limit = scaling.out_of_memory_at
    stages = {
        f"{stage}\nlatency (×)": "1" if scaling is first and found[stage] else tables.estimated(found[stage])
        for stage in STAGES
    }
    return {
        "baseline": scaling.baseline,
        "carries\nagents": scaling.carries,
        "out of\nmemory at": "none" if limit is None else str(limit),
        "density\n(×)": density_ratio(scaling, first)[1],
        **stages,
        "reason /\nreflect (×)": tables.estimated(found["stages"]),
    }


def _ratio_row(scaling: Scaling, first: Scaling, found: Mapping[str, PairedRatio | None], most: int | None) -> Row:
    ratio, text = density_ratio(scaling, first)
    row: dict[str, Any] = {
        "baseline": scaling.baseline,
        "reference": first.baseline,
        "carries_agents": scaling.density,
        "out_of_memory_at": "none" if scaling.out_of_memory_at is None else scaling.out_of_memory_at,
        "density_ratio": ratio,
        "density_ratio_text": text,
        "compared_at_agents": most,
    }
    names = {"reason": "reason_latency_ratio", "reflect": "reflect_latency_ratio", "stages": "reason_over_reflect"}
    for key, one in found.items():
        row[names[key]] = one and one.ratio
        row[f"{names[key]}_ci_low"] = one and one.ci_low
        row[f"{names[key]}_ci_high"] = one and one.ci_high
        row[f"{names[key]}_n"] = one and one.n
    return {**row, "trials": " ".join(load.cell.ids for load in scaling.loads)}
