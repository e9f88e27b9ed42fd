"""A changing prefix: what a hit and a miss cost, what a miss leaves behind, engine by engine, and what HTTP adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.transforms import ScaledTranslation

from analysis import marks, style, tables
from analysis.alike import panels_of_engines, panels_of_interfaces
from analysis.estimates import median, one_each
from analysis.marks import Bar, Group
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Panel, Source, number
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import PROBES, by_round, conversations_of
from pensieve.lab.statistics import Estimate, Line, PairedRatio, estimate_percentile_by_seed, fit_line, paired_ratio

WORKLOAD = "prefix_invalidation"
NO_HITS = "no hits"
COMMAND = "python runners/run.py experiment=peers/prefix_invalidation -m"
BLOCKS, BATCH = "workload.blocks", "scheduler.max_batch_tokens"
QUANTITIES = {
    "hit_ttft_ms": "hit\n(ms)",
    "miss_ttft_ms": "miss\n(ms)",
    "degradation_pct": "degra-\ndation (%)",
    "stream_overhead_ms": "overhead\n(ms)",
    "throughput_hit_tok_s": "decoding, hit\n(tokens/s)",
    "throughput_miss_tok_s": "decoding, miss\n(tokens/s)",
    "rewarm_hit_ms": "warm-up after\na hit (ms)",
    "rewarm_miss_ms": "warm-up after\na miss (ms)",
}
PARTS = {"cached": "GPU hit", "recomputed": "recomputed", "new": "new"}
STAGES = {
    "warm-up [A, B]": "warmup",
    "miss [B, Q]": "miss",
    "re-warm-up [A, B]": "rewarm_miss",
    "the same after a hit": "rewarm_hit",
}
ALL = "all"
INTERFACES = {"llama_cpp": "llama_cpp_http", "vllm": "vllm_http"}
"""Baselines that are the same engine, without HTTP and with it."""


_figure = partial(figure, command=COMMAND, applies=lambda source: source.has_workload(WORKLOAD))


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
    return _median(steps["ttft_ms"])


def degradation_pct(steps: pd.DataFrame) -> Estimate:
    """(miss - hit) / hit in %, of the mean times to first token, paired by round."""
    hit, miss = (by_round(named(steps, kind)["ttft_ms"]) for kind in PROBES)
    found = paired_ratio(miss, hit, of="means")
    low, high = (None if end is None else (end - 1) * 100 for end in (found.ci_low, found.ci_high))
    return Estimate((found.ratio - 1) * 100, low, high, found.n, found.n_seeds)


def keeps_nothing(steps: pd.DataFrame) -> bool:
    """Whether the engine found nothing of the prefix even where all of it was there: it has no hits that a miss could be
    slower than. False where it does not say."""
    cached = named(steps, "hit")["cached"]
    return bool(cached.notna().all() and (cached == 0).all())


def stream_overhead_ms(steps: pd.DataFrame) -> Estimate | None:
    """Median over rounds of the time to first token when streaming minus when not, the same kind of query compared with
    itself; None where the workload asked in one way only."""
    differences: dict[tuple[int, str], float] = {}
    for kind in PROBES:
        asked = named(steps, kind)
        streams = asked["stream"].astype("bool")
        streamed, whole = (by_round(asked.loc[rows, "ttft_ms"]) for rows in (streams, ~streams))
        for seed, number_ in streamed.keys() & whole.keys():
            differences[seed, f"{number_}/{kind}"] = streamed[seed, number_] - whole[seed, number_]
    return estimate_percentile_by_seed(differences, 0.5) if differences else None


def mean_tokens(steps: pd.DataFrame) -> dict[str, float] | None:
    """Mean cached, recomputed and new tokens a prompt; None where the engine does not say."""
    counts = steps[["cached", "recomputed_tokens", "unseen"]]
    if steps.empty or counts.isna().to_numpy().any():
        return None
    return {part: float(total) / len(steps) for part, total in zip(PARTS, counts.sum(), strict=True)}


def _median(values: pd.Series[Any]) -> Estimate:
    assert not conversations_of(values).has_duplicates, "a conversation goes through each step once"
    return median(values)


# A bar a step


@_figure("invalidation_cost", "What a changed prefix costs", shows="what a changed prefix costs: hit against miss")
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


@_figure(
    "ttft_vs_recomputed",
    "Time to first token against recomputed tokens",
    shows="time to first token against recomputed tokens, with slope and R²",
)
def ttft_vs_recomputed(source: Source) -> Iterator[Plot]:
    """A point is one query, a hit or a miss, of any split of the prefix and any baseline of the sweep."""
    for panel in source.panels(BLOCKS):
        queries = _queries(source, panel)
        picture, axes = style.new_axes(2.2)
        for index, (name, found) in enumerate(queries.items()):
            aside = (index - (len(queries) - 1) / 2) * 2.4 / 72  # inches: baselines that coincide stay apart
            [points] = axes.plot(
                found["recomputed_tokens"], found["ttft_ms"], linestyle="none",
                marker=style.marker(name), markersize=3.6, markerfacecolor="none", alpha=0.8,
                markeredgecolor=style.colour(name), markeredgewidth=0.8, gid=name, label=name,
            )  # fmt: skip
            points.set_transform(axes.transData + ScaledTranslation(aside, 0, picture.dpi_scale_trans))
        line, every = fit(queries), pd.concat(queries.values())
        reach = np.array([0.0, float(every["recomputed_tokens"].max())])
        axes.plot(
            reach, line.intercept.value + line.slope.value * reach, color="black", linewidth=1.0,
            linestyle=(0, (4, 2)), zorder=1.5, gid=f"line/{ALL}",
        )  # fmt: skip
        axes.set_title(describe(line), fontsize=6.5, linespacing=1.3)
        axes.set_ylim(bottom=0)
        axes.set_xlim(-0.06 * reach[1], 1.06 * reach[1])
        axes.set_xlabel("recomputed tokens")
        axes.set_ylabel("time to first token (ms)")
        style.legend(picture)
        lead = (
            f"A point is one of {len(every):,} queries, hits and misses. The line is least squares through all of them, "
            "with the 95 % interval of its slope. Baselines stand side by side where they coincide"
        )
        yield Plot(panel, picture, lead, _regression_rows(panel, queries))


def _queries(source: Source, panel: Panel) -> dict[str, pd.DataFrame]:
    """Hits and misses of each baseline, with their `blocks`. Raises MissingSeries where a baseline's engine does not report
    what it recomputed."""
    queries: dict[str, list[pd.DataFrame]] = {name: [] for name in panel.baselines}
    for cell in panel.cells:
        steps = named(steps_of(source, cell), *PROBES)
        if steps["recomputed_tokens"].isna().any():
            others = ",".join(name for name in panel.baselines if name != cell.baseline) or "pensieve"
            raise MissingSeries(
                f"The engine of {cell.baseline} does not report what it recomputed; leave it out with "
                f"--baselines {others}, which `{source.command}` has or makes."
            )
        queries[cell.baseline].append(steps.assign(blocks=cell.at[BLOCKS]))
    return {name: pd.concat(parts) for name, parts in queries.items()}


def fit(queries: Mapping[str, pd.DataFrame], *baselines: str) -> Line:
    """Milliseconds against recomputed tokens, over the queries of these baselines (none: of all)."""
    return fit_line(
        {
            (seed, f"{name}/{blocks}/{conversation}"): [(tokens, ms)]
            for name in baselines or tuple(queries)
            for seed, conversation, blocks, tokens, ms in _points(queries[name])
        }
    )


def _points(queries: pd.DataFrame) -> Iterator[tuple[int, str, str, float, float]]:
    """Seed, conversation, blocks, recomputed tokens and milliseconds of each."""
    chosen = (queries[column] for column in ("blocks", "recomputed_tokens", "ttft_ms"))
    for (seed, repeat, session, *_), *values in zip(queries.index, *chosen, strict=True):
        yield seed, f"{session}/{repeat}", *values


def describe(line: Line) -> str:
    slope = line.slope
    between = (
        ""
        if slope.ci_low is None or slope.ci_high is None
        else f" [{slope.ci_low * 1e3:,.1f}, {slope.ci_high * 1e3:,.1f}]"
    )
    squared = "not defined" if line.r_squared is None else f"{line.r_squared:.3f}"
    return f"{slope.value * 1e3:,.1f} ms per 1,000 tokens{between}\n{line.intercept.value:,.1f} ms without any; R² {squared}"


def _regression_rows(panel: Panel, queries: Mapping[str, pd.DataFrame]) -> list[Row]:
    """The lines (all baselines, then each by itself where its points allow one), then the points."""
    lines = {ALL: fit(queries)}
    for name, found in queries.items():
        if found["recomputed_tokens"].nunique() > 1:
            lines[name] = fit(queries, name)
    ids = {name: " ".join(cell.ids for cell in panel.of(name)) for name in queries}
    ids[ALL] = " ".join(ids.values())
    heads = (
        "kind", "baseline", "blocks", "seed", "session", "query", "recomputed_tokens", "ttft_ms", "slope_ms_per_token",
        "slope_ci_low", "slope_ci_high", "intercept_ms", "r_squared", "n", "n_seeds", "trials",
    )  # fmt: skip
    empty = dict.fromkeys(heads, "")
    rows: list[Row] = [
        empty | {
            "kind": "line", "baseline": name, "slope_ms_per_token": line.slope.value,
            "slope_ci_low": line.slope.ci_low, "slope_ci_high": line.slope.ci_high,
            "intercept_ms": line.intercept.value, "r_squared": line.r_squared, "n": line.n, "n_seeds": line.groups,
            "trials": ids[name],
        }
        for name, line in lines.items()
    ]  # fmt: skip
    for name, found in queries.items():
        rows += [
            empty | {
                "kind": "point", "baseline": name, "blocks": blocks, "seed": seed, "session": conversation,
                "query": query, "recomputed_tokens": int(tokens), "ttft_ms": ms, "trials": ids[name],
            }
            for (seed, conversation, blocks, tokens, ms), query in zip(_points(found), found["step"], strict=True)
        ]  # fmt: skip
    return rows


@_figure(
    "cache_architecture",
    "How much slower a miss is than a hit",
    shows="how much slower a miss is than a hit, a bar a baseline",
)
def cache_architecture(source: Source) -> Iterator[Plot]:
    lead = (
        "(miss − hit) / hit of mean TTFT and its 95 % interval, paired by round, for each A/B in tokens. "
        f"{NO_HITS}: the engine keeps nothing, so both are computed, and the miss has the shorter prompt"
    )
    for panel in panels_of_engines(source, BLOCKS):
        groups: list[Group] = []
        rows: list[Row] = []
        for name in panel.baselines:
            bars = []
            for cell in panel.of(name):
                blocks, steps = cell.at[BLOCKS], steps_of(source, cell)
                found = degradation_pct(steps)
                text = f"{signed(found.value)} %  ({blocks}{f'; {NO_HITS}' if keeps_nothing(steps) else ''})"
                bars.append(Bar(found, style.colour(name), text, f"{name}/{blocks}"))
                rows.append(
                    {"baseline": name, "blocks": blocks, **columns("degradation_pct", found), "trials": cell.ids}
                )
            groups.append(Group(name, style.colour(name), bars))
        picture, [[axes]] = marks.bar_grid([groups])
        marks.bars(axes, groups)
        axes.set_xlabel("time to first token of a miss over a hit (%)")
        yield Plot(panel, picture, lead, rows)


def signed(value: float) -> str:
    """A change in whole numbers, with a sign as long as a digit."""
    return f"{value:+,.0f}".replace("-", "−")


@_figure(
    "cascade",
    "What a miss leaves behind",
    shows="what a miss leaves behind: cached and recomputed tokens, step by step",
)
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


@figure(
    "batch_size_confound",
    "A miss against the prefill batch",
    shows="time to first token of a miss against the prefill batch",
    command="python runners/run.py experiment=peers/prefix_invalidation_batch -m",
    applies=lambda source: source.has_workload(WORKLOAD) and len(source.swept(BATCH)) > 1,
)
def batch_size_confound(source: Source) -> Iterator[Plot]:
    """Whether the positions that an iteration may compute decide what a miss costs."""
    for panel in source.panels(BATCH):
        picture, axes = style.new_axes(1.9)
        sizes = sorted(int(number(value) or 0) for value in panel.values(BATCH))
        rows: list[Row] = []
        effects = []
        for order, name in enumerate(panel.baselines):
            cells = {int(number(cell.at[BATCH]) or 0): cell for cell in panel.of(name)}
            misses = {size: named(steps_of(source, cells[size]), "miss") for size in sizes}
            largest, smallest = (one_each(misses[size]["ttft_ms"]) for size in (sizes[-1], sizes[0]))
            effect = paired_ratio(largest, smallest)
            found = {size: ttft(misses[size]) for size in sizes}
            # The first one lies on top, thinner, so that an equal one below it is seen.
            marks.line(axes, name, list(found.items()), order=order, band=True, width=1.3 + 1.1 * order)
            effects.append(f"{name} {_ratio(effect)}")
            rows += [
                {
                    "baseline": name,
                    "max_batch_tokens": size,
                    **columns("miss_ttft_ms_median", one),
                    "largest_over_smallest": effect.ratio,
                    "effect_ci_low": effect.ci_low,
                    "effect_ci_high": effect.ci_high,
                    "trials": cells[size].ids,
                }
                for size, one in found.items()
            ]
        marks.mark_counts(axes, sizes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("positions an iteration may compute")
        axes.set_ylabel("first token of a miss (ms)")
        style.legend(picture)
        lead = (
            f"Median over misses and its 95 % interval; batch of {sizes[-1]:,} over {sizes[0]:,}, paired by seed and "
            f"conversation: {'; '.join(effects)}"
        )
        yield Plot(panel, picture, lead, rows)


def _ratio(found: PairedRatio) -> str:
    between = "" if found.ci_low is None else f" [{found.ci_low:.2f}, {found.ci_high:.2f}]"
    return f"{found.ratio:.2f}{between}"


# Engine by engine


@dataclass(frozen=True, slots=True)
class Summary:
    """One baseline on one split of the prefix. quantities: in order of QUANTITIES; None: the workload asked nothing that
    would tell."""

    cell: Cell
    quantities: Mapping[str, Estimate | None]


def summaries(source: Source) -> Iterator[tuple[Panel, list[Summary]]]:
    """What each baseline came to, a panel for each split of the prefix."""
    for panel in panels_of_engines(source):
        yield panel, [_summary(source, cell) for cell in panel.cells]


def _summary(source: Source, cell: Cell) -> Summary:
    steps = steps_of(source, cell)
    found = {
        "hit_ttft_ms": ttft(named(steps, "hit")),
        "miss_ttft_ms": ttft(named(steps, "miss")),
        "degradation_pct": None if keeps_nothing(steps) else degradation_pct(steps),
        "stream_overhead_ms": stream_overhead_ms(steps),
    }
    for kind in PROBES:
        decoded, warmed = named(steps, f"throughput_{kind}"), named(steps, f"rewarm_{kind}")
        speeds = decoded["output_tokens"] / decoded["latency_ms"] * 1e3
        found[f"throughput_{kind}_tok_s"] = None if decoded.empty else _median(speeds)
        found[f"rewarm_{kind}_ms"] = None if warmed.empty else _median(warmed["latency_ms"])
    return Summary(cell, found)


def _summary_rows(found: Sequence[Summary]) -> list[Row]:
    return [
        {"baseline": one.cell.baseline, "quantity": quantity, **columns("value", estimate), "trials": one.cell.ids}
        for one in found
        for quantity, estimate in one.quantities.items()
        if estimate is not None
    ]


@_figure(
    "prefix_overview",
    "Hit, miss, decoding and warm-up",
    shows="first token and streaming overhead, decoding, warm-up, side by side",
)
def prefix_overview(source: Source) -> Iterator[Plot]:
    lead = (
        "Medians over conversations and their 95 % intervals. Overhead: TTFT when streaming minus when not, paired by "
        "round. Decoding: output tokens over the latency of the throughput step. Warm-up: [A, B] for one token, after a "
        "hit and after a miss"
    )
    texts: dict[str, dict[str, Callable[[float], str]]] = {
        "first token\n(ms)": {
            "hit_ttft_ms": lambda value: f"hit {value:,.1f}",
            "miss_ttft_ms": lambda value: f"miss {value:,.1f}",
            "stream_overhead_ms": lambda value: f"overhead {round(value, 2) + 0:+.2f}".replace("-", "−"),
        },
        "decoding\n(tokens/s)": {
            "throughput_hit_tok_s": lambda value: f"hit {value:,.1f}",
            "throughput_miss_tok_s": lambda value: f"miss {value:,.1f}",
        },
        "warm-up after it\n(ms)": {
            "rewarm_hit_ms": lambda value: f"hit {value:,.0f}",
            "rewarm_miss_ms": lambda value: f"miss {value:,.0f}",
        },
    }
    for panel, found in summaries(source):
        room = 3 if any(one.quantities["stream_overhead_ms"] for one in found) else 2
        sides = {}
        for label, quantities in texts.items():
            sides[label] = [
                Group(
                    one.cell.baseline,
                    style.colour(one.cell.baseline),
                    [
                        Bar(
                            estimate, style.colour(one.cell.baseline), text(estimate.value),
                            f"{one.cell.baseline}/{quantity}", "_miss_" in f"_{quantity}",
                        )
                        for quantity, text in quantities.items()
                        if (estimate := one.quantities[quantity]) is not None
                    ],
                    room,
                )
                for one in found
            ]  # fmt: skip
        picture, [grid] = marks.bar_grid([sides["first token\n(ms)"]], columns=len(sides))
        for axes, (label, groups) in zip(grid, sides.items(), strict=True):
            marks.bars(axes, groups, names=axes is grid[0])
            axes.set_xlabel(label)
            axes.locator_params(axis="x", nbins=2)
        yield Plot(panel, picture, lead, _summary_rows(found))


@_figure(
    "invalidation_table",
    "A changing prefix, engine by engine",
    shows="hit, miss, throughput, warm-up and degradation, a line an engine",
)
def invalidation_table(source: Source) -> Iterator[Plot]:
    lead = (
        "Hit, miss: medians of TTFT over conversations, with 95 % intervals. Degradation: (miss − hit) / hit of means, "
        "paired by round. Overhead: when streaming minus when not, paired by round. Decoding: output tokens over the latency "
        "of the throughput step. Warm-up: [A, B] for one token, after a hit and after a miss"
    )
    for panel, found in summaries(source):
        table = [
            {
                "engine": one.cell.baseline,
                **{head: tables.estimated(one.quantities[name]) for name, head in QUANTITIES.items()},
            }
            for one in found
        ]
        yield Plot(panel, None, lead, _summary_rows(found), table)


# One engine in this process and over HTTP


def http_ms(inside: pd.DataFrame, over: pd.DataFrame) -> Estimate:
    """Median over rounds of the time to first token over HTTP minus in this process, the same query compared with itself."""
    ours, theirs = one_each(inside["ttft_ms"]), one_each(over["ttft_ms"])
    return estimate_percentile_by_seed({key: theirs[key] - ours[key] for key in ours.keys() & theirs.keys()}, 0.5)


@figure(
    "engine_interfaces",
    "An engine in this process and over HTTP",
    shows="what HTTP adds to the first token of the same engine",
    command="python runners/run.py experiment=peers/prefix_invalidation_engines -m",
    applies=lambda source: (
        source.has_workload(WORKLOAD) and any({*pair} <= {*source.baselines()} for pair in INTERFACES.items())
    ),
)
def engine_interfaces(source: Source) -> Iterator[Plot]:
    lead = (
        "Medians of times to first token over conversations with 95 % intervals; difference: over HTTP minus in this "
        "process, paired by seed and conversation"
    )
    for panel in panels_of_interfaces(source, INTERFACES):
        steps = {cell.baseline: (cell, steps_of(source, cell)) for cell in panel.cells}
        table, rows = [], []
        for plain, http in INTERFACES.items():
            if plain not in steps or http not in steps:
                continue
            for kind in ("hit", "miss"):
                inside, over = (named(steps[name][1], kind) for name in (plain, http))
                found = {"inside": ttft(inside), "over_http": ttft(over), "difference": http_ms(inside, over)}
                table.append(
                    {
                        "engine": plain,
                        "query": kind,
                        "in process\n(ms)": tables.estimated(found["inside"]),
                        "over HTTP\n(ms)": tables.estimated(found["over_http"]),
                        "difference\n(ms)": tables.estimated(found["difference"]),
                    }
                )
                rows += [
                    {
                        "engine": plain,
                        "query": kind,
                        "quantity": name,
                        **columns("ttft_ms", estimate),
                        "trials": f"{steps[plain][0].ids} {steps[http][0].ids}",
                    }
                    for name, estimate in found.items()
                ]
        yield Plot(panel, None, lead, rows, table)
