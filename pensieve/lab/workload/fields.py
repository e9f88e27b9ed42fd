"""What the fields of a workload may be. Types are checked where a configuration is read, what they say together here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import WorkloadContext
from pensieve.units import format_bytes

Count = Annotated[int, Field(strict=True, ge=1)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]

TURN_BYTES = 1200
"""Of host memory that a turn takes at least from its request to its record. tests/workload/test_memory.py measures it."""
TOKEN_BYTES = 4
"""Of each token that a conversation remembers."""


def in_order(low: str, low_value: int, high: str, high_value: int | None) -> None:
    """Raise ConfigError where workload.`high` is below workload.`low`."""
    if high_value is not None and high_value < low_value:
        raise ConfigError(
            f"workload.{high}={high_value} is below workload.{low}={low_value}; raise it, or lower the other."
        )


def refuse_untrained(free: bool, context: WorkloadContext) -> None:
    """Raise ConfigError where the model is to end its replies and cannot."""
    if free and context.force_lengths:
        raise ConfigError("workload.free=true needs a trained model; with random weights leave it false.")


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
