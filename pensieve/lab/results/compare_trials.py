"""Two sets of trials compared metric by metric: which trials a few words name, ratio, interval, verdict, and the table."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from pensieve.errors import MissingSeries, MixedPanel, ResultsError, typed
from pensieve.lab.metrics import Slo, metric_of
from pensieve.lab.results.frame import (
    UNEQUAL_RATE,
    Frame,
    conversation_means,
    differences,
    field_of,
    flat,
    footer,
    mixtures,
    paired,
    text_of,
    turn_frame,
    values_of,
)
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore, slo_of
from pensieve.lab.statistics import has_interval, paired_ratio
from pensieve.units import NONE, grid

PAIRED = (
    "A / B: the geometric mean of the pairs' ratios (same seed, and same conversation where n counts conversations); of the "
    "two means where some value is 0."
)

Values = dict[tuple[int, str], float]


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric. a, b: means over the pairs. ratio: with its 95 % interval where there is one.

    of_pairs: the ratio is the geometric mean of the pairs' ratios, which differs from a / b; False: it is a / b, since some
    value is 0. n counts n_unit (conversations, or trials) that both sides have. verdict: which side is better, or why none
    is shown.
    """

    group: str
    metric: str
    label: str
    unit: str
    a: float
    b: float
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    n: int
    n_unit: str
    verdict: str
    of_pairs: bool = False


@dataclass(frozen=True, slots=True)
class ComparedTrials:
    rows: Sequence[ComparedMetric]
    notes: Sequence[str]

    def table(self, wanted: Callable[[str], bool]) -> RenderableType:
        """One table a group, of the metrics whose name is wanted; the notes below."""
        rows = [row for row in self.rows if wanted(row.metric)]
        groups: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(_cells(row))
        said = [] if rows else ["No metric of that name is in both."]
        said += [PAIRED] if any(row.of_pairs for row in rows) else []
        tables = (grid(cells, group, left=("verdict",)) for group, cells in groups.items())
        return Group(*tables, *map(Text, [*said, *self.notes]))


def objective_of(store: ResultsStore, *words: str) -> Slo | None:
    """The objective of the sweeps that `words` name (see select_trials); None where none is named, or they differ."""
    names = [name for one in words if (name := _named(one)[0]) is not None]
    asked = {Slo.of_sweep(store.sweep_named(name).overrides) for name in names}
    return asked.pop() if len(asked) == 1 else None


def _named(words: str) -> tuple[str | None, dict[str, str]]:
    """The sweep that is named, and the conditions."""
    each = (part if "=" in part else f"sweep={part}" for part in words.split(",") if part.strip())
    conditions = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in each)}
    return conditions.pop("sweep", None), conditions


def select_trials(store: ResultsStore, words: str) -> Sequence[Trial]:
    """The completed trials that `words` name, in order of id.

    words: a sweep's id, "latest" (sweep), or conditions that all hold, such as
    "sweep=3,baseline=pensieve,workload.users=6": a column of table trial, or a dotted field of the configuration. Of a
    trial that ran several times a sweep counts with what it shows, otherwise the newest completed attempt. Raises
    ResultsError where nothing is found.
    """
    sweep, conditions = _named(words)
    trials = store.current_trials() if sweep is None else Frame(store, store.sweep_named(sweep)).trials
    for key, value in conditions.items():
        known = {text_of(field_of(trial, key)) for trial in trials}
        trials = [trial for trial in trials if text_of(field_of(trial, key)) in (value, _as_a_number(value))]
        if not trials:
            there = ", ".join(sorted(known)) or "nothing"
            raise ResultsError(f"No completed trial has {key}={value}; {key} is {there}.")
    if not trials:
        raise ResultsError(f"No completed trial is meant by {words!r}; {typed('run')} -m makes some.")
    return trials


def _as_a_number(text: str) -> str:
    """2.0 and 2e0 are typed for what a record has as 2."""
    try:
        return text_of(float(text))
    except ValueError:
        return text


