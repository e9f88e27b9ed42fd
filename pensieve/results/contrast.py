"""Two sets of trials, metric by metric: ratio, interval, verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pensieve.errors import MissingSeries, MixedPanel
from pensieve.results.mixture import mixtures
from pensieve.results.schema import Trial
from pensieve.results.selection import differences, flat
from pensieve.results.store import ResultsStore
from pensieve.results.summary import measured_turns
from pensieve.statistics import has_interval, paired_ratio

UNEQUAL_RATE = 0.05
BY_SESSION = ("ttft_ms", "latency_ms", "normalized_latency_ms", "queue_ms")
"""Latencies whose mean is compared conversation by conversation; all else is one value a trial."""
_MORE_IS_BETTER = ("throughput", "makespan", "goodput", "slo_attainment", "gpu_hit", "cpu_hit", "prompt_hit", "bound_")
_LESS_IS_BETTER = (
    "_ms", "ms_", "_s", "miss_rate", "_bytes", "recomputed", "evicted", "dropped", "suspended", "deferred", "oom",
    "degradation", "energy",
)  # fmt: skip

Values = dict[tuple[int, str], float]


@dataclass(frozen=True, slots=True)
class Contrast:
    """One metric. a, b: means over the pairs. ratio: a / b, with its 95 % interval where there is one.

    n counts n_unit (conversations, or trials) that both sides have. verdict: who is better, or why nobody can say.
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


@dataclass(frozen=True, slots=True)
class Contrasts:
    rows: Sequence[Contrast]
    notes: Sequence[str]


def contrast(store: ResultsStore, a: Sequence[Trial], b: Sequence[Trial], allow_mixed: bool = False) -> Contrasts:
    """A against B, paired by seed (latencies: by seed and conversation), one group for each value of what else varies.

    Raises MixedPanel where times of the two must not be compared (results.mixture; allow_mixed: a note says it instead) or
    a side has two trials in one place, MissingSeries where they share no seed.
    """
    mixed = _mixed(a, b, allow_mixed)
    varying = sorted(differences(a) | differences(b))
    ours, theirs = _grouped("A", a, varying), _grouped("B", b, varying)
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise MissingSeries(
            f"A and B have no {' and '.join(varying) or 'configuration'} in common; narrow each down, "
            "for instance to one baseline."
        )
    rows: list[Contrast] = []
    notes = [*mixed, _differ(a, b, varying)]
    for key in shared:
        name = _name(dict(zip(varying, key, strict=True)))
        pairs = {seed: (ours[key][seed], theirs[key][seed]) for seed in ours[key].keys() & theirs[key].keys()}
        if not pairs:
            raise MissingSeries("A and B share no seed; run them with the same seeds.")
        found = _contrasts(store, name, [pairs[seed] for seed in sorted(pairs)])
        unequal = _unequal_rate(pairs.values(), found)
        if unequal:
            notes.append(f"{name + ': ' if name else ''}{unequal}")
        rows += found
    if len({trial.seed for trial in (*a, *b)}) == 1:
        notes.append("One seed: intervals are over its conversations and say nothing about other seeds.")
    return Contrasts(rows, [note for note in notes if note])


def _mixed(a: Sequence[Trial], b: Sequence[Trial], allow: bool) -> list[str]:
    """What figures would not put into one panel is not compared either."""
    every = {trial.id: trial for trial in (*a, *b)}
    found = mixtures(list(every.values()))
    if found and not allow:
        first = found[0]
        which = f" ({', '.join(map(str, first.trials))})" if first.trials else ""
        raise MixedPanel(
            f"A and B together hold {first.what}{which}; {first.remedy}, narrow both down (sweep=..., code_hash=...), or "
            "compare them with --allow-mixed, which the table then says."
        )
    return [f"Mixed: {one.what}." for one in found]


def _grouped(
    side: str, trials: Iterable[Trial], varying: Sequence[str]
) -> dict[tuple[str, ...], dict[tuple[int, int], Trial]]:
    groups: dict[tuple[str, ...], dict[tuple[int, int], Trial]] = {}
    for trial in trials:
        fields = dict(flat(trial.config))
        group = groups.setdefault(tuple(fields.get(field, "") for field in varying), {})
        other = group.setdefault((trial.seed, trial.repeat), trial)
        if other.id != trial.id:
            raise MixedPanel(
                f"{side} has trials {other.id} and {trial.id} of the same configuration, seed and repeat (they ran with "
                "another code or on another platform); narrow it down, for instance by sweep=... or id=..."
            )
    return groups


def _name(values: Mapping[str, str]) -> str:
    """What tells the group from the others: an option's name stands for all fields of its group."""
    options = {field.rpartition(".")[0] for field in values if field.endswith(".name")}
    shown = []
    for field, value in values.items():
        group = field.partition(".")[0]
        if field.endswith(".name"):
            shown.append(f"{group}={value}")
        elif group not in options:
            shown.append(f"{field}={value}")
    return ", ".join(shown)


