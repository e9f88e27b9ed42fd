"""A changing prefix: what a hit and a miss cost, and what a miss leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis import marks, style
from analysis.alike import panels_of_engines
from analysis.marks import Bar, Group
from analysis.quantities import as_estimate, columns, median, moved
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import PROBES, by_round, conversations_of
from pensieve.lab.statistics import Estimate, paired_ratio

WORKLOAD = "prefix_invalidation"
NO_HITS = "no hits"
COMMAND = "python runners/run.py experiment=peers/prefix_invalidation -m"
BLOCKS = "workload.blocks"
PARTS = {"cached": "GPU hit", "recomputed": "recomputed", "new": "new"}
STAGES = {
    "warm-up [A, B]": "warmup",
    "miss [B, Q]": "miss",
    "re-warm-up [A, B]": "rewarm_miss",
    "the same after a hit": "rewarm_hit",
}


# The steps of each conversation


def steps_of(source: Source, cell: Cell) -> pd.DataFrame:
    """The completed turns of a cell's conversations, but for those that the workload runs first and discards.

    Beside the columns of Source.turns: `step`, the phase and, after a query, its kind, since a miss leaves another cache
    behind than a hit does; `cached`, prompt tokens found on any tier; `unseen`, tokens never seen before; NaN where the
    engine does not say.

    Raises MissingSeries where the cell has no hit or no miss, as trials of another workload have none.
    """
    turns = source.turns(cell, measured=False)
    turns = turns[turns.index.get_level_values("iteration") >= 0].copy()
    asked = turns.loc[turns["phase"].isin(PROBES), "phase"]
    kinds = dict(zip(conversations_of(asked), asked, strict=True))
    turns["step"] = [
        f"{phase}_{kinds[key]}" if phase in ("rewarm", "throughput") and key in kinds else phase
        for key, phase in zip(conversations_of(turns), turns["phase"], strict=True)
    ]
    # An engine that reports cached tokens only has no other tier of ours: null there means none.
    shared = turns["shared_hit_tokens"].fillna(0)
    others = turns["cpu_hit_tokens"].fillna(0) + turns["disk_hit_tokens"].fillna(0)
    turns["cached"] = turns["gpu_hit_tokens"] + others + shared
    turns["unseen"] = turns["new_tokens"] - shared
    found = turns[(turns["status"] == "completed") & turns["ttft_ms"].notna() & turns["latency_ms"].notna()]
    for name in PROBES:
        if named(found, name).empty:
            raise MissingSeries(
                f"Sweep {source.sweep.id} has no completed {name} of baseline {cell.baseline}: it is not a sweep over "
                f"changing prefixes, or all of them failed; run `{COMMAND}`."
            )
    return found


def named(steps: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Those whose step is, or begins with, one of `names`: "rewarm" means both rewarm_hit and rewarm_miss."""
    return steps[steps["step"].isin(names) | steps["step"].str.split("_").str[0].isin(names)]


def ttft(steps: pd.DataFrame) -> Estimate:
    assert not conversations_of(steps).has_duplicates, "a conversation goes through each step once"
    return median(steps["ttft_ms"])


def degradation_pct(steps: pd.DataFrame) -> Estimate:
    """(miss - hit) / hit in %, of the mean times to first token, paired by round."""
    hit, miss = (by_round(named(steps, kind)["ttft_ms"]) for kind in PROBES)
    return moved(as_estimate(paired_ratio(miss, hit, of="means")), lambda ratio: (ratio - 1) * 100)


def keeps_nothing(steps: pd.DataFrame) -> bool:
    """Whether the engine found nothing of the prefix even where all of it was there: it has no hits that a miss could be
    slower than. False where it does not say."""
    cached = named(steps, "hit")["cached"]
    return bool(cached.notna().all() and (cached == 0).all())


def mean_tokens(steps: pd.DataFrame) -> dict[str, float] | None:
    """Mean cached, recomputed and new tokens a prompt; None where the engine does not say."""
    counts = steps[["cached", "recomputed_tokens", "unseen"]]
    if steps.empty or counts.isna().to_numpy().any():
        return None
    return {part: float(total) / len(steps) for part, total in zip(PARTS, counts.sum(), strict=True)}


# A bar a step


