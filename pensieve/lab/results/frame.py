"""What a sweep shows: its trials in groups that differ in nothing else, and their turns as one pandas frame. How two frames
are paired: turn by turn, then by conversation; the ratio of their first tokens, and what two eviction policies find.

pandas is imported when a frame is made: the import takes a second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from sqlalchemy import BigInteger, Float, Integer, Row

from pensieve.core.request import is_measured
from pensieve.lab.metric_registry import REAL
from pensieve.lab.metrics import STATUSES, MetricValue
from pensieve.lab.results.schema import Sweep, Trial, turn_table
from pensieve.lab.results.store import TURN_COLUMNS, JobResult, ResultsStore
from pensieve.lab.results.trials import axis_value, varying_axes
from pensieve.lab.statistics import Estimate, paired_ratio

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

ByConversation = dict[tuple[int, str], list[float]]
"""(seed, "session/repeat") -> values of its turns. An interval counts seeds where there are several, else
conversations."""

KEY = ["seed", "repeat", "session", "turn", "iteration"]
"""The index of a frame: equal in the trials of two baselines of one workload, where they served the same turn."""

CONVERSATION = KEY[:3]

OURS = "pensieve"
REFERENCE = "stateless"
"""What keeps nothing."""

UNEQUAL_RATE = 0.05
"""Rates that differ by more are not equal: latencies beside them are of other loads."""

PROBES = ("hit", "miss")
"""Phases of the queries of a changing prefix."""

_NUMBERS = {
    column.name: "float64"  # what was not counted is NaN
    for column in turn_table.c
    if isinstance(column.type, Integer | BigInteger | Float) and column.name not in KEY
}


def counts(turn: Row[Any]) -> bool:
    """Whether a turn is in the numbers of its trial: measured (no warm-up), and completed."""
    return turn.status == "completed" and is_measured(turn.phase)


def measured_turns(store: ResultsStore, trial_id: int, *columns: str) -> list[Row[Any]]:
    """The turns that count. Rows have the columns as attributes, without names all of them."""
    chosen = dict.fromkeys(("phase", "status", *columns)) if columns else ()
    return [turn for turn in store.turns_of(trial_id, *chosen) if counts(turn)]


def turn_frame(store: ResultsStore, trials: Iterable[Trial], *columns: str, measured: bool = True) -> pd.DataFrame:
    """The turns of the trials, a row each, in order, with these columns (without names all of them); indexed by KEY.

    measured: only the turns that count; False: all. Of two rows with one key, the later one is kept.
    """
    import pandas as pd

    chosen = list(dict.fromkeys((*KEY[2:], "phase", "status", *(columns or TURN_COLUMNS))))
    parts = [
        pd.DataFrame(rows, columns=chosen, dtype=object).assign(seed=trial.seed, repeat=trial.repeat)
        for trial in trials
        if (rows := store.turns_of(trial.id, *chosen))
    ]
    every = pd.concat(parts) if parts else pd.DataFrame(columns=[*chosen, "seed", "repeat"])
    kinds = {name: _NUMBERS[name] for name in chosen if name in _NUMBERS}
    every = every.astype({**kinds, **(dict.fromkeys(("turn", "iteration"), "int64") if parts else {})}).set_index(KEY)
    return measured_of(every) if measured else latest(every)


def measured_of(turns: pd.DataFrame) -> pd.DataFrame:
    """Those that count, each key once."""
    return latest(turns[(turns["status"] == "completed") & turns["phase"].map(is_measured).astype(bool)])


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with each key once."""
    return frame[~frame.index.duplicated(keep="last")]


def values_of(turns: pd.DataFrame, column: str) -> pd.Series[float]:
    """The known values of a column, or of normalized_latency_ms or wire_bytes_per_token, which are made of several."""
    if column == "normalized_latency_ms":
        made = turns["latency_ms"] / _known_output(turns)
    elif column == "wire_bytes_per_token":
        made = (turns["sent_bytes"] + turns["received_bytes"]) / _known_output(turns)
    else:
        made = turns[column] if column in turns else turns.iloc[:0, 0]
    return made.dropna().astype("float64")


def _known_output(turns: pd.DataFrame) -> pd.Series[float]:
    return turns["output_tokens"].where(turns["output_tokens"] > 0)


def paired(a: pd.Series[float], b: pd.Series[float]) -> pd.DataFrame:
    """Columns a and b: the values of the turns that both have, in order of their keys."""
    import pandas as pd

    return pd.concat([a.rename("a"), b.rename("b")], axis=1, join="inner").sort_index()


def grouped(values: pd.Series[float], key: Callable[..., T]) -> dict[T, list[float]]:
    """The known values in lists by key(seed, repeat, session, turn, iteration)."""
    known, found = values.dropna(), dict[T, list[float]]()
    for place, value in zip(known.index.to_list(), known.to_list(), strict=True):
        found.setdefault(key(*place), []).append(value)
    return found


