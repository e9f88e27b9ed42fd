"""What a client says of when its conversation will return: Hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pensieve.errors import ConfigError

StopReason = Literal["tool_use", "end_turn"]
LONGEST_S = 1e9  # 30 years; policies reckon with it in floats


@dataclass(frozen=True, slots=True)
class Hint:
    """Of the time between the end of a reply and the next request of its conversation; None: nothing is said.

    stop_reason: how the reply ended: the model called a tool and waits for the result, or it is the person's turn.
    tool: which one. expected_s: seconds that the client expects to pass. keep_s: seconds after which it no longer asks for
    the conversation to be kept (`keep_alive` of the API). Nobody says what only a schedule can know.
    """

    stop_reason: StopReason | None = None
    tool: str | None = None
    expected_s: float | None = None
    keep_s: float | None = None

    def __post_init__(self) -> None:
        if self.stop_reason is not None and self.stop_reason not in get_args(StopReason):
            raise ConfigError(f"stop_reason is one of {', '.join(get_args(StopReason))}, not {self.stop_reason!r}.")
        if self.tool is not None and (not isinstance(self.tool, str) or not self.tool):
            raise ConfigError(f"tool is the name of a tool, not {self.tool!r}.")
        for name in ("expected_s", "keep_s"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S
            ):
                raise ConfigError(f"{name} is a number of seconds from 0 to {LONGEST_S:.0e}.")
