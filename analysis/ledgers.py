"""miss_causes, holding, holding_table, break_even: why KV was missing, what keeping it took, and what that saved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import marks, style
from analysis.quantities import columns, over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Panel, Source
from pensieve.core.plan import Tier
from pensieve.errors import MissingSeries
from pensieve.lab import tables
from pensieve.lab.results.prices import Worth, prefill_seconds
from pensieve.lab.results.size_map import is_map
from pensieve.lab.results.store import Holding

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


def _panels(source: Source) -> Iterator[Panel]:
    """With the policies of one baseline side by side where several were swept, else the baselines."""
    policies = source.several(POLICIES) and len(source.baselines()) == 1
    yield from source.panels(*([POLICIES] if policies else []), partial=True)


def _name(cell: Cell) -> str:
    return cell.at.get(POLICIES, cell.baseline)


def _named(cell: Cell) -> dict[str, str]:
    """The first cell of a line of a table."""
    return {POLICIES if POLICIES in cell.at else "baseline": _name(cell)}


def _ink(cell: Cell) -> str:
    return "black" if POLICIES in cell.at else style.colour(cell.baseline)


def _key(cell: Cell) -> Row:
    return {"baseline": cell.baseline, **cell.at}


# Misses


def has_misses(source: Source) -> bool:
    return not is_map(source.sweep) and any(source.store.miss_sums(trial.id) for trial in source.trials)


def _lost(source: Source, cell: Cell) -> dict[str, dict[str, Any]]:
    """By cause: tokens missed and seconds of first tokens that took, a trial, and the share of those who evicted most."""
    sums: dict[str, dict[tuple[int, int], Counter[str]]] = defaultdict(dict)
    evictors: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in cell.trials:
        for row in source.store.miss_sums(trial.id):
            own = sums[row.cause].setdefault((trial.seed, trial.repeat), Counter())
            own.update({"tokens": row.tokens, "ms": row.ms})
            if row.evicted_by:
                evictors[row.cause][row.evicted_by] += row.tokens
    keys, none = [(trial.seed, trial.repeat) for trial in cell.trials], Counter[str]()
    found = {}
    for cause in (cause for cause in CAUSES if cause in sums):
        whole = sum(own["tokens"] for own in sums[cause].values())
        most = sorted(evictors[cause].items(), key=lambda one: (-one[1], one[0]))[:SHOWN]
        found[cause] = {
            "tokens": over_seeds({key: float(sums[cause].get(key, none)["tokens"]) for key in keys}),
            "seconds": over_seeds({key: sums[cause].get(key, none)["ms"] / 1e3 for key in keys}),
            "by": [(name, count / whole) for name, count in most],
        }
    return found


def miss_causes(source: Source) -> Iterator[Plot]:
    for panel in _panels(source):
        found = [(cell, _lost(source, cell)) for cell in panel.cells]
        if not any(lost for _, lost in found):
            raise source.lacks("turn with a ledger of misses")
        picture, [sides] = style.new_grid(0.26 * len(found) + 0.35, 1, 2, sharey=True)
        labels = {"tokens": ("prompt tokens (1000)", 1e3), "seconds": ("TTFT (s)", 1.0)}
        for axes, (kind, (label, scale)) in zip(sides, labels.items(), strict=True):
            for place, (cell, lost) in enumerate(found):
                parts = {cause: one[kind].value / scale for cause, one in lost.items()}
                marks.stacked(axes, place, parts, f"{_name(cell)}/{kind}", across=True, colours=CAUSES)
            marks.rows(axes, [_name(cell) for cell, _ in found], [_ink(cell) for cell, _ in found])
            axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.6)
            axes.set_xlabel(label)
        seen = [cause for cause in CAUSES if any(cause in lost for _, lost in found)]
        style.legend(picture, style.parts_key(seen, CAUSES))
        lead = (
            "Sums over the measured turns of a trial, mean of its seeds. TTFT, queueing included, is divided by what the "
            "cost model says each position takes. The CSV has the 95 % interval over seeds"
        )
        rows, table = [], []
        for cell, lost in found:
            for cause, one in lost.items():
                rows.append(
                    {
                        **_key(cell),
                        "cause": cause,
                        **columns("tokens", one["tokens"], prefix="tokens_"),
                        **columns("seconds", one["seconds"], prefix="seconds_"),
                        "evicted_most_by": " ".join(f"{name}:{share:.3f}" for name, share in one["by"]),
                        "trials": cell.ids,
                    }
                )
                table.append(
                    {
                        **_named(cell),
                        "cause": cause.replace("_", " "),
                        "tokens": tables.estimated(one["tokens"]),
                        "of TTFT (s)": tables.estimated(one["seconds"]),
                        "most for": ", ".join(f"{name} {share:.0%}" for name, share in one["by"][:1]) or tables.NONE,
                    }
                )
        yield Plot(panel, picture, lead, rows, table)


# Holding


def has_holdings(source: Source) -> bool:
    return not is_map(source.sweep) and any(source.has_metric("held_gib_s", tier) for tier in TIERS)


def _holdings(source: Source, cell: Cell) -> list[tuple[int, Holding]]:
    """With the trial of each."""
    return [(trial.id, one) for trial in cell.trials for one in source.store.holdings_of(trial.id)]


def _worth(source: Source, cell: Cell) -> Worth | None:
    return Worth.of(cell.trials[0], source.prices)


def _basis(source: Source) -> str:
    said = ", ".join(f"{name} {value:g}" for name, value in source.prices.model_dump().items() if value is not None)
    return f"at the prices {said}"


def holding(source: Source) -> Iterator[Plot]:
    """A part for each baseline or policy; both axes logarithmic, with what saved nothing at the lower edge."""
    for panel in _panels(source):
        every = [(cell, own, _worth(source, cell)) for cell in panel.cells if (own := _holdings(source, cell))]
        if not every:
            raise source.lacks("trial with a ledger of holding")
        across = min(len(every), 2 if len(every) <= 4 else 3)
        down = -(-len(every) // across)
        picture, grid = style.new_grid(3.0 / max(across, 2) * down + 0.2, down, across, sharex=True, sharey=True)
        flat = [axes for row in grid for axes in row]
        idle = [one for _, own, _ in every for _, one in own if one.idle_gib_s > 0]
        evens = [one.idle_gib_s / gib for *_, worth in every if worth for one in idle if (gib := worth.gib(one.tier))]
        saved = [one.saved_s for one in idle if one.saved_s > 0] + evens
        floor = min(saved, default=1.0) / 3  # below every line: who saved nothing has not paid back
        for axes, (cell, own, worth) in zip(flat, every, strict=False):
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
            elif worth is not None and idle:
                _even(axes, _name(cell), worth, idle)
            axes.set_title(_name(cell), fontweight="bold", color=_ink(cell))
        for place, axes in enumerate(flat):
            if place >= len(every):
                axes.remove()
            elif place + across >= len(every):  # the lowest of its column
                axes.tick_params(axis="x", labelbottom=True)
                axes.set_xlabel("held idle (GiB·s)")
        flat[0].set_ylim(floor * 0.6, max(saved, default=1.0) * 2)
        for row in grid:
            row[0].set_ylabel("prefill saved (s)")
        handles = [
            Line2D([], [], color=TIERS[tier], marker=MARKERS[tier], linewidth=0, markersize=3, label=label)
            for tier, label in zip(TIERS, ("GPU", "CPU", "disk"), strict=True)
            if any(one.tier == tier for one in idle)
        ]
        even = [Line2D([], [], color="black", linewidth=0.9, label="even")] if source.prices.given else []
        style.legend(picture, [*handles, *even])
        line = f"; above the line keeping has paid back, {_basis(source)}" if source.prices.given else ""
        lead = (
            f"A point a conversation and tier of a trial{line}. At the lower edge: nothing was saved. What ran "
            "is not counted as kept"
        )
        rows = [
            {
                **_key(cell),
                "trial": trial,
                "session": one.session,
                "tier": one.tier,
                "gib_s": one.gib_s,
                "idle_gib_s": one.idle_gib_s,
                "saved_s": one.saved_s,
                "paid_back": worth and worth.paid_back(one.saved_s, one.idle_gib_s, one.tier),
            }
            for cell, own, worth in every
            for trial, one in own
        ]
        yield Plot(panel, picture, lead, rows)


def _even(axes: Axes, name: str, worth: Worth, idle: Sequence[Holding]) -> None:
    """One line where all tiers cost the same, else one a tier."""
    xs = (min(one.idle_gib_s for one in idle), max(one.idle_gib_s for one in idle))
    held = {one.tier for one in idle}
    known = {tier: gib for tier in TIERS if tier in held and (gib := worth.gib(tier)) is not None}
    same = len(set(known.values())) == 1
    for tier, gib in list(known.items())[: 1 if same else None]:
        axes.plot(
            xs, [x / gib for x in xs], color="black" if same else TIERS[tier], linewidth=0.9,
            gid=f"{name}/even" if same else f"{name}/even/{tier}",
        )  # fmt: skip


def holding_table(source: Source) -> Iterator[Plot]:
    """A line a baseline and tier; worth it: the share of its conversations that have paid back."""
    for panel in _panels(source):
        rows: list[Row] = []
        table = []
        for cell in panel.cells:
            every, worth = _holdings(source, cell), _worth(source, cell)
            for tier in TIERS:
                own = [one for _, one in every if one.tier == tier]
                if not own:
                    continue
                names = {"gib_s": "held_gib_s", "idle_gib_s": "held_idle_gib_s", "saved_s": "saved_s"}
                found = {name: over_seeds(cell.metric(metric, tier)) for name, metric in names.items()}
                backs = (
                    [worth.paid_back(one.saved_s, one.idle_gib_s, tier) for one in own if one.idle_gib_s]
                    if worth
                    else []
                )
                known = [one for one in backs if one is not None]
                paid = worth and worth.paid_back(found["saved_s"].value, found["idle_gib_s"].value, tier)
                worthwhile = 100 * sum(one >= 1 for one in known) / len(known) if known else None
                row = {**_key(cell), "tier": tier, "conversations": len(own) / len(cell.trials)}
                for name, one in found.items():
                    row |= columns(name, one, prefix=f"{name}_")
                rows.append({**row, "paid_back": paid, "worthwhile_pct": worthwhile, "trials": cell.ids})
                line = {**_named(cell), "tier": tier}
                for head, one in zip(("held (GiB·s)", "idle (GiB·s)", "saved (s)"), found.values(), strict=True):
                    line[head] = tables.estimated(one)
                if source.prices.given:
                    line["paid back"] = tables.NONE if paid is None else f"{paid:.2g}×"
                    line["worth it"] = tables.NONE if worthwhile is None else f"{worthwhile:.0f} %"
                table.append(line)
        if not rows:
            raise source.lacks("trial with a ledger of holding")
        lead = "Sums over a whole trial, mean of its seeds, below it the 95 % interval"
        if source.prices.given:
            lead += (
                f". Paid back: GPU time saved over memory kept idle, {_basis(source)}; worth it: conversations that have "
                "paid back"
            )
        yield Plot(panel, None, lead, rows, table)


# Break-even


def has_prices(source: Source) -> bool:
    return source.prices.given and has_holdings(source) and any(prefill_seconds(job.metrics) for job in source.jobs)


def break_even(source: Source) -> Iterator[Plot]:
    for panel in _panels(source):
        rows = [row for cell in panel.cells for row in _break_evens(source, cell)]
        if not rows:
            raise MissingSeries(
                f"No tier of sweep {source.sweep.id} has a price beside one of the GPUs; give gpu_hour and gpu_gib_hour or "
                "cpu_gib_hour to --prices."
            )
        of: dict[tuple[str, Tier], list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            of[str(row.get(POLICIES, row["baseline"])), row["tier"]].append((row["tokens"], row["break_even_s"]))
        alike: dict[tuple[tuple[int, float], ...], list[tuple[str, Tier]]] = defaultdict(list)
        for key, points in of.items():  # baselines with the same GPUs and memory have the same line
            alike[tuple(points)].append(key)
        few = len(alike) <= len(TIERS)
        picture, axes = style.new_axes(1.5)
        for order, (line, keys) in enumerate(alike.items()):
            names, tiers = list(dict.fromkeys(name for name, _ in keys)), list(dict.fromkeys(tier for _, tier in keys))
            label = " and ".join(tiers) if few else f"{' and '.join(tiers)}, {names[0]}"
            axes.plot(
                *zip(*line, strict=True), color=TIERS[tiers[0]] if few else style.colour(names[0]),
                linestyle=LINES[tiers[0]], marker=MARKERS[tiers[0]], markersize=3, linewidth=1.2,
                gid=f"{','.join(names)}/{','.join(tiers)}", label=label, zorder=3 - order / 100,
            )  # fmt: skip
        marks.mark_counts(axes, sorted({row["tokens"] for row in rows})[::2])
        marks.from_zero(axes, [row["break_even_s"] for row in rows])
        axes.set_xlabel("leading tokens of a conversation")
        axes.set_ylabel("idle time (s)")
        style.legend(picture)
        lead = f"Idle time at which keeping costs what computing again costs, {_basis(source)}"
        # Policies of one baseline have the same machine, and so the same times: a column a baseline and tier.
        found = {(row["tokens"], row["baseline"], row["tier"]): f"{row['break_even_s']:,.3g}" for row in rows}
        heads = list(dict.fromkeys((row["baseline"], row["tier"]) for row in rows))
        table = [
            {"tokens": f"{tokens:,}"}
            | {f"{name}\n{tier} (s)": found.get((tokens, name, tier), tables.NONE) for name, tier in heads}
            for tokens in sorted({row["tokens"] for row in rows})
        ]
        yield Plot(panel, picture, lead, rows, table)


def _break_evens(source: Source, cell: Cell) -> Iterator[Row]:
    worth = _worth(source, cell)
    prefill = max((prefill_seconds(job.metrics) for job in cell.jobs), key=len, default={})
    for tier in TIERS:
        for tokens, seconds in prefill.items() if cell.metric("held_gib_s", tier) else ():
            even_s = worth and worth.break_even_s(tokens, seconds, tier)
            if worth is not None and even_s is not None:
                yield {
                    **_key(cell),
                    "tier": tier,
                    "tokens": tokens,
                    "prefill_s": seconds,
                    "gib": tokens * worth.token_gib,
                    "break_even_s": even_s,
                    "trials": cell.ids,
                }