def by_conversation(values: pd.Series[float]) -> ByConversation:
    return grouped(values, lambda seed, repeat, session, *_: (seed, f"{session}/{repeat}"))


def by_round(values: pd.Series[float]) -> dict[tuple[int, str], float]:
    """The mean of each round of probes, by (seed, "iteration/repeat")."""
    rounds = grouped(values, lambda seed, repeat, _session, _turn, iteration: (seed, f"{iteration}/{repeat}"))
    return {key: fmean(own) for key, own in rounds.items()}


def conversation_means(values: pd.Series[float]) -> dict[tuple[int, str], float]:
    return {key: fmean(own) for key, own in by_conversation(values).items()}


def conversation_sums(values: pd.Series[float]) -> dict[tuple[int, str], float]:
    return {key: fsum(own) for key, own in by_conversation(values).items()}


def conversations_of(turns: pd.DataFrame | pd.Series[Any]) -> pd.Index[Any]:
    """Which one each turn belongs to: (seed, repeat, session)."""
    return cast("pd.MultiIndex", turns.index).droplevel(KEY[3:])


def speed_up(pairs: pd.DataFrame) -> Estimate | None:
    """How many times longer a takes than b: geometric mean over conversations of the ratio of their means, which are above
    0; None where no conversation has both."""
    a, b = conversation_means(pairs["a"]), conversation_means(pairs["b"])
    return positive_ratio(a, b)


def positive_ratio(a: Mapping[tuple[int, Any], float], b: Mapping[tuple[int, Any], float]) -> Estimate | None:
    """Geometric mean of the ratios of what both have, above 0; None where that is nothing."""
    both = {key for key in a.keys() & b.keys() if a[key] > 0 and b[key] > 0}
    return paired_ratio({key: a[key] for key in both}, {key: b[key] for key in both}) if both else None


def conversation_ends(pairs: pd.DataFrame, last: bool) -> pd.DataFrame:
    """Return the first or the last turn of each conversation. pairs: sorted."""
    conversations = pairs.groupby(level=CONVERSATION)
    return conversations.tail(1) if last else conversations.head(1)


# The trials of a sweep


class Frame:
    """The trials that a sweep shows: by job, in groups, and their turns, which are read once for each trial.

    sweep: its id, or one made of several. columns: of the turns, without names all of them. also: further sweeps, whose
    trials count as this one's.
    """

    def __init__(self, store: ResultsStore, sweep: Sweep | int, *columns: str, also: Sequence[int] = ()) -> None:
        self.store, self._columns = store, columns
        self.sweep = store.sweep(sweep) if isinstance(sweep, int) else sweep
        jobs = [job for one in (self.sweep.id, *also) for job in store.trials_of_sweep(one)]
        self.jobs: Sequence[JobResult] = list({job.last.id: job for job in jobs}.values()) if also else jobs
        self._metrics = {job.trial.id: job.metrics for job in self.jobs if job.trial is not None}
        self._turns: dict[tuple[int, bool], pd.DataFrame] = {}

    @property
    def trials(self) -> Sequence[Trial]:
        return [job.trial for job in self.jobs if job.trial is not None]

    def turns(self, trials: Iterable[Trial], measured: bool = True) -> pd.DataFrame:
        """As turn_frame gives them; empty without trials."""
        import pandas as pd

        parts = [self.turns_of(trial, measured) for trial in trials]
        return latest(pd.concat(parts)) if parts else turn_frame(self.store, [], *self._columns)

    def turns_of(self, trial: Trial, measured: bool = True) -> pd.DataFrame:
        if (trial.id, measured) not in self._turns:
            every = turn_frame(self.store, [trial], *self._columns, measured=False)
            self._turns |= {(trial.id, False): every, (trial.id, True): measured_of(every)}
        return self._turns[trial.id, measured]

    def metric(self, trial: Trial, name: str, label: str = "") -> float | None:
        found = self._metrics[trial.id].get((name, label))
        return found.value if found else None

    def metrics(self, trials: Iterable[Trial], name: str, label: str = "") -> dict[tuple[int, int], float]:
        """(seed, repeat) -> value, of the trials that have one; they differ in nothing else."""
        found = {(trial.seed, trial.repeat): self.metric(trial, name, label) for trial in trials}
        return {key: value for key, value in found.items() if value is not None}

    def recorded(self, trial: Trial) -> Mapping[tuple[str, str], MetricValue]:
        """All of its metrics, by (name, label)."""
        return self._metrics[trial.id]

    def mean(self, trials: Iterable[Trial], name: str) -> float | None:
        """Of a metric, over the trials that have it."""
        values = [value for trial in trials if (value := self.metric(trial, name)) is not None]
        return fmean(values) if values else None

    def by_seed(self, trials: Iterable[Trial], name: str) -> dict[int, float]:
        """The mean of a metric over the trials of each seed."""
        values: dict[int, list[float]] = defaultdict(list)
        for (seed, _), value in self.metrics(trials, name).items():
            values[seed].append(value)
        return {seed: fmean(own) for seed, own in values.items()}

    def incomplete(self, trials: Sequence[Trial]) -> Counter[str]:
        """How many turns of these trials timed out, failed, were refused or cancelled, by status."""
        lost = (name for name in STATUSES if name != "completed")
        return +Counter({name: sum(int(self.metric(trial, "turns", name) or 0) for trial in trials) for name in lost})

    def mostly_lost(self, group: TrialGroup) -> dict[str, tuple[int, int]]:
        """The baselines that completed under half of their turns: how many, of how many. Those few had the machine to
        themselves, so they are compared with nothing."""
        counts = {}
        for name, trials in group.trials.items():
            done = sum(int(self.metric(trial, "turns", "completed") or 0) for trial in trials)
            asked = done + self.incomplete(trials).total()
            if 2 * done < asked:
                counts[name] = (done, asked)
        return counts

    def groups(self, over: str | None = None) -> Sequence[TrialGroup]:
        """Trials by the values of every axis that the sweep varied, but seed, repeat, baseline and `over`."""
        axes = [axis for axis in varying_axes(self.sweep.overrides, self.trials) if axis != over]
        found: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
        for trial in self.trials:
            place = tuple(axis_value(trial, axis) for axis in axes)
            found.setdefault(place, defaultdict(list))[trial.baseline].append(trial)
        return [TrialGroup(dict(zip(axes, place, strict=True)), dict(trials)) for place, trials in found.items()]


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """at: the values of the sweep's other axes. trials: by baseline."""

    at: Mapping[str, str]
    trials: Mapping[str, Sequence[Trial]]

    @property
    def name(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.at.items())

    def place(self, baseline: str) -> str:
        """Of one of its baselines: "pensieve (eviction=lru)"."""
        return f"{baseline} ({self.name})" if self.name else baseline