def _differ(a: Sequence[Trial], b: Sequence[Trial], varying: Sequence[str]) -> str:
    """In what A and B differ as a whole; more than one thing is more than one cause."""
    ones, others = dict(flat(a[0].config)), dict(flat(b[0].config))
    changed = {
        field: (ones.get(field, "nothing"), others.get(field, "nothing"))
        for field in {**ones, **others}
        if ones.get(field) != others.get(field) and field not in (*varying, "seed", "repeat", "experiment_name")
    }
    options = {field.partition(".")[0] for field in changed if field.endswith(".name")}
    parts = [
        f"{field.removesuffix('.name')} ({one} in A, {other} in B)"
        for field, (one, other) in changed.items()
        if field.endswith(".name") or field.partition(".")[0] not in options
    ]
    return f"They differ in {', '.join(parts)}." if parts else "Their configurations are the same."


def _contrasts(store: ResultsStore, group: str, pairs: Sequence[tuple[Trial, Trial]]) -> list[Contrast]:
    metrics = [[{(m.name, m.label): m for m in store.metrics_of(t.id)} for t in pair] for pair in pairs]
    sessions = [_session_values(store, pair) for pair in pairs]
    rows = []
    for key, first in metrics[0][0].items():
        name, label = key
        base = name.removesuffix("_mean")
        by_session = base in BY_SESSION and name.endswith("_mean")
        a: Values = {}
        b: Values = {}
        for index, (one, other) in enumerate(pairs):
            if by_session:
                for session, (x, y) in sessions[index].get((base, label), {}).items():
                    a[one.seed, f"{one.repeat}/{session}"], b[other.seed, f"{other.repeat}/{session}"] = x, y
                continue
            ours, theirs = (side[key].value if key in side else None for side in metrics[index])
            if ours is not None and theirs is not None:
                a[one.seed, str(one.repeat)], b[other.seed, str(other.repeat)] = ours, theirs
        if a:
            rows.append(_row(group, name, label, first.unit, a, b, "conversations" if by_session else "trials"))
    return rows


def _row(group: str, name: str, label: str, unit: str, a: Values, b: Values, n_unit: str) -> Contrast:
    positive = all(value > 0 for value in (*a.values(), *b.values()))
    mean_a, mean_b = fmean(a.values()), fmean(b.values())
    ratio = low = high = None
    seeds = len({seed for seed, _ in a})
    if positive or (mean_b > 0 and mean_a >= 0):
        found = paired_ratio(a, b, of="pairs" if positive else "means")
        ratio = found.ratio
        if n_unit == "conversations" or has_interval(seeds):
            low, high = found.ci_low, found.ci_high
    verdict = _verdict(name, mean_a, mean_b, low, high, seeds if seeds > 1 else len(a))
    return Contrast(group, name, label, unit, mean_a, mean_b, ratio, low, high, len(a), n_unit, verdict)


def _verdict(name: str, a: float, b: float, low: float | None, high: float | None, n: int) -> str:
    if a == b and (low is None or low == high):
        return "equal"
    if low is None or high is None:
        return f"n = {n}, no interval"
    if low <= 1.0 <= high:
        return "no difference shown"
    sign = better(name)
    if sign == 0:
        return "A has more" if low > 1.0 else "A has less"
    return "A is better" if (low > 1.0) == (sign > 0) else "B is better"


def better(name: str) -> int:
    """1: more is better, -1: less is, 0: neither."""
    if any(name.startswith(part) for part in _MORE_IS_BETTER):
        return 1
    return -1 if any(part in name if part[0] != "_" else _ends(name, part) for part in _LESS_IS_BETTER) else 0


def _ends(name: str, part: str) -> bool:
    return name.endswith(part) or f"{part}_" in name


def _session_values(
    store: ResultsStore, pair: tuple[Trial, Trial]
) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """(metric, label) -> session -> mean of A and of B, over the turns that both completed."""
    columns = ("session", "turn", "label", "output_tokens", "ttft_ms", "latency_ms", "queue_ms")
    sides = [{(row.session, row.turn): row for row in measured_turns(store, trial.id, *columns)} for trial in pair]
    sums: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for key in sides[0].keys() & sides[1].keys():
        one, other = sides[0][key], sides[1][key]
        for metric in BY_SESSION:
            x, y = _of_turn(one, metric), _of_turn(other, metric)
            if x is None or y is None:
                continue
            for label in {"", one.label}:
                sums[metric, label][one.session].append((x, y))
    return {
        key: {session: (fmean(x for x, _ in two), fmean(y for _, y in two)) for session, two in by_session.items()}
        for key, by_session in sums.items()
    }


def _of_turn(row: object, metric: str) -> float | None:
    if metric == "normalized_latency_ms":
        latency, tokens = getattr(row, "latency_ms", None), getattr(row, "output_tokens", 0)
        return latency / tokens if latency is not None and tokens else None
    value: float | None = getattr(row, metric)
    return value


def _unequal_rate(pairs: Iterable[tuple[Trial, Trial]], rows: Sequence[Contrast]) -> str:
    """Under a load that does not wait for the system, latencies mean little where the achieved rates differ."""
    loads = {str(trial.flags.get("load")) for pair in pairs for trial in pair}
    rate = next((row for row in rows if row.metric == "throughput_req_s" and not row.label), None)
    if loads <= {"closed"} or rate is None or rate.ratio is None or abs(rate.ratio - 1.0) <= UNEQUAL_RATE:
        return ""
    return (
        f"The achieved rates differ ({rate.a:.3g} requests/s in A, {rate.b:.3g} in B): compare latencies at equal achieved "
        "rates, or rates at equal latency."
    )
