"""What a figure draws of a cell: a metric, a reduction of its turns, or a function, each with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pkgutil import resolve_name
from statistics import fmean
from typing import Any

import pandas as pd
from pydantic import BaseModel

from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.metrics import OUT_OF_MEMORY, PERCENTILES
from pensieve.lab.results.frame import (
    REFERENCE,
    ByConversation,
    Cell,
    by_conversation,
    conversation_means,
    conversation_sums,
    found_history,
    paired,
    positive_ratio,
    seed_means,
    speed_up,
    values_of,
)
from pensieve.lab.statistics import (
    Estimate,
    estimate_mean,
    estimate_percentiles_by_seed,
    flat,
    paired_ratio,
    rate_by_seed,
)
from pensieve.units import significant

Found = Estimate | float | None


def columns(name: str, estimate: Estimate | None, prefix: str = "") -> dict[str, Any]:
    """The columns of an estimate in a CSV, empty where there is none. prefix: before those of its interval and counts."""
    names = (name, *(f"{prefix}{which}" for which in ("ci_low", "ci_high", "n", "n_seeds")))
    return dict.fromkeys(names) if estimate is None else dict(zip(names, astuple(estimate), strict=True))


def percentile(values: ByConversation, p: float) -> Estimate:
    """Nearest rank over all turns; n counts turns."""
    return estimate_percentiles_by_seed(values, [p])[0]


def median(values: pd.Series[Any]) -> Estimate:
    """Of one value a conversation; n counts conversations."""
    return percentile({key: found[-1:] for key, found in by_conversation(values).items()}, 0.5)


def mean(values: ByConversation) -> Estimate:
    """Over all turns; n counts turns."""
    sums = {key: sum(found) for key, found in values.items()}
    counts = {key: float(len(found)) for key, found in values.items()}
    return replace(paired_ratio(sums, counts, of="means"), n=sum(len(found) for found in values.values()))


def percent(parts: pd.Series[Any], wholes: pd.Series[Any]) -> Estimate:
    """Sum over sum in percent, such as hit tokens of history tokens; n counts conversations."""
    tops, bottoms = (conversation_sums(one) for one in (parts, wholes))
    found = rate_by_seed({key: (tops[key], whole) for key, whole in bottoms.items()})
    return replace(moved(found, lambda share: 100 * share), n=len(bottoms))


def over_seeds(values: Mapping[tuple[int, Any], float]) -> Estimate:
    """Mean of one value a trial, by (seed, repeat); seeds are the groups."""
    return estimate_mean(*flat({seed: [mean] for seed, mean in sorted(seed_means(values).items())}))


def moved(found: Estimate, to: Callable[[float], float]) -> Estimate:
    """The same in other units; where `to` falls, its ends change places."""
    ends = [None if end is None else to(end) for end in (found.ci_low, found.ci_high)]
    low, high = reversed(ends) if to(1.0) < to(0.0) else ends
    return replace(found, value=to(found.value), ci_low=low, ci_high=high)


class Quantity(BaseModel, frozen=True, extra="forbid"):
    """of: a column of table `turn` or what pandas makes of several ("compute_ms / output_tokens"), a metric, or a
    function(source, cell) by its dotted name; one of this module needs no dot.

    how: of a column "mean" or a percentile ("p90") over the turns; of a metric "seeds", its mean over seeds, or "sum".
    against: a baseline whose turns are held over this one's, paired, as a ratio (2: this one takes half the time).
    where: which turns, as pandas' query has it. label: of a metric, or what a function takes besides. scale: so many of a
    metric are one. name: its column in the CSV; prefix: of its interval there; interval: False leaves that out. says: over
    its axis, and in a table. text: beside a bar, as str.format has it; unit: "bytes" or "digits", which make a text of the
    number first. hatched: a second kind of bar. drawn: False: in the CSV alone.
    """

    of: str = ""
    how: str = ""
    against: str = ""
    where: str = ""
    label: str = ""
    scale: float = 1.0
    name: str = ""
    prefix: str = ""
    interval: bool = True
    says: str = ""
    text: str = "{:,.1f}"
    unit: str = ""
    hatched: bool = False
    drawn: bool = True

    def found(self, source: Source, cell: Cell) -> Found:
        """None: this cell's trials do not have it."""
        if self.against:
            sides = (_those(source.turns(one), self.where) for one in (_beside(source, cell, self.against), cell))
            return speed_up(paired(*(values_of(turns, self.of) for turns in sides)))
        if not self.how:
            function = resolve_name(self.of if "." in self.of else f"{__name__}.{self.of}")
            own: Found = function(source, cell, *filter(None, [self.label]))
            return own
        if self.how == "sum":
            return sum(source.metrics(cell, self.of).values())
        if self.how == "seeds":
            one_a_trial = source.metrics(cell, self.of, self.label)
            return over_seeds({key: value / self.scale for key, value in one_a_trial.items()}) if one_a_trial else None
        turns = _those(source.turns(cell), self.where)
        every = values_of(turns, self.of) if self.of.isidentifier() else pd.Series(turns.eval(self.of), turns.index)
        values = by_conversation(every.dropna())
        if not values:
            return None
        return mean(values) if self.how == "mean" else percentile(values, PERCENTILES[self.how])

    def shown(self, found: Estimate | float) -> str:
        value = found.value if isinstance(found, Estimate) else found
        return self.text.format(size(value) if self.unit == "bytes" else significant(value) if self.unit else value)

    def columns(self, found: Found) -> dict[str, Any]:
        """Of the CSV: the value, and of an estimate its interval and counts."""
        if isinstance(found, float | int) or not self.interval:
            return {self.name: found.value if isinstance(found, Estimate) else found}
        return columns(self.name, found, self.prefix)

    def head(self, facet: str = "") -> str:
        """Of a table."""
        return " ".join((self.says.replace("{}", facet) or self.name.replace("_", " ")).split())