# Eviction policies, least recently used and the offline bound

START = "lru"
"""The policy that closes nothing of the gap; the bound closes all of it."""

PAPERS = "retention_value"
"""The policy of the paper, and the default, which others have to beat."""

GAP_COLUMNS = ("history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens")
"""What it is computed of."""


def gap_closed(turns: pd.DataFrame, start: pd.DataFrame, bounds: Mapping[int, float]) -> Estimate | None:
    """(hits - START's hits) / (bound - START's hits), in tokens on all tiers, paired by seed and conversation.

    turns, start: measured turns of the policy and of START, as frame.turn_frame gives them. bounds: bound_hit_rate of START's
    trials by seed. Negative where the policy finds less than START. The bound is of a whole trial, so for the interval each
    conversation has its share of it, by its history. None where START is at the bound, or nothing is known of either.
    """
    before, after = hit_tokens(start), hit_tokens(turns)
    keys = [key for key in before if key in after and key[0] in bounds]
    room = {key: bounds[key[0]] * before[key].history - before[key].hits for key in keys}
    if sum(room.values()) <= 0:
        return None
    return paired_ratio({key: after[key].hits - before[key].hits for key in keys}, room, of="means", support=REAL)


def found_more(turns: pd.DataFrame, other: pd.DataFrame) -> Estimate | None:
    """(hits - the other's hits) / history, paired by seed and conversation: by how much of the history one policy finds more
    than another one, or the other one recomputes more; 0.016 is 1.6 percentage points. Over the turns that both measured;
    None where nothing is known of either."""
    both = turns.index.intersection(other.index)
    before, after = hit_tokens(other.loc[both]), hit_tokens(turns.loc[both])
    keys = before.keys() & after.keys()
    if not keys:
        return None
    history = {key: before[key].history for key in keys}
    return paired_ratio({key: after[key].hits - before[key].hits for key in keys}, history, of="means", support=REAL)


class Found(NamedTuple):
    """Tokens of one conversation's turns."""

    history: float
    hits: float


def hit_tokens(turns: pd.DataFrame) -> dict[tuple[int, str], Found]:
    """By seed and conversation, on all tiers, over its turns with a history."""
    known = turns[turns["gpu_hit_tokens"].notna() & (turns["history_tokens"] > 0)]
    if known.empty:
        return {}
    hits = known["gpu_hit_tokens"] + known[["cpu_hit_tokens", "disk_hit_tokens"]].fillna(0).sum(axis=1)
    history, found = conversation_sums(known["history_tokens"]), conversation_sums(hits)
    return {key: Found(history[key], found[key]) for key in history}