def compare_trials(
    store: ResultsStore, a: Sequence[Trial], b: Sequence[Trial], allow_mixed: bool = False, slo: Slo | None = None
) -> ComparedTrials:
    """A against B, paired by seed (latencies: by seed and conversation), one group for each value of what else varies.

    slo: judges the turns of both; None: the objective that all were run with, if there is one.
    Raises MixedPanel where times of the two must not be compared (trials.mixtures; allow_mixed: a note says it instead) or a
    side has two trials in one place, MissingSeries where they share no seed.
    """
    mixed = mixtures(list({trial.id: trial for trial in (*a, *b)}.values()))
    if mixed and not allow_mixed:
        which = f" ({', '.join(map(str, mixed[0].trials))})" if mixed[0].trials else ""
        raise MixedPanel(
            f"A and B together hold {mixed[0].what}{which}; {mixed[0].remedy}, narrow both down (sweep=..., code_hash=...), "
            "or compare them with --allow-mixed, which the table then says."
        )
    asked = {slo_of(trial) for trial in (*a, *b)} if slo is None else {slo}
    objective = asked.pop() if len(asked) == 1 else Slo()
    varying = sorted(differences(a) | differences(b))
    ours, theirs = _settings("A", a, varying), _settings("B", b, varying)
    shared = [group for group in ours if group in theirs]
    if not shared:
        raise MissingSeries(
            f"A and B have no {' and '.join(varying) or 'configuration'} in common; narrow each down, "
            "for instance to one baseline."
        )
    rows: list[ComparedMetric] = []
    notes = [*(f"Mixed: {one.what}." for one in mixed), _differ(a, b, varying)]
    for group in shared:
        name = ", ".join(f"{shown}={dict(group)[field]}" for field, shown in _telling(varying).items())
        pairs = [(ours[group][at], theirs[group][at]) for at in sorted(ours[group].keys() & theirs[group].keys())]
        if not pairs:
            raise MissingSeries("A and B share no seed; run them with the same seeds.")
        found = _metrics(store, name, pairs, objective)
        if unequal := _unequal_rate(pairs, found):
            notes.append(f"{name + ': ' if name else ''}{unequal}")
        rows += found
    if len({trial.seed for trial in (*a, *b)}) == 1:
        notes.append("One seed: intervals are over its conversations and say nothing about other seeds.")
    return ComparedTrials(rows, [note for note in (*notes, *footer([*a, *b])) if note])


Setting = tuple[tuple[str, str], ...]
"""Fields that vary within a side, with their values."""


def _settings(
    side: str, trials: Sequence[Trial], varying: Sequence[str]
) -> dict[Setting, dict[tuple[int, int], Trial]]:
    """The trials of each setting by seed and repeat. Raises MixedPanel where two have one place."""
    found: dict[Setting, dict[tuple[int, int], Trial]] = {}
    for trial in trials:
        config = dict(flat(trial.config))
        own = found.setdefault(tuple((field, config.get(field, "")) for field in varying), {})
        other = own.setdefault((trial.seed, trial.repeat), trial)
        if other.id != trial.id:
            raise MixedPanel(
                f"{side} has trials {other.id} and {trial.id} of the same configuration, seed and repeat, of another "
                "code or platform. Narrow it down, for instance by sweep=... or id=..."
            )
    return found


def _telling(fields: Iterable[str]) -> dict[str, str]:
    """Of these fields those that tell, by what they are called: an option's name stands for all fields of its group."""
    given = list(fields)
    options = {field.partition(".")[0] for field in given if field.endswith(".name")}
    told = (field for field in given if field.endswith(".name") or field.partition(".")[0] not in options)
    return {field: field.removesuffix(".name") for field in told}


def _differ(a: Sequence[Trial], b: Sequence[Trial], varying: Sequence[str]) -> str:
    """A sentence on the fields in which A and B differ: each may be the cause of what is found."""
    ones, others = dict(flat(a[0].config)), dict(flat(b[0].config))
    changed = {
        field: (ones.get(field, "nothing"), others.get(field, "nothing"))
        for field in {**ones, **others}
        if ones.get(field) != others.get(field) and field not in (*varying, "seed", "repeat")
    }
    told = _telling(changed).items()
    parts = [f"{shown} ({changed[field][0]} in A, {changed[field][1]} in B)" for field, shown in told]
    return f"They differ in {', '.join(parts)}." if parts else "Their configurations are the same."


