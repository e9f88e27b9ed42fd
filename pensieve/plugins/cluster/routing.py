"""Which replica of a cluster serves a request: one function a policy, over what a router may know of those that are up."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve.lab.workload.base import uniform

MOST_TIMES_MEAN = 1.25
"""Of prefix_aware: no replica takes more than so many times the mean of requests under way, and one more (bounded loads:
Mirrokni, Thorup, Zadimoghaddam 2018)."""


class Turn(NamedTuple):
    """What a router reads of a request, which may be still to come."""

    session: str
    turn: int


class Known(Protocol):
    """What a router knows of a replica that is up. number: its place in the cluster, which does not change."""

    number: int

    @property
    def in_flight(self) -> int: ...

    def held_tokens(self, session: str) -> int:
        """Tokens of this conversation whose KV it holds."""
        ...


Router = Callable[[Turn, Sequence[Known], int], Known]
"""From a turn, the replicas that are up (at least one, by number), and the trial's seed."""


def random(request: Turn, up: Sequence[Known], seed: int) -> Known:
    """Any of them, anew for each turn."""
    return up[int(uniform(seed, "route", request.session, request.turn) * len(up))]


def least_loaded(request: Turn, up: Sequence[Known], seed: int) -> Known:
    """The one with the fewest requests under way; of several, any."""
    loads = [one.in_flight for one in up]
    fewest = min(loads)
    return random(request, [one for one, load in zip(up, loads, strict=True) if load == fewest], seed)


def affinity(request: Turn, up: Sequence[Known], seed: int) -> Known:
    """The same one for every turn of a conversation, without a table: the highest of a hash of both names (rendezvous
    hashing). When a replica leaves, only its own conversations move."""
    key = int.from_bytes(hashlib.blake2b(request.session.encode(), digest_size=8).digest(), "little")
    numbers = np.array([one.number for one in up], np.uint64)
    return up[int(_mixed(numbers * _ODD + np.uint64(key)).argmax())]


def prefix_aware(request: Turn, up: Sequence[Known], seed: int) -> Known:
    """The one that holds most of the conversation's KV, unless its load is beyond the bound; where none holds any, the least
    loaded."""
    held = [one.held_tokens(request.session) for one in up]
    best = up[held.index(max(held))]
    limit = MOST_TIMES_MEAN * sum(one.in_flight for one in up) / len(up) + 1
    return best if any(held) and best.in_flight < limit else least_loaded(request, up, seed)


ROUTERS: dict[str, Router] = {
    "affinity": affinity,
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
    "random": random,
}

LOAD_BLIND = frozenset({affinity, random})
"""Routers that go by the request and by who is up alone."""


def gauges_together(told: Iterable[Mapping[str, tuple[float, str]]]) -> dict[str, tuple[float, str]]:
    """Sums of what replicas hold."""
    found: dict[str, tuple[float, str]] = {}
    for name, (value, unit) in chain.from_iterable(one.items() for one in told):
        found[name] = (found.get(name, (0.0, unit))[0] + value, unit)
    return found


def settings_together(one: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """Those of one replica; tokens and bytes of the tiers are those of all together."""
    summed = ("gpu_tokens", "cpu_tokens", "disk_tokens", "gpu_bytes", "cpu_bytes")
    return {**one, **{name: one[name] * replicas for name in summed}, "replicas": replicas}


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mixed(many: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The end of splitmix64: each bit of a number changes about half of those of its result."""
    many = (many ^ (many >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    many = (many ^ (many >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return many ^ (many >> np.uint64(31))
