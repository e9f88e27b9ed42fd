"""The fields of a workload, checked: one sentence that names the field."""

from __future__ import annotations

from typing import Any

from pensieve.errors import ConfigError


def at_least(name: str, value: Any, low: float, *, whole: bool = False, than: str = "") -> None:
    """Raise ConfigError unless workload.`name` is a number of at least `low` (which is workload.`than`, if given)."""
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= low:
        bound = f"workload.{than} ({low})" if than else f"{low}"
        raise ConfigError(f"workload.{name}={value} must be a {'whole ' if whole else ''}number of at least {bound}.")


def positive_seconds(name: str, value: float | None) -> None:
    """Raise ConfigError unless workload.`name` is null or a positive number of seconds."""
    if value is not None and (isinstance(value, bool) or not value > 0):
        raise ConfigError(f"workload.{name}={value} is not a positive number of seconds; null waits forever.")
