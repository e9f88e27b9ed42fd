"""What a sweep shows: its trials in groups that differ in nothing else, and their turns as one pandas frame.

How two frames are paired: turn by turn, then by conversation; the ratio of their first tokens, and what two eviction policies
find. Of trials beside each other: fields by name, the axes that vary, why some must not be compared, what served them.

pandas is imported when a frame is made: the import takes a second.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import BigInteger, Float, Integer, Row

from pensieve.lab.metrics import STATUSES, MetricValue
from pensieve.lab.results.identity import NOT_CONFIG, outside_names
from pensieve.lab.results.schema import Sweep, Trial, turn_table
from pensieve.lab.results.store import TURN_COLUMNS, JobResult, ResultsStore
from pensieve.lab.statistics import REAL, Estimate, paired_ratio
from pensieve.serve.books.holding import TIERS
from pensieve.serve.record import is_measured
from pensieve.units import in_order

if TYPE_CHECKING:
    import pandas as pd

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


def measured_turns(store: ResultsStore, trial_id: int, *columns: str) -> list[Row[Any]]:
    """The turns that count: measured (no warm-up), and completed. Rows have the columns as attributes, without names all."""
    chosen = dict.fromkeys(("phase", "status", *columns)) if columns else ()
    return [t for t in store.turns_of(trial_id, *chosen) if t.status == "completed" and is_measured(t.phase)]


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


_MADE = {
    "normalized_latency_ms": "latency_ms / output_tokens",
    "wire_bytes_per_token": "(sent_bytes + received_bytes) / output_tokens",
}
"""Of several columns, of turns with output tokens."""


def values_of(turns: pd.DataFrame, column: str) -> pd.Series[float]:
    """The known values of a column, or of one of _MADE."""
    if column in _MADE:
        made = cast("pd.Series[Any]", turns[turns["output_tokens"] > 0].eval(_MADE[column]))
    else:
        made = turns[column] if column in turns else turns.iloc[:0, 0]
    return made.dropna().astype("float64")


def paired(a: pd.Series[float], b: pd.Series[float]) -> pd.DataFrame:
    """Columns a and b: the values of the turns that both have, in order of their keys."""
    import pandas as pd

    return pd.concat([a.rename("a"), b.rename("b")], axis=1, join="inner").sort_index()


def by_conversation(values: pd.Series[float], level: str = "session") -> ByConversation:
    """The known values. level: of what the key names beside the repeat."""
    known, found = values.dropna(), ByConversation()
    of_key = [KEY.index(name) for name in ("seed", level, "repeat")]
    for place, value in zip(known.index.to_list(), known.to_list(), strict=True):
        seed, name, repeat = (place[at] for at in of_key)
        found.setdefault((seed, f"{name}/{repeat}"), []).append(value)
    return found


def by_round(values: pd.Series[float]) -> dict[tuple[int, str], float]:
    """The mean of each round of probes, by (seed, "iteration/repeat")."""
    return {key: fmean(own) for key, own in by_conversation(values, "iteration").items()}


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


def seed_means(values: Mapping[tuple[int, Any], float]) -> dict[int, float]:
    """The mean over what each seed has."""
    found: dict[int, list[float]] = defaultdict(list)
    for (seed, _), value in values.items():
        found[seed].append(value)
    return {seed: fmean(own) for seed, own in found.items()}


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
    """The trials that a sweep shows, in panels of cells, and their turns, which are read once for each trial.

    sweep: its id, or one made of several. columns: of the turns, without names all of them. also: further sweeps, whose
    trials count as this one's. wanted: only these baselines, in this order.
    """

    def __init__(
        self,
        store: ResultsStore,
        sweep: Sweep | int,
        *columns: str,
        also: Sequence[int] = (),
        wanted: Sequence[str] = (),
    ) -> None:
        self.store, self.wanted, self._columns = store, wanted, columns
        self.sweep = store.sweep(sweep) if isinstance(sweep, int) else sweep
        jobs = [job for one in (self.sweep.id, *also) for job in store.trials_of_sweep(one)]
        self.jobs: Sequence[JobResult] = list({job.last.id: job for job in jobs}.values()) if also else jobs
        self._metrics = {job.trial.id: job.metrics for job in self.jobs if job.trial is not None}
        self._turns: dict[tuple[int, bool], pd.DataFrame] = {}

    def baselines(self) -> list[str]:
        """As wanted, else all that the sweep has begun."""
        return list(self.wanted) or list(dict.fromkeys(job.last.baseline for job in self.jobs))

    @property
    def trials(self) -> Sequence[Trial]:
        """That have completed, in order of id."""
        found = {job.trial.id: job.trial for job in self.jobs if job.trial is not None}
        names = self.baselines()
        return [found[key] for key in sorted(found) if found[key].baseline in names]

    def panels(self, *along: str) -> Sequence[Panel]:
        """A panel for each combination of the swept axes but seed, repeat, baseline and those `along` which its cells lie.

        An axis is a group (cache, eviction, ...) or a dotted field (workload.request_rate). A panel has a cell for each
        baseline and place; a cell without a completed trial is left out, and named.
        """
        names = self.baselines()
        every = [job.trial or job.last for job in self.jobs if job.last.baseline in names]
        every.sort(key=lambda trial: names.index(trial.baseline))
        axes = [axis for axis in varying_axes(self.sweep.overrides, every) if axis not in along]
        found: dict[tuple[str, ...], dict[tuple[str, ...], list[Trial]]] = {}
        for trial in every:
            group, at = (tuple(axis_value(trial, axis) for axis in some) for some in (axes, along))
            cell = found.setdefault(group, {}).setdefault((trial.baseline, *at), [])
            cell += [trial] if trial.status == "completed" else []
        panels = []
        for group, own in found.items():
            cells = [Cell(name, dict(zip(along, at, strict=True)), trials) for (name, *at), trials in own.items()]
            gone = [f"{one.baseline}{f' ({_in_words(one.at)})' if one.at else ''}" for one in cells if not one.trials]
            if done := [one for one in cells if one.trials]:
                panels.append(Panel(dict(zip(axes, group, strict=True)), done, gone))
        return panels

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

    def recorded(self, trial: Trial) -> Mapping[tuple[str, str], MetricValue]:
        """All of its metrics, by (name, label)."""
        return self._metrics[trial.id]

    def metric(self, trial: Trial, name: str, label: str = "") -> float | None:
        found = self._metrics[trial.id].get((name, label))
        return found.value if found else None

    def metrics(self, trials: Iterable[Trial], name: str, label: str = "") -> dict[tuple[int, int], float]:
        """(seed, repeat) -> value, of the trials that have one; they differ in nothing else."""
        found = {(trial.seed, trial.repeat): self.metric(trial, name, label) for trial in trials}
        return {key: value for key, value in found.items() if value is not None}

    def mean(self, trials: Iterable[Trial], name: str) -> float | None:
        """Of a metric, over the trials that have it."""
        values = [value for trial in trials if (value := self.metric(trial, name)) is not None]
        return fmean(values) if values else None

    def by_seed(self, trials: Iterable[Trial], name: str) -> dict[int, float]:
        """The mean of a metric over the trials of each seed."""
        return seed_means(self.metrics(trials, name))

    def completed_turns(self, trials: Iterable[Trial]) -> int:
        return sum(int(self.metric(trial, "turns", "completed") or 0) for trial in trials)

    def incomplete(self, trials: Sequence[Trial]) -> Counter[str]:
        """How many turns of these trials timed out, failed, were refused or cancelled, by status."""
        lost = (name for name in STATUSES if name != "completed")
        return +Counter({name: sum(int(self.metric(trial, "turns", name) or 0) for trial in trials) for name in lost})

    def mostly_lost(self, panel: Panel) -> dict[str, tuple[int, int]]:
        """The baselines that completed under half of their turns: how many, of how many. Those few had the machine to
        themselves, so they are compared with nothing."""
        done = {name: self.completed_turns(trials) for name, trials in panel.trials.items()}
        asked = {name: done[name] + self.incomplete(trials).total() for name, trials in panel.trials.items()}
        return {name: (done[name], asked[name]) for name in done if 2 * done[name] < asked[name]}


@dataclass(frozen=True, slots=True)
class Cell:
    """The completed trials of one baseline at one place of the axes: they differ in seed and repeat alone."""

    baseline: str
    at: Mapping[str, str]
    trials: Sequence[Trial]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    @property
    def ids(self) -> str:
        """For the column `trials` of a CSV."""
        return " ".join(str(trial.id) for trial in self.trials)


@dataclass(frozen=True, slots=True)
class Panel:
    """What stands beside each other. group: the swept axes that are the same in all cells, with their values. left_out: the
    cells of which trials began and none has completed, as they are named to people."""

    group: Mapping[str, str]
    cells: Sequence[Cell]
    left_out: Sequence[str] = ()

    @property
    def trials(self) -> dict[str, Sequence[Trial]]:
        """By baseline."""
        return {name: [trial for cell in self.of(name) for trial in cell] for name in self.baselines}

    @property
    def baselines(self) -> list[str]:
        return list(dict.fromkeys(cell.baseline for cell in self.cells))

    def of(self, baseline: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.baseline == baseline]

    def values(self, axis: str) -> list[str]:
        """Of an axis along which its cells lie: numbers in ascending order, names as they were given."""
        return in_order(dict.fromkeys(cell.at[axis] for cell in self.cells))

    @property
    def text(self) -> str:
        return _in_words(self.group)

    def place(self, baseline: str) -> str:
        """Of one of its baselines: "pensieve (eviction=lru)"."""
        return f"{baseline} ({self.text})" if self.group else baseline


def _in_words(at: Mapping[str, str]) -> str:
    return ", ".join(f"{axis}={value}" for axis, value in at.items())


# Eviction policies, least recently used and the offline bound

START = "lru"
"""The policy that closes nothing of the gap; the bound closes all of it."""

PAPERS = "retention_value"
"""The policy of the paper, and the default, which others have to beat."""

GAP_COLUMNS = ("history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens")
"""What it is computed of."""


def found_history(turns: pd.DataFrame, *tiers: str) -> pd.DataFrame:
    """Columns history and hits, in tokens, of the turns that have a history and say what was found of it. tiers: on which it
    was found; by default on all."""
    import pandas as pd

    known = turns[turns["gpu_hit_tokens"].notna() & (turns["history_tokens"] > 0)]
    hits = known[[f"{tier}_hit_tokens" for tier in tiers or TIERS]].fillna(0).sum(axis=1)
    return pd.DataFrame({"history": known["history_tokens"], "hits": hits})


def gap_closed(turns: pd.DataFrame, start: pd.DataFrame, bounds: Mapping[int, float]) -> Estimate | None:
    """(hits - START's hits) / (bound - START's hits), in tokens on all tiers, paired by seed and conversation.

    turns, start: measured turns of the policy and of START, as frame.turn_frame gives them. bounds: bound_hit_rate of START's
    trials by seed. Negative where the policy finds less than START. The bound is of a whole trial, so for the interval each
    conversation has its share of it, by its history. None where START is at the bound, or nothing is known of either.
    """
    known, others = found_history(start), found_history(turns)
    history, before, after = map(conversation_sums, (known["history"], known["hits"], others["hits"]))
    keys = [key for key in before if key in after and key[0] in bounds]
    room = {key: bounds[key[0]] * history[key] - before[key] for key in keys}
    if sum(room.values()) <= 0:
        return None
    return paired_ratio({key: after[key] - before[key] for key in keys}, room, of="means", support=REAL)


def found_more(turns: pd.DataFrame, other: pd.DataFrame) -> Estimate | None:
    """(hits - the other's hits) / history, paired by seed and conversation: by how much of the history one policy finds more
    than another one, or the other one recomputes more; 0.016 is 1.6 percentage points. Over the turns that both measured;
    None where nothing is known of either."""
    both = turns.index.intersection(other.index)
    known, others = found_history(other.loc[both]), found_history(turns.loc[both])
    history, before, after = map(conversation_sums, (known["history"], known["hits"], others["hits"]))
    more = {key: after[key] - before[key] for key in before.keys() & after.keys()}
    return paired_ratio(more, {key: history[key] for key in more}, of="means", support=REAL) if more else None


COLUMNS = frozenset(column.name for column in Trial.__table__.columns)
_OPTIONS = ("model", "cache", "eviction", "scheduler", "workload", "hardware")  # axes that columns hold by name
_OVERLAYS = ("experiment", "replay", "scale")  # axes whose options are laid over the whole configuration
_WITHIN_A_GROUP = ("seed", "repeat", "baseline")


# Fields and axes


def field_of(trial: Trial, name: str) -> Any:
    """A column of table `trial`, else a dotted field of its configuration or flags; None where there is neither."""
    if name in COLUMNS:
        return getattr(trial, name)
    return _at({**(trial.config or {}), "flags": trial.flags or {}}, name)


def text_of(value: Any) -> str:
    """As a person would write it: true, none, 0.25, 3.12e+14."""
    if isinstance(value, float):
        exact = (text for digits in (6, 12, 17) if float(text := f"{value:.{digits}g}") == value)
        return next(exact, str(value))  # nan equals nothing
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field, value) of a configuration; an empty group is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted field, value as text) of a configuration, without the fields that only say where a trial is kept."""
    kept = {key: value for key, value in config.items() if key not in NOT_CONFIG}
    return [(name, text_of(value)) for name, value in leaves(kept) if not isinstance(value, Mapping)]


def differences(trials: Iterable[Trial]) -> set[str]:
    """Dotted fields of the configuration that have more than one value among these trials; seed and repeat aside."""
    found = [dict(flat(trial.config)) for trial in trials]
    names = {name for one in found for name in one} - {"seed", "repeat"}
    return {name for name in names if len({one.get(name, "") for one in found}) > 1}


def varying_axes(overrides: Mapping[str, Any], trials: Sequence[Trial]) -> list[str]:
    """Of the sweep's overrides, those that took more than one value, in the order given (outermost first); seed, repeat
    and baseline, which never tell groups apart, aside. A swept overlay (experiment, replay) is no field of a trial: the
    options that it chose stand for it."""
    axes = [key for key in _of_trials(overrides) if not key.startswith("slo.") and key not in _WITHIN_A_GROUP]
    if any("." not in axis and axis in _OVERLAYS for axis in swept_axes(overrides)):
        axes += [option for option in _OPTIONS if option not in axes]
    return [axis for axis in axes if len({axis_value(trial, axis) for trial in trials}) > 1]


def swept_axes(overrides: Mapping[str, Any]) -> list[str]:
    """The overrides that have several values, in the order given (outermost first), before any trial has run."""
    every = _of_trials(overrides).items()
    return [key for key, value in every if len(listed_values(value) or str(value).split(",")) > 1]


def _of_trials(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Without Hydra's own."""
    named = ((key.lstrip("+"), value) for key, value in overrides.items())
    return {key: value for key, value in named if not key.startswith(("hydra.", "hydra/"))}


def listed_values(value: Any) -> list[str]:
    """The values of an override. An axis is a list; [] where its trials tell: a sweeper chose them, as choice(1,2), or an
    older database has a text with quotes or brackets."""
    if isinstance(value, list):
        return [str(one) for one in value]
    return [] if set(str(value)) & set("'\"[{(") else str(value).split(",")


def axis_value(trial: Trial, axis: str) -> str:
    """What a trial's configuration holds at an override's key: a group's option, or a field."""
    if axis in _OPTIONS:
        return str(getattr(trial, axis))
    value = _at(trial.config, axis.replace("/", "."))
    return str(value.get("name", value)) if isinstance(value, Mapping) else str(value)


def _at(node: Any, name: str) -> Any:
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


# What must not be compared: one rule for figures, claims, comparisons and reports


@dataclass(frozen=True, slots=True)
class Mixture:
    """One reason. what: a noun phrase. remedy: what the reader should do. trials: the ids concerned, empty: all of them."""

    what: str
    remedy: str
    trials: tuple[int, ...] = ()


def mixtures(trials: Sequence[Trial]) -> list[Mixture]:
    """Why times of these trials must not be compared; empty where they may be."""
    found = []
    if len({trial.simulated for trial in trials}) > 1:
        found.append(Mixture("simulated and real trials", "keep to one kind of hardware"))
    if contended := tuple(sorted(trial.id for trial in trials if trial.contended)):
        what = "trials that shared their device with others"
        found.append(Mixture(what, "run them again with trial.exclusive=true", contended))
    if ids := tuple(sorted(trial.id for trial in trials if (trial.flags or {}).get("contaminated"))):
        what = "trials whose engine still held what an earlier run had asked"
        found.append(Mixture(what, "start it anew, or run them with cache_state=salted and another seed", ids))
    if len({trial.weights == "random" for trial in trials if not trial.simulated}) > 1:
        found.append(Mixture("random and trained weights", "give all trials the same model.weights"))
    if any(len(digests) > 1 for digests in _code(trials).values()):
        what = "trials of different versions of the code"
        found.append(Mixture(what, "run the sweep's command again, which redoes the older ones"))
    unlike = sorted({name for names in _forwards(trials).values() if len(names) > 1 for name in names})
    if unlike:
        what = f"trials of one baseline and setting with different forwards ({'; '.join(unlike)})"
        found.append(Mixture(what, "run all of them again with force=true, and hardware.cpu_memory set on a CPU"))
    return found


def _forwards(trials: Sequence[Trial]) -> Mapping[tuple[str, str], set[str]]:
    """What computed the forwards of each baseline and setting, where it was recorded: whether weights are packed without a
    limit of memory depends on what else the machine held."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for trial in trials:
        forward = (trial.engine or {}).get("forward")
        if forward is not None:
            left_out = (*NOT_CONFIG, "seed", "repeat")
            setting = {key: value for key, value in (trial.config or {}).items() if key not in left_out}
            found[trial.baseline, json.dumps(setting, sort_keys=True, default=str)].add(str(forward))
    return found


def _code(trials: Sequence[Trial]) -> Mapping[str, set[str]]:
    """The hashes of the code of trials that use the same: not simulated and real ones, nor other classes outside the package.
    Older trials have one of each file, and are of one version where those that both use are alike."""
    found: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        files = (trial.environment or {}).get("code")
        found["files"].add("each" if files else "all")
        whole = f"{trial.simulated} {sorted(outside_names(trial.config or {}))}"
        for name, digest in (files or {whole: trial.code_hash}).items():
            found[name].add(digest)
    return found


# Which attention and forward served


def footer(trials: Iterable[Trial]) -> list[str]:
    """A sentence for each way in which trials were served; several are told apart by their baselines. Simulated trials and
    engines of others have none."""
    ways: dict[str, dict[str, None]] = {}
    for trial in trials:
        settings = trial.engine or {}
        if not trial.simulated and settings.get("self_check_difference") is not None:
            ways.setdefault(served_by(settings), {})[trial.baseline] = None
    return [f"{', '.join(names)}: {way}" if len(ways) > 1 else way for way, names in ways.items()]


def served_by(settings: Mapping[str, Any]) -> str:
    """settings: as a torch worker reports them."""
    notes = [settings.get(name) for name in ("attention_note", "forward_note")] if settings.get("fell_back") else []
    attention = f"{settings['attention_backend']} {settings.get('attention_version') or ''}".strip()
    way = f"Attention: {attention}; forward: {settings['forward']}; their self-check passed."
    return " ".join([way, *(["Something better did not serve.", *filter(None, notes)] if notes else [])])
