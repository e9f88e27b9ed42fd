"""How far each replica of a cluster may run ahead of the others: as far as nothing can reach it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from pensieve.core.request import Request
from pensieve.lab.workload.base import Following

NEVER_NS = 2**63 - 1
SLACK_NS = 4
"""Times of a workload are seconds in floating point, and a caller may act so much sooner than it announced."""
LINKS = 1
"""How many turns that follow each other are looked up; what follows those may go to any replica. More of them gain nothing
that shows in the time a turn takes."""

Destination = Callable[[str, int], int | None]
"""From a conversation and the number of its turn, the replica that serves it, whatever happens until then; None: any."""


class Outlook:
    """The earliest time at which a request can reach each replica: one that was announced, one that follows a request which
    was announced or is under way, one that follows that, and so on.

    A request that follows another is sent no sooner than its pause after the other's end, nor before its recorded time where
    it has one, and no turn takes less than no time. So the beginning of a chain plus the pauses along it is a lower bound for
    each of its requests: conservative parallel simulation (Chandy, Misra 1979), on one core. A chain that begins with a
    request under way is counted from the clock of the replica that is furthest behind. A replica needs no bound for what
    follows its own requests, since it stops at each end.
    """

    def __init__(
        self, replicas: int, destination: Destination, foresee: Callable[[str, int], Following | None]
    ) -> None:
        self._destination, self._foresee = destination, foresee
        self._anywhere = replicas  # in each of these lists, what may reach any replica
        self._due: list[list[int]] = [[] for _ in range(replicas + 1)]  # heaps of ns
        self._after_due = [Earliest() for _ in range(replicas + 1)]  # ns, by request that was announced
        self._after_ends = [Earliest() for _ in range(replicas + 1)]  # ns from now on, by request that is under way
        self._not_before = [Earliest() for _ in range(replicas + 1)]  # ns on the clock, by the same
        self._chains: dict[int, dict[int, Bound]] = {}  # by request that has not ended, from its beginning, by place
        self._now_ns = 0

    def announce(self, at_ns: int, request: Request | None) -> None:
        to = None if request is None else self._destination(request.session, request.turn)
        heapq.heappush(self._due[self._anywhere if to is None else to], at_ns)
        if request is None or to is None or request.id in self._chains:
            return  # what follows comes after that; a deadline of what was announced before
        self._chains[request.id] = chain = self._chain(request.session, request.turn)
        for place, bound in chain.items():
            self._after_due[place].put(request.id, max(at_ns + bound.after_ns, bound.not_before_ns))

    def sent(self, request: Request, replica: int) -> None:
        """It is under way there from now on; once more, where it was begun anew."""
        chain = self._chains.get(request.id) or self._chain(request.session, request.turn)
        self.ended(request.id)
        self._chains[request.id] = chain
        for place, bound in chain.items():
            if place != replica:
                self._after_ends[place].put(request.id, bound.after_ns)
                self._not_before[place].put(request.id, bound.not_before_ns)

    def ended(self, request_id: int) -> None:
        """Its end was told: what follows it is announced. Or it is never sent, and nothing follows."""
        for place in self._chains.pop(request_id, ()):
            self._after_due[place].drop(request_id)
            self._after_ends[place].drop(request_id)
            self._not_before[place].drop(request_id)

    def passed(self, now_ns: int) -> None:
        """What was announced up to now has happened."""
        self._now_ns = now_ns

    def clear_ns(self, replica: int, behind_ns: int) -> int:
        """Nothing reaches the replica before. behind_ns: no replica that computes is earlier than that."""
        places = (replica, self._anywhere)
        due = min(self._next(self._due[place]) for place in places)
        after_due = min(self._after_due[place].least() for place in places)
        after_ends = (max(behind_ns + self._after_ends[one].least(), self._not_before[one].least()) for one in places)
        return min(due, after_due, *after_ends) - SLACK_NS

    def _chain(self, session: str, turn: int) -> dict[int, Bound]:
        """By place that turns after this one may reach, when at the earliest."""
        found: dict[int, Bound] = {}
        reached = {(session, turn): Bound(0, 0)}
        for link in range(LINKS + 1):
            before, reached = reached, {}
            for (name, number), begins in before.items():
                following = self._foresee(name, number)
                if following is None:
                    found[self._anywhere] = begins.or_sooner(found.get(self._anywhere))
                elif not math.isinf(following.pause_s):
                    then = Bound(
                        begins.after_ns + math.floor(following.pause_s * 1e9) - SLACK_NS,
                        max(begins.not_before_ns, math.floor(following.not_before_s * 1e9) - SLACK_NS),
                    )
                    for one in following.turns:
                        to = self._destination(*one) if link < LINKS else None
                        place = self._anywhere if to is None else to
                        found[place] = then.or_sooner(found.get(place))
                        if to is not None:  # else what follows it may go there no sooner
                            reached[one] = then.or_sooner(reached.get(one))
        return found

    def _next(self, due: list[int]) -> int:
        while due and due[0] <= self._now_ns + SLACK_NS:
            heapq.heappop(due)
        return due[0] if due else NEVER_NS


class Bound(NamedTuple):
    """No sooner than so long after the beginning of a chain, nor before a time on the clock."""

    after_ns: int
    not_before_ns: int

    def or_sooner(self, other: Bound | None) -> Bound:
        """What holds for either."""
        return self if other is None else Bound(min(self[0], other[0]), min(self[1], other[1]))


class Earliest:
    """The least of values that come and go, one a key."""

    def __init__(self) -> None:
        self._values: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # value, key; those that went are skipped

    def put(self, key: int, value: int) -> None:
        self._values[key] = value
        heapq.heappush(self._heap, (value, key))

    def drop(self, key: int) -> None:
        if self._values.pop(key, None) is not None and len(self._heap) > 2 * len(self._values) + 16:
            self._heap = [(value, key) for key, value in self._values.items()]
            heapq.heapify(self._heap)

    def least(self) -> int:
        """NEVER_NS: there is none."""
        heap = self._heap
        while heap and self._values.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else NEVER_NS
