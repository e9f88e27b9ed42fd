"""What a request just got."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Event(NamedTuple):
    """A tuple, since there is one for each token. at_s: seconds of the system's clock. turn: set on `finished` only, the
    TurnRecord that whoever keeps the books has made of the request. tokens: how many; more than one, of which only the
    number is told, where whoever polls has asked for no more (Engine.counts_windows), and at_s is then that of the last of
    them."""

    kind: Literal["first_token", "token", "finished"]
    request_id: int
    at_s: float
    token: int | None = None
    turn: Any = None
    tokens: int = 1
