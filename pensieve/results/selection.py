"""Which trials a few words mean: a sweep, or those whose columns and fields have given values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select

from pensieve.errors import ResultsError
from pensieve.results.schema import Trial, current_trial
from pensieve.results.store import ResultsStore

_COLUMNS = frozenset(column.name for column in Trial.__table__.columns)


def select_trials(store: ResultsStore, words: str) -> list[Trial]:
    """The completed trials that `words` name, in order of id.

    words: a sweep's id, "latest" (sweep), or conditions that all hold, such as
    "sweep=3,baseline=pensieve,workload.users=6": a column of table trial, or a dotted field of the configuration. Of a
    trial that ran several times a sweep counts with what it shows, otherwise the newest completed attempt, and no
    reproduction. Raises ResultsError where nothing is found.
    """
    conditions: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in words.split(","))):
        key, given, value = word.partition("=")
        conditions["sweep" if not given else key.strip()] = key if not given else value.strip()
    sweep = conditions.pop("sweep", None)
    trials = _of_sweep(store, sweep) if sweep is not None else _all(store)
    for key, value in conditions.items():
        known = {_shown(_value(trial, key)) for trial in trials}
        trials = [trial for trial in trials if _shown(_value(trial, key)) == value]
        if not trials:
            there = ", ".join(sorted(known)) or "nothing"
            raise ResultsError(f"No completed trial has {key}={value}; {key} is {there}.")
    if not trials:
        raise ResultsError(f"No completed trial is meant by {words!r}; python runners/run.py -m makes some.")
    return trials


def differences(trials: Iterable[Trial]) -> set[str]:
    """Dotted fields of the configuration that have more than one value among these trials; seed and repeat aside."""
    seen: dict[str, set[str]] = {}
    flats = [dict(flat(trial.config)) for trial in trials]
    keys = {key for one in flats for key in one}
    for one in flats:
        for key in keys:
            seen.setdefault(key, set()).add(one.get(key, ""))
    return {key for key, values in seen.items() if len(values) > 1 and key not in ("seed", "repeat", "experiment_name")}


def flat(node: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """(dotted field, value as text) of a configuration; what only says where a trial is kept is left out."""
    found: list[tuple[str, str]] = []
    for key, value in node.items():
        dotted = f"{above}{key}"
        if dotted in ("hydra", "tracking", "trial", "force", "resume"):
            continue
        found += flat(value, f"{dotted}.") if isinstance(value, Mapping) else [(dotted, _shown(value))]
    return found


def _all(store: ResultsStore) -> list[Trial]:
    with store.database.reading() as connection:
        ids = connection.execute(select(current_trial.c.id).order_by(current_trial.c.id)).scalars().all()
    trials = (store.trial(found) for found in ids)
    return [trial for trial in trials if "reproduces" not in (trial.flags or {})]


def _of_sweep(store: ResultsStore, sweep: str) -> list[Trial]:
    if sweep == "latest":
        latest = store.latest_sweep()
        if latest is None:
            raise ResultsError("There is no sweep yet; python runners/run.py -m makes one.")
        number = latest.id
    elif sweep.isdigit():
        number = store.sweep(int(sweep)).id
    else:
        raise ResultsError(
            f"{sweep!r} is no sweep's id; write a number, latest, or conditions such as baseline=pensieve."
        )
    found = {job.trial.id: job.trial for job in store.trials_of_sweep(number) if job.trial}
    return [found[key] for key in sorted(found)]


def _value(trial: Trial, key: str) -> Any:
    if key in _COLUMNS:
        return getattr(trial, key)
    value: Any = trial.config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
