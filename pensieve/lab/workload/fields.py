"""The fields of a workload, checked: one sentence that names the field."""

from __future__ import annotations

import math
from typing import Any

from pensieve.errors import ConfigError
from pensieve.units import format_bytes

TURN_BYTES = 1200
"""Of host memory that a turn takes at least from its request to its record. tests/workload/test_memory.py measures it."""
TOKEN_BYTES = 4
"""Of each token that a conversation remembers."""


def at_least(name: str, value: Any, low: float, *, whole: bool = False, than: str = "") -> None:
    """Raise ConfigError unless workload.`name` is a finite number of at least `low` (which is workload.`than`, if given)."""
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value < math.inf:
        bound = f"workload.{than} ({low})" if than else f"{low}"
        raise ConfigError(f"workload.{name}={value} must be a {'whole ' if whole else ''}number of at least {bound}.")


def positive_seconds(name: str, value: float | None) -> None:
    """Raise ConfigError unless workload.`name` is null or a positive number of seconds."""
    if value is not None and (isinstance(value, bool) or not value > 0):
        raise ConfigError(f"workload.{name}={value} is not a positive number of seconds; null waits forever.")


def within_memory(name: str, count: float, turns: float, tokens: float, memory_bytes: int | None) -> None:
    """Raise ConfigError where so many conversations, of so many turns and tokens each, need more than `memory_bytes`.

    name: the field that asks for them. memory_bytes: what is free; None: not known, and so not checked.
    """
    each = turns * TURN_BYTES + tokens * TOKEN_BYTES
    if memory_bytes is None or count * each <= memory_bytes:
        return
    raise ConfigError(
        f"workload.{name} asks for {count:,.0f} conversations of some {turns:.0f} turns, which take at least "
        f"{format_bytes(count * each)} of memory, and {format_bytes(memory_bytes)} are free; {memory_bytes / each:,.0f} "
        "would fit."
    )
