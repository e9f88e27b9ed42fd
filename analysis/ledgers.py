"""miss_causes, holding, holding_table, break_even: why KV was missing, what keeping it took, and what that saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import marks, style, tables
from analysis.estimates import over_seeds
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Source
from pensieve.core.plan import Tier
from pensieve.errors import MissingSeries
from pensieve.lab.results.prices import Worth, prefill_seconds
from pensieve.lab.results.size_map import is_map
from pensieve.lab.results.store import Holding
from pensieve.lab.statistics import Estimate

COMMAND = "python runners/run.py -m"
CAUSES = {
    "new": "#F6E8C3",
    "edited": "#DFC27D",
    "evicted": "#A6611A",
    "expired": "#80CDC1",
    "restarted": "#018571",
    "never_stored": "#BABABA",
}
TIERS: Mapping[Tier, str] = {"gpu": "#01665E", "cpu": "#D8A13B", "disk": "#7B5EA7"}
MARKERS = {"gpu": "o", "cpu": "^", "disk": "s"}
LINES: Mapping[Tier, str] = {"gpu": "-", "cpu": "--", "disk": ":"}
SHOWN = 4  # names of those who evicted most
POLICIES = "eviction"


def _along(source: Source) -> tuple[str, ...]:
    """What stands side by side: the policies of one baseline where several were swept, else the baselines."""
    return (POLICIES,) if len(source.swept(POLICIES)) > 1 and len(source.baselines()) == 1 else ()


def _name(cell: Cell) -> str:
    return cell.at.get(POLICIES, cell.baseline)


def _who(cell: Cell) -> str:
    """The head over these names."""
    return POLICIES if POLICIES in cell.at else "baseline"


def _ink(cell: Cell) -> str:
    return "black" if POLICIES in cell.at else style.colour(cell.baseline)


def _key(cell: Cell) -> Row:
    return {"baseline": cell.baseline, **cell.at}


# -- misses --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lost:
    """Of one baseline and cause, a trial: tokens missed, and seconds of first tokens that took. by: who evicted most of them,
    with the share of the tokens."""

    cell: Cell
    cause: str
    tokens: Estimate
    seconds: Estimate
    by: Sequence[tuple[str, float]]


def _lost(source: Source, cell: Cell) -> list[Lost]:
    tokens: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    ms: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    evictors: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for trial in cell.trials:
        at = trial.seed, trial.repeat
        for row in source.store.miss_sums(trial.id):
            tokens[row.cause][at] = tokens[row.cause].get(at, 0.0) + row.tokens
            ms[row.cause][at] = ms[row.cause].get(at, 0.0) + row.ms
            if row.evicted_by:
                evictors[row.cause][row.evicted_by] += row.tokens
    keys = [(trial.seed, trial.repeat) for trial in cell.trials]
    found = []
    for cause in CAUSES:
        if cause in tokens:
            whole = sum(tokens[cause].values())
            most = sorted(evictors[cause].items(), key=lambda one: (-one[1], one[0]))[:SHOWN]
            found.append(
                Lost(
                    cell,
                    cause,
                    over_seeds({key: tokens[cause].get(key, 0.0) for key in keys}),
                    over_seeds({key: ms[cause].get(key, 0.0) / 1e3 for key in keys}),
                    [(name, count / whole) for name, count in most],
                )
            )
    return found


def _has_misses(source: Source) -> bool:
    return not is_map(source.sweep) and any(source.store.miss_sums(trial.id) for trial in source.trials)


@figure(
    "miss_causes",
    "Why prompt tokens had no KV",
    shows="what was computed for first tokens and how long that took, by why its KV was missing",
    command=COMMAND,
    applies=_has_misses,
)
def miss_causes(source: Source) -> Iterator[Plot]:
    for panel in source.panels(*_along(source), partial=True):
        found = {_name(cell): _lost(source, cell) for cell in panel.cells}
        inks = {_name(cell): _ink(cell) for cell in panel.cells}
        if not any(found.values()):
            raise source.lacks("turn with a ledger of misses")
        picture, grid = style.new_grid(0.26 * len(found) + 0.35, 1, 2, sharey=True)
        left, right = grid[0]
        for place, (name, lost) in enumerate(found.items()):
            for axes, kind, parts in (
                (left, "tokens", {one.cause: one.tokens.value / 1e3 for one in lost}),
                (right, "seconds", {one.cause: one.seconds.value for one in lost}),
            ):
                marks.stacked(axes, place, parts, f"{name}/{kind}", across=True, colours=CAUSES)
        for axes in (left, right):
            axes.grid(visible=False, axis="y")
            axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.6)
            axes.tick_params(axis="y", length=0)
            axes.set_yticks(range(len(found)), list(found))
            axes.set_ylim(len(found) - 0.5, -0.5)
            for label in axes.get_yticklabels():
                label.set(color=inks[label.get_text()], fontweight="bold")
        left.set_xlabel("prompt tokens (1000)")
        right.set_xlabel("TTFT (s)")
        seen = [cause for cause in CAUSES if any(one.cause == cause for lost in found.values() for one in lost)]
        style.legend(picture, style.parts_key(seen, CAUSES))
        lead = (
            "Sums over the measured turns of a trial, mean of its seeds. TTFT, queueing included, is divided by what the "
            "cost model says each position takes. The CSV has the 95 % interval over seeds"
        )
        every = [one for lost in found.values() for one in lost]
        yield Plot(panel, picture, lead, [_lost_row(one) for one in every], [_lost_line(one) for one in every])


def _lost_row(one: Lost) -> Row:
    return {
        **_key(one.cell),
        "cause": one.cause,
        **columns("tokens", one.tokens, prefix="tokens_"),
        **columns("seconds", one.seconds, prefix="seconds_"),
        "evicted_most_by": " ".join(f"{name}:{share:.3f}" for name, share in one.by),
        "trials": one.cell.ids,
    }


def _lost_line(one: Lost) -> Mapping[str, str]:
    return {
        _who(one.cell): _name(one.cell),
        "cause": one.cause.replace("_", " "),
        "tokens": tables.estimated(one.tokens),
        "of TTFT (s)": tables.estimated(one.seconds),
        "most for": ", ".join(f"{name} {share:.0%}" for name, share in one.by[:1]) or tables.NONE,
    }


# -- holding -------------------------------------------------------------------------------------------------------------


def _has_holdings(source: Source) -> bool:
    return not is_map(source.sweep) and any(source.has_metric("held_gib_s", tier) for tier in TIERS)


def _holdings(source: Source, cell: Cell) -> list[tuple[int, Holding]]:
    """With the trial of each."""
    return [(trial.id, one) for trial in cell.trials for one in source.store.holdings_of(trial.id)]


def _worth(source: Source, cell: Cell) -> Worth | None:
    return Worth.of(cell.trials[0], source.prices)


def _basis(source: Source) -> str:
    said = ", ".join(f"{name} {value:g}" for name, value in source.prices.model_dump().items() if value is not None)
    return f"at the prices {said}"


@figure(
    "holding",
    "What keeping KV took, and what it saved",
    shows="GiB·s held idle against seconds of prefill saved, by conversation and tier, with the line where both are even",
    command=COMMAND,
    applies=_has_holdings,
)
def holding(source: Source) -> Iterator[Plot]:
    """A part for each baseline or policy; both axes logarithmic, with what saved nothing at the lower edge."""
    for panel in source.panels(*_along(source), partial=True):
        cells = [cell for cell in panel.cells if _holdings(source, cell)]
        if not cells:
            raise source.lacks("trial with a ledger of holding")
        across = min(len(cells), 2 if len(cells) <= 4 else 3)
        down = -(-len(cells) // across)
        picture, grid = style.new_grid(3.0 / max(across, 2) * down + 0.2, down, across, sharex=True, sharey=True)
        flat = [axes for row in grid for axes in row]
        rows: list[Row] = []
        everything = [one for cell in cells for _, one in _holdings(source, cell) if one.idle_gib_s > 0]
        saved = [one.saved_s for one in everything if one.saved_s > 0]
        evens = [
            one.idle_gib_s / gib
            for cell in cells
            if (worth := _worth(source, cell)) is not None
            for one in everything
            if (gib := worth.gib(one.tier)) is not None
        ]
        floor = min(saved + evens, default=1.0) / 3  # below every line: who saved nothing has not paid back
        top = max(saved + evens, default=1.0)
        for axes, cell in zip(flat, cells, strict=False):
            own, worth = _holdings(source, cell), _worth(source, cell)
            for tier, colour in TIERS.items():
                points = [
                    (one.idle_gib_s, max(one.saved_s, floor)) for _, one in own if one.tier == tier and one.idle_gib_s
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), linestyle="none", marker=MARKERS[tier], markersize=2.6, color=colour,
                        alpha=0.6, markeredgewidth=0, gid=f"{_name(cell)}/{tier}",
                    )  # fmt: skip
            axes.set(xscale="log", yscale="log")
            axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.6)
            if not any(one.idle_gib_s for _, one in own):
                axes.text(0.5, 0.5, "nothing is kept", transform=axes.transAxes, ha="center", color=style.GREY)
            else:
                _even(axes, _name(cell), worth, everything)
            axes.set_title(_name(cell), fontweight="bold", color=_ink(cell))
            rows += [_holding_row(cell, trial, one, worth) for trial, one in own]
        for place, axes in enumerate(flat):
            if place >= len(cells):
                axes.remove()
            elif place + across >= len(cells):  # the lowest of its column
                axes.tick_params(axis="x", labelbottom=True)
                axes.set_xlabel("held idle (GiB·s)")
        flat[0].set_ylim(floor * 0.6, top * 2)
        for row in grid:
            row[0].set_ylabel("prefill saved (s)")
        tiers = [tier for tier in TIERS if any(one.tier == tier for one in everything)]
        style.legend(
            picture,
            [
                *(
                    Line2D(
                        [],
                        [],
                        color=TIERS[tier],
                        marker=MARKERS[tier],
                        linewidth=0,
                        markersize=3,
                        label=tier.upper() if tier != "disk" else tier,
                    )
                    for tier in tiers
                ),
                *([Line2D([], [], color="black", linewidth=0.9, label="even")] if source.prices.given else []),
            ],
        )
        line = f"; above the line keeping has paid back, {_basis(source)}" if source.prices.given else ""
        lead = (
            f"A point a conversation and tier of a trial{line}. At the lower edge: nothing was saved. What ran "
            "is not counted as kept"
        )
        yield Plot(panel, picture, lead, rows)


def _even(axes: Axes, name: str, worth: Worth | None, everything: Sequence[Holding]) -> None:
    """One line where all tiers cost the same, else one a tier."""
    if worth is None or not everything:
        return
    xs = (min(one.idle_gib_s for one in everything), max(one.idle_gib_s for one in everything))
    held = {one.tier for one in everything}
    known = {tier: gib for tier in TIERS if tier in held and (gib := worth.gib(tier)) is not None}
    same = len(set(known.values())) == 1
    for tier, gib in known.items():
        if not same or tier == next(iter(known)):
            axes.plot(
                xs, [x / gib for x in xs], color="black" if same else TIERS[tier], linewidth=0.9,
                gid=f"{name}/even" if same else f"{name}/even/{tier}",
            )  # fmt: skip


def _holding_row(cell: Cell, trial: int, one: Holding, worth: Worth | None) -> Row:
    return {
        **_key(cell),
        "trial": trial,
        "session": one.session,
        "tier": one.tier,
        "gib_s": one.gib_s,
        "idle_gib_s": one.idle_gib_s,
        "saved_s": one.saved_s,
        "paid_back": None if worth is None else worth.paid_back(one.saved_s, one.idle_gib_s, one.tier),
    }


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one baseline and tier, a trial. worthwhile: the share of its conversations that have paid back, in percent."""

    cell: Cell
    tier: str
    conversations: float
    held: Estimate
    idle: Estimate
    saved: Estimate
    paid_back: float | None
    worthwhile: float | None


