"""A trial's fields by name (columns of table `trial`, dotted fields of its configuration), and which ones vary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pensieve.results.schema import Trial

COLUMNS = frozenset(column.name for column in Trial.__table__.columns)
_OPTIONS = ("model", "cache", "eviction", "scheduler", "workload", "hardware")  # axes that columns hold by name
_OVERLAYS = ("experiment", "replay")  # axes whose options are laid over the whole configuration
_WITHIN_A_GROUP = ("seed", "repeat", "baseline")
_RANGE = re.compile(r"\s*(choice|range|interval|glob|shuffle|sort|tag)\(")
_ENCLOSED = re.compile(r"""'(?:\\.|[^'])*'|"(?:\\.|[^"])*"|\[[^\]]*\]|\{[^}]*\}""")
_NOT_MEASURED = ("hydra", "tracking", "trial", "force", "resume")  # how a trial is run and where it is kept


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
    """(dotted field, value) of a configuration, without Hydra's own; an empty group is a value."""
    for key, value in node.items():
        name = f"{above}{key}"
        if name == "hydra":
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted field, value as text) of a configuration, without the fields that only say where a trial is kept."""
    kept = {key: value for key, value in config.items() if key not in _NOT_MEASURED}
    return [(name, text_of(value)) for name, value in leaves(kept) if not isinstance(value, Mapping)]


def differences(trials: Iterable[Trial]) -> set[str]:
    """Dotted fields of the configuration that have more than one value among these trials; seed and repeat aside."""
    found = [dict(flat(trial.config)) for trial in trials]
    names = {name for one in found for name in one} - {"seed", "repeat", "experiment_name"}
    return {name for name in names if len({one.get(name, "") for one in found}) > 1}


def varying_axes(overrides: Mapping[str, Any], trials: Sequence[Trial]) -> list[str]:
    """Of the sweep's overrides, those that took more than one value, in the order given (outermost first); seed, repeat
    and baseline, which never tell groups apart, aside. A swept overlay (experiment, replay) is no field of a trial: the
    options that it chose stand for it."""
    keys = [key.lstrip("+") for key in overrides]
    axes = [key for key in keys if key not in _WITHIN_A_GROUP and key.split(".")[0].split("/")[0] != "hydra"]
    if any("." not in axis and axis in _OVERLAYS for axis in swept_axes(overrides)):
        axes += [option for option in _OPTIONS if option not in axes]
    return [axis for axis in axes if len({axis_value(trial, axis) for trial in trials}) > 1]


def swept_axes(overrides: Mapping[str, Any]) -> list[str]:
    """The overrides that list several values or a range, in the order given (outermost first), before any trial has run."""
    found = {key.lstrip("+"): str(text) for key, text in overrides.items()}
    return [key for key, text in found.items() if key.split(".")[0].split("/")[0] != "hydra" and _lists_values(text)]


def _lists_values(text: str) -> bool:
    """A comma outside of quotes and brackets, or one of Hydra's functions of several values."""
    if _RANGE.match(text):
        return True
    return "," in _ENCLOSED.sub("", text)


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
