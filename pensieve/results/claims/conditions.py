"""Conditions of a claim, and in what a sweep's trials do not meet them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ConfigDict

from pensieve.results.schema import Trial

Values = tuple[str | float | bool | None, ...]


class Limits(BaseModel):
    """A condition on a number. unset: a field without a value meets it too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_least: float | None = None
    at_most: float | None = None
    unset: bool = False


def differences(conditions: Mapping[str, Values | Limits], trials: Sequence[Trial]) -> list[str]:
    """A clause for each condition that one of the trials does not meet. Fields are columns, or dotted configuration."""
    found = []
    for field, wanted in conditions.items():
        values = [_of(trial, field) for trial in trials]
        strange = list(dict.fromkeys(_shown(value) for value in values if not _meets(value, wanted)))
        if strange:
            found.append(f"{field} is {', '.join(strange)} here, claimed for {_wanted(wanted)}")
    return found


def _of(trial: Trial, field: str) -> Any:
    if field in Trial.__table__.columns:
        return getattr(trial, field)
    value: Any = {**(trial.config or {}), "flags": trial.flags or {}}
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _meets(value: Any, wanted: Sequence[Any] | Limits) -> bool:
    if isinstance(wanted, Limits):
        if value is None:
            return wanted.unset
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (wanted.at_least is None or value >= wanted.at_least) and (
            wanted.at_most is None or value <= wanted.at_most
        )
    return any(
        fnmatchcase(str(value), one) if isinstance(one, str) else value == one and (value is None) == (one is None)
        for one in wanted
    )


def _wanted(wanted: Sequence[Any] | Limits) -> str:
    if not isinstance(wanted, Limits):
        return " or ".join(_shown(value) for value in wanted)
    ends = [("at least", wanted.at_least), ("at most", wanted.at_most)]
    said = " and ".join(f"{word} {_shown(value)}" for word, value in ends if value is not None)
    return f"{said} or not set" if wanted.unset else said


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