def _kept(source: Source, cell: Cell) -> Iterator[Kept]:
    every, worth = _holdings(source, cell), _worth(source, cell)
    for tier in TIERS:
        own = [one for _, one in every if one.tier == tier]
        if not own:
            continue
        held, idle, saved = (
            over_seeds(cell.metric(name, tier)) for name in ("held_gib_s", "held_idle_gib_s", "saved_s")
        )
        idling = [one for one in own if one.idle_gib_s]
        backs = [] if worth is None else [worth.paid_back(one.saved_s, one.idle_gib_s, one.tier) for one in idling]
        known = [one for one in backs if one is not None]
        yield Kept(
            cell,
            tier,
            len(own) / len(cell.trials),
            held,
            idle,
            saved,
            None if worth is None else worth.paid_back(saved.value, idle.value, own[0].tier),
            100 * sum(one >= 1 for one in known) / len(known) if known else None,
        )


@figure(
    "holding_table",
    "What keeping KV took, and what it saved",
    shows="GiB·s held, seconds of prefill saved and whether one paid for the other, by baseline and tier",
    command=COMMAND,
    applies=_has_holdings,
)
def holding_table(source: Source) -> Iterator[Plot]:
    for panel in source.panels(*_along(source), partial=True):
        found = [one for cell in panel.cells for one in _kept(source, cell)]
        if not found:
            raise source.lacks("trial with a ledger of holding")
        priced = source.prices.given
        lines = [_kept_line(one, priced) for one in found]
        lead = "Sums over a whole trial, mean of its seeds, below it the 95 % interval"
        if priced:
            lead += (
                f". Paid back: GPU time saved over memory kept idle, {_basis(source)}; worth it: conversations that have "
                "paid back"
            )
        yield Plot(panel, None, lead, [_kept_row(one) for one in found], lines)


