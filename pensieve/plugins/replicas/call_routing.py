"""What a call says to the router of replicas, what that knows of each of them, and which run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CallRouting:
    """What the router reads of a call, its first argument. family: the conversation, or the one that it was forked from, so
    that both are served by one replica. to: a replica by its id, whatever the router would choose. home: the replica of the
    conversation's last turn, and held_tokens what it may hold of it."""

    family: str = ""
    turn: int = 0
    to: str | None = None
    home: str | None = None
    held_tokens: int = 0


@dataclass(slots=True)
class Candidate:
    """A running replica, as routing.Known. number: its place among them, kept while it runs."""

    replica: Any
    number: int
    in_flight: int
    held: int

    def held_tokens(self, _: str) -> int:
        return self.held


def numbers_of(before: Mapping[Any, int], replicas: Iterable[Any]) -> dict[Any, int]:
    """A number for each replica, by its id: those that were there before keep theirs, a new one takes the lowest that is
    free. So a replica that replaces a dead one gets the conversations that hash to it, and no others move."""
    there = list(replicas)
    numbers = {one: before[one] for one in there if one in before}
    free = iter(sorted(set(range(len(there) + len(numbers))) - set(numbers.values())))
    for one in there:
        if one not in numbers:
            numbers[one] = next(free)
    return numbers


class Knowing(Protocol):
    """Who knows which replicas run, by their ids; any thread may ask."""

    @property
    def up(self) -> list[str]: ...


_HERE: dict[str, Knowing] = {}


def register(application: str, router: Knowing) -> None:
    """It routes the calls that this process makes to the application's replicas."""
    _HERE[application] = router


def unregister(application: str) -> None:
    _HERE.pop(application, None)


def running(application: str) -> list[str]:
    """The ids of its replicas; none before the first call of this process."""
    router = _HERE.get(application)
    return [] if router is None else router.up