def size(value: float) -> str:
    """Of bytes three digits and a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}" if value else "0"
        value /= 1000
    return f"{value:.3g} GB"


def _beside(source: Source, cell: Cell, baseline: str) -> Cell:
    """The cell of this baseline at the same place. Raises MissingSeries."""
    panel = next(panel for panel in source.panels(*cell.at) if cell in panel.cells)
    found = next((one for one in panel.of(baseline) if one.at == cell.at), None)
    if found is None:
        raise source.lacks(f"completed trial of {baseline} beside the others")
    return found


def _those(turns: pd.DataFrame, where: str) -> pd.DataFrame:
    return turns.query(where) if where else turns


# Where history was found


def found_pct(source: Source, cell: Cell, *tiers: str) -> Estimate | None:
    """History tokens found on these tiers, by default on any, in percent of all; None where no turn had history, the engine
    does not say what it found, or the sweep found nothing on disk."""
    known = found_history(source.turns(cell), *tiers)
    if known.empty or (tiers == ("disk",) and not any(job.value("disk_hit_rate") for job in source.jobs)):
        return None
    found = percent(known["hits"], known["history"])
    if cell.baseline == REFERENCE and not found.value:
        return replace(found, ci_low=None, ci_high=None)  # it keeps nothing: its 0 is no estimate
    return found


def lost_pct(source: Source, cell: Cell) -> Estimate | None:
    """The rest, which was computed again."""
    found = found_pct(source, cell)
    return None if found is None else moved(found, lambda pct: 100 - pct)


def bound_pct(source: Source, cell: Cell) -> float | None:
    """Of the history, what a policy that knows the future could find; a server that stores nothing has none."""
    values = {} if cell.baseline == REFERENCE else source.metrics(cell, "bound_hit_rate")
    return 100.0 * over_seeds(values).value if values else None


# Replicas


def skew(source: Source, cell: Cell) -> Estimate:
    """Requests under way on the fullest replica over those on all of them but as many, means over the readings of a trial."""
    found: dict[tuple[int, int], float] = {}
    for trial in cell.trials:
        readings = source.store.samples_of(trial.id)
        fullest, under_way = (
            [one.value for one in readings if one.name == name and one.value is not None]
            for name in ("fullest_replica", "requests_under_way")
        )
        if not any(under_way):
            raise MissingSeries(f"Trial {trial.id} has no readings of its replicas; run it again.")
        found[trial.seed, trial.repeat] = fmean(fullest) * int(cell.at["hardware.replicas"]) / fmean(under_way)
    return over_seeds(found)


# Agents


def reason_over_reflect(source: Source, cell: Cell) -> Estimate | None:
    """Latency of a reason over that of a reflection, paired by seed and agent: the geometric mean."""
    stages = (_those(source.turns(cell), f"label == '{stage}'") for stage in ("reason", "reflect"))
    return positive_ratio(*(conversation_means(own["latency_ms"]) for own in stages))


def out_of_memory(source: Source, cell: Cell) -> int:
    """Turns of agents that did not get the memory they needed."""
    turns = source.turns(cell, measured=False)
    turns = turns[turns["label"].isin(("reason", "reflect"))]
    return sum(how in OUT_OF_MEMORY for how in zip(turns["status"], turns["finish_reason"], strict=True))