def _metrics(store: ResultsStore, group: str, pairs: Sequence[tuple[Trial, Trial]], slo: Slo) -> list[ComparedMetric]:
    """Latencies are means of each conversation, over the turns that both completed; all else is one value a trial."""
    metrics = [[{(m.name, m.label): m for m in store.metrics_of(t.id, slo)} for t in pair] for pair in pairs]
    columns = ("label", "output_tokens", "ttft_ms", "latency_ms", "queue_ms")
    turns = [turn_frame(store, side, *columns) for side in zip(*pairs, strict=True)]
    turns_of = cache(lambda column: paired(*(values_of(side, column) for side in turns)))
    rows = []
    for (name, label), first in metrics[0][0].items():
        if metric_of(name).per_conversation:
            both = turns_of(name.removesuffix("_mean"))
            part = both[turns[0]["label"].reindex(both.index) == label] if label else both
            a, b, n_unit = conversation_means(part["a"]), conversation_means(part["b"]), "conversations"
        else:
            a, b, n_unit = {}, {}, "trials"
            for (one, _), sides in zip(pairs, metrics, strict=True):
                ours, theirs = (side[name, label].value if (name, label) in side else None for side in sides)
                if ours is not None and theirs is not None:
                    a[one.seed, str(one.repeat)], b[one.seed, str(one.repeat)] = ours, theirs
        if a:
            rows.append(_row(group, name, label, first.unit, a, b, n_unit))
    return rows


def _row(group: str, name: str, label: str, unit: str, a: Values, b: Values, n_unit: str) -> ComparedMetric:
    of_pairs, seeds = min(*a.values(), *b.values()) > 0, len({seed for seed, _ in a})
    mean_a, mean_b = fmean(a.values()), fmean(b.values())
    ratio = low = high = None
    if of_pairs or (mean_b > 0 and mean_a >= 0):
        found = paired_ratio(a, b, of="pairs" if of_pairs else "means")
        ratio = found.value
        if n_unit == "conversations" or has_interval(seeds):
            low, high = found.ci_low, found.ci_high
    verdict = _verdict(name, mean_a, mean_b, low, high, seeds if seeds > 1 else len(a))
    return ComparedMetric(group, name, label, unit, mean_a, mean_b, ratio, low, high, len(a), n_unit, verdict, of_pairs)


def _verdict(name: str, a: float, b: float, low: float | None, high: float | None, n: int) -> str:
    if a == b and (low is None or low == high):
        return "equal"
    if low is None or high is None:
        return f"n = {n}, no interval"
    if low <= 1.0 <= high:
        return "no difference shown"
    better = metric_of(name).better
    if better == "none":
        return "A has more" if low > 1.0 else "A has less"
    return "A is better" if (low > 1.0) == (better == "higher") else "B is better"


def _unequal_rate(pairs: Iterable[tuple[Trial, Trial]], rows: Sequence[ComparedMetric]) -> str:
    """A sentence if the achieved rates differ under an open load: latencies are not comparable then."""
    loads = {str(trial.flags.get("load")) for pair in pairs for trial in pair}
    rate = next((row for row in rows if row.metric == "throughput_req_s" and not row.label), None)
    if loads <= {"closed"} or rate is None or rate.ratio is None or abs(rate.ratio - 1.0) <= UNEQUAL_RATE:
        return ""
    return (
        f"The achieved rates differ ({rate.a:.3g} requests/s in A, {rate.b:.3g} in B): compare latencies at equal achieved "
        "rates, or rates at equal latency."
    )


def _cells(row: ComparedMetric) -> dict[str, str]:
    name = f"{row.metric} [{row.label}]" if row.label else row.metric
    return {
        "metric": name.replace("[", "\\["),  # square brackets would be markup
        "A": f"{row.a:,.4g}",
        "B": f"{row.b:,.4g}",
        "A / B": NONE if row.ratio is None else f"{row.ratio:.3g}",
        "95 % interval": NONE
        if row.ci_low is None or row.ci_high is None
        else f"{row.ci_low:.3g} to {row.ci_high:.3g}",
        "n": f"{row.n} {row.n_unit if row.n != 1 else row.n_unit.removesuffix('s')}",
        "verdict": row.verdict,
    }