def _kept_row(one: Kept) -> Row:
    return {
        **_key(one.cell),
        "tier": one.tier,
        "conversations": one.conversations,
        **columns("gib_s", one.held, prefix="gib_s_"),
        **columns("idle_gib_s", one.idle, prefix="idle_gib_s_"),
        **columns("saved_s", one.saved, prefix="saved_s_"),
        "paid_back": one.paid_back,
        "worthwhile_pct": one.worthwhile,
        "trials": one.cell.ids,
    }


def _kept_line(one: Kept, priced: bool) -> Mapping[str, str]:
    line = {
        _who(one.cell): _name(one.cell),
        "tier": one.tier,
        "held (GiB·s)": tables.estimated(one.held),
        "idle (GiB·s)": tables.estimated(one.idle),
        "saved (s)": tables.estimated(one.saved),
    }
    if priced:
        line["paid back"] = tables.NONE if one.paid_back is None else f"{one.paid_back:.2g}×"
        line["worth it"] = tables.NONE if one.worthwhile is None else f"{one.worthwhile:.0f} %"
    return line


# -- break-even ----------------------------------------------------------------------------------------------------------


@figure(
    "break_even",
    "How long it pays to keep idle KV",
    shows="the idle time up to which keeping so many tokens costs less than computing them again",
    command=COMMAND,
    applies=lambda source: (
        source.prices.given and _has_holdings(source) and any(prefill_seconds(job.metrics) for job in source.jobs)
    ),
)
def break_even(source: Source) -> Iterator[Plot]:
    for panel in source.panels(*_along(source), partial=True):
        rows = [row for cell in panel.cells for row in _break_evens(source, cell)]
        if not rows:
            raise MissingSeries(
                f"No tier of sweep {source.sweep.id} has a price beside one of the GPUs; give gpu_hour and gpu_gib_hour or "
                "cpu_gib_hour to --prices."
            )
        picture, axes = style.new_axes(1.5)
        of: dict[tuple[str, Tier], list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            of[_named(row), row["tier"]].append((row["tokens"], row["break_even_s"]))
        alike: dict[tuple[tuple[int, float], ...], list[tuple[str, Tier]]] = defaultdict(list)
        for key, points in of.items():  # baselines with the same GPUs and memory have the same line
            alike[tuple(points)].append(key)
        few = len(alike) <= len(TIERS)
        for order, (line, keys) in enumerate(alike.items()):
            names, tiers = list(dict.fromkeys(name for name, _ in keys)), list(dict.fromkeys(tier for _, tier in keys))
            label = " and ".join(tiers) if few else f"{' and '.join(tiers)}, {names[0]}"
            axes.plot(
                *zip(*line, strict=True), color=TIERS[tiers[0]] if few else style.colour(names[0]),
                linestyle=LINES[tiers[0]], marker=MARKERS[tiers[0]], markersize=3, linewidth=1.2,
                gid=f"{','.join(names)}/{','.join(tiers)}", label=label, zorder=3 - order / 100,
            )  # fmt: skip
        marks.mark_counts(axes, sorted({row["tokens"] for row in rows})[::2])
        if marks.wide([row["break_even_s"] for row in rows]):
            marks.plain_log(axes, "y")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("leading tokens of a conversation")
        axes.set_ylabel("idle time (s)")
        style.legend(picture)
        lead = f"Idle time at which keeping costs what computing again costs, {_basis(source)}"
        yield Plot(panel, picture, lead, rows, _break_even_lines(rows))


def _break_evens(source: Source, cell: Cell) -> Iterator[Row]:
    worth = _worth(source, cell)
    prefill = max((prefill_seconds(job.metrics) for job in cell.jobs), key=len, default={})
    for tier in TIERS if worth is not None else ():
        for tokens, seconds in prefill.items() if cell.metric("held_gib_s", tier) else ():
            assert worth is not None
            even_s = worth.break_even_s(tokens, seconds, tier)
            if even_s is not None:
                yield {
                    **_key(cell),
                    "tier": tier,
                    "tokens": tokens,
                    "prefill_s": seconds,
                    "gib": tokens * worth.token_gib,
                    "break_even_s": even_s,
                    "trials": cell.ids,
                }


def _named(row: Row) -> str:
    return str(row.get(POLICIES, row["baseline"]))


def _break_even_lines(rows: Sequence[Row]) -> list[Mapping[str, str]]:
    """A line for each number of tokens that any baseline has, with the idle time in each baseline's tiers. Policies of one
    baseline have the same machine, and so the same times."""
    heads = list(dict.fromkeys((row["baseline"], row["tier"]) for row in rows))
    found = {(row["tokens"], row["baseline"], row["tier"]): row["break_even_s"] for row in rows}
    lines: list[Mapping[str, str]] = []
    for tokens in sorted({row["tokens"] for row in rows}):
        cells = {f"{name}\n{tier} (s)": found.get((tokens, name, tier)) for name, tier in heads}
        lines.append(
            {
                "tokens": f"{tokens:,}",
                **{head: tables.NONE if value is None else f"{value:,.3g}" for head, value in cells.items()},
            }
        )
    return lines
