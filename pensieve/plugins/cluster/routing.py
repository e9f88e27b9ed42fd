"""Which replica of a cluster serves a request: one function a policy, over what a router may know of those that are up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve.lab.workload.chance import uniform

MOST_TIMES_MEAN = 1.25
"""Of affinity_bounded: no replica takes more than so many times the mean of requests under way, and one more."""


class Asked(Protocol):
    """What a router reads of a request."""

    @property
    def session(self) -> str: ...

    @property
    def turn(self) -> int: ...


class Known(Protocol):
    """What a router knows of a replica that is up. number: its place in the cluster, which does not change."""

    number: int

    @property
    def in_flight(self) -> int: ...

    def held_tokens(self, session: str) -> int:
        """Tokens of this conversation whose KV it holds."""
        ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas that are up, at least one, and in arrays what routers compare of all of them: with a thousand, asking each
    object at each turn took a tenth of a simulation's time.

    numbers, loads: of each member its number and its requests under way. holding: those that may hold KV of a conversation,
    in the order of the members.
    """

    members: Sequence[Known]
    numbers: NDArray[np.uint64]
    loads: NDArray[np.int64]
    holding: Callable[[str], Iterable[Known]]

    @staticmethod
    def of(members: Sequence[Known]) -> Fleet:
        """These, as they are now."""
        numbers = np.array([one.number for one in members], np.uint64)
        return Fleet(members, numbers, np.array([one.in_flight for one in members]), lambda session: members)

    def limit(self) -> float:
        """Fewer requests under way than this, and a router of bounded load may choose it."""
        return MOST_TIMES_MEAN * int(self.loads.sum()) / len(self.members) + 1


Router = Callable[[Asked, Fleet, int], Known]
"""From a request, the replicas that are up, and the trial's seed."""


def random(request: Asked, fleet: Fleet, seed: int) -> Known:
    """Any of them, anew for each turn."""
    return fleet.members[_any(request, len(fleet.members), seed)]


def least_loaded(request: Asked, fleet: Fleet, seed: int) -> Known:
    """The one with the fewest requests under way; of several, any."""
    fewest = np.flatnonzero(fleet.loads == fleet.loads.min())
    return fleet.members[int(fewest[_any(request, len(fewest), seed)])]


def affinity(request: Asked, fleet: Fleet, seed: int) -> Known:
    """The same one for every turn of a conversation, without a table: the highest of a hash of both names (rendezvous
    hashing). When a replica leaves, only its own conversations move."""
    return fleet.members[int(_scores(request, fleet.numbers).argmax())]


def affinity_bounded(request: Asked, fleet: Fleet, seed: int) -> Known:
    """affinity, but past those that have more than MOST_TIMES_MEAN of the mean load (consistent hashing with bounded
    loads: Mirrokni, Thorup, Zadimoghaddam 2018)."""
    allowed = np.flatnonzero(fleet.loads < fleet.limit())
    return fleet.members[int(allowed[_scores(request, fleet.numbers[allowed]).argmax()])]


def prefix_aware(request: Asked, fleet: Fleet, seed: int) -> Known:
    """The one that holds most of the conversation's KV, unless its load is beyond the bound of affinity_bounded; where none
    holds any, the least loaded."""
    best = max(fleet.holding(request.session), key=lambda one: one.held_tokens(request.session), default=None)
    if best is not None and best.held_tokens(request.session) and best.in_flight < fleet.limit():
        return best
    return least_loaded(request, fleet, seed)


ROUTERS: dict[str, Router] = {
    "affinity": affinity,
    "affinity_bounded": affinity_bounded,
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
    "random": random,
}

LOAD_BLIND = frozenset({affinity, random})
"""Routers that go by the request and by who is up alone."""

_ODD = np.uint64(0x9E3779B97F4A7C15)


def _any(request: Asked, of: int, seed: int) -> int:
    return int(uniform(seed, "route", request.session, request.turn) * of)


def _scores(request: Asked, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    key = int.from_bytes(hashlib.blake2b(request.session.encode(), digest_size=8).digest(), "little")
    return _mixed(numbers * _ODD + np.uint64(key))


def _mixed(many: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The end of splitmix64: each bit of a number changes about half of those of its result."""
    many = (many ^ (many >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    many = (many ^ (many >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return many ^ (many >> np.uint64(31))