def invalidation_cost(source: Source) -> Iterator[Plot]:
    lead = (
        "Median TTFT and its 95 % interval, of [A, B, Q] (hit) and of [B, Q] (miss) after [A, B] was warmed. In brackets: "
        "miss over hit, of means"
    )
    for panel in panels_of_engines(source, BLOCKS):
        sections: dict[str, list[Group]] = {blocks: [] for blocks in panel.values(BLOCKS)}
        rows: list[Row] = []
        for blocks, groups in sections.items():
            for cell in (cell for cell in panel.cells if cell.at[BLOCKS] == blocks):
                steps, colour, bars = steps_of(source, cell), style.colour(cell.baseline), []
                change = degradation_pct(steps)
                for kind in PROBES:
                    found, missed = ttft(named(steps, kind)), kind == "miss"
                    beside = NO_HITS if keeps_nothing(steps) else f"{signed(change.value)} %"
                    text = f"{kind} {found.value:,.1f}{f' ({beside})' if missed else ''}"
                    bars.append(Bar(found, colour, text, f"{cell.baseline}/{blocks}/{kind}", missed))
                    rows.append(
                        {
                            "baseline": cell.baseline,
                            "blocks": blocks,
                            "query": kind,
                            **columns("ttft_ms_median", found),
                            "degradation_pct": change.value if missed else None,
                            "degradation_ci_low": change.ci_low if missed else None,
                            "degradation_ci_high": change.ci_high if missed else None,
                            "trials": cell.ids,
                        }
                    )
                groups.append(Group(cell.baseline, colour, bars))
        picture, grid = marks.bar_grid(list(sections.values()))
        for [axes], (blocks, groups) in zip(grid, sections.items(), strict=True):
            marks.bars(axes, groups)
            axes.set_title(f"A/B = {blocks} tokens", fontsize=6.5, fontweight="bold", color=style.GREY)
        grid[-1][0].set_xlabel("time to first token (ms)")
        yield Plot(panel, picture, lead, rows)


def signed(value: float) -> str:
    """A change in whole numbers, with a sign as long as a digit."""
    return f"{value:+,.0f}".replace("-", "−")


def cascade(source: Source) -> Iterator[Plot]:
    """A miss [B, Q] replaces the warmed [A, B]; the re-warm-up [A, B] shows what that cost the next request."""
    lead = (
        "Mean prompt tokens of a conversation with a miss, by what the engine did with them, and median TTFT. Below them: "
        "the re-warm-up of the conversations with a hit"
    )
    for panel in source.panels():
        picture, grid = style.new_grid(0.3 + 0.75 * len(panel.cells), len(panel.cells), sharex=True)
        rows: list[Row] = []
        for [axes], cell in zip(grid, panel.cells, strict=True):
            steps = steps_of(source, cell)
            missed = conversations_of(steps).isin(conversations_of(named(steps, "miss")))
            for place, name in enumerate(STAGES.values()):
                own = named(steps[missed], name) if name == "warmup" else named(steps, name)
                tokens, time = mean_tokens(own), ttft(own)
                parts = {PARTS[part]: count for part, count in (tokens or {}).items()}
                end = marks.stacked(axes, place, parts, f"{cell.baseline}/{name}", across=True)
                text = f"{'' if tokens else 'not reported; '}{time.value:,.1f} ms"
                axes.annotate(
                    text, (end, place), xytext=(2.5, 0), textcoords="offset points", fontsize=marks.LABEL_SIZE,
                    va="center_baseline",
                )  # fmt: skip
                rows.append(
                    {
                        "baseline": cell.baseline,
                        "step": name,
                        **{f"{part}_tokens": tokens and tokens[part] for part in PARTS},
                        **columns("ttft_ms_median", time),
                        "trials": cell.ids,
                    }
                )
            axes.set_ylim(len(STAGES) - 0.5, -0.5)
            axes.set_yticks(range(len(STAGES)), STAGES, fontsize=marks.LABEL_SIZE)
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False)
            axes.set_title(cell.baseline, fontweight="bold", color=style.colour(cell.baseline))
        grid[-1][0].set_xlabel("prompt tokens")
        style.legend(picture, style.parts_key(list(PARTS), {part: style.PARTS[shown] for part, shown in PARTS.items()}))
        yield Plot(panel, picture, lead, rows)
