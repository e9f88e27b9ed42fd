"""How far each replica of a cluster may run ahead of the others: as far as nothing can reach it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from pensieve.request import Request
from pensieve.workload.base import Following

NEVER_NS = 2**63 - 1
SLACK_NS = 4
"""Times of a workload are seconds in floating point, and a caller may act so much sooner than it announced."""

Destination = Callable[[str, int], int | None]
"""From a conversation and the number of its turn, the replica that serves it, whatever happens until then; None: any."""


class Outlook:
    """What can reach a replica: a request that was announced, and one that follows what others have under way, no sooner than
    its pause after an end that is still to come. A conservative parallel simulation (Chandy, Misra 1979), on one core.

    What follows a request of its own cannot surprise a replica, which stops at each end.
    """

    def __init__(
        self, replicas: int, destination: Destination, foresee: Callable[[str, int], Following | None]
    ) -> None:
        self._destination, self._foresee = destination, foresee
        self._due: list[list[int]] = [[] for _ in range(replicas)]  # of each replica, heaps of ns
        self._due_anywhere: list[int] = []
        self._pauses: list[dict[int, int]] = [{} for _ in range(replicas)]  # ns, by request that others have under way
        self._reached: dict[int, list[int]] = {}  # by request, those replicas
        self._pauses_anywhere: list[tuple[int, int]] = []  # a heap of ns and request; those that ended are skipped
        self._open: set[int] = set()  # the requests in it that have not ended
        self._now_ns = 0

    def announce(self, at_ns: int, request: Request | None) -> None:
        to = None if request is None else self._destination(request.session, request.turn)
        heapq.heappush(self._due_anywhere if to is None else self._due[to], at_ns)

    def sent(self, request: Request, replica: int) -> None:
        """It is under way there from now on; once more, where it was begun anew."""
        self.ended(request.id)
        following = self._foresee(request.session, request.turn)
        if following is None:
            self._may_reach_any(request.id, 0)
            return
        pause = NEVER_NS if math.isinf(following.pause_s) else math.floor(following.pause_s * 1e9)
        for session, turn in following.turns:
            to = self._destination(session, turn)
            if to is None:
                self._may_reach_any(request.id, pause)
                return
            if to != replica:
                self._pauses[to][request.id] = pause
                self._reached.setdefault(request.id, []).append(to)

    def ended(self, request_id: int) -> None:
        """Its end was told: what follows it is announced."""
        self._open.discard(request_id)
        for replica in self._reached.pop(request_id, ()):
            self._pauses[replica].pop(request_id, None)

    def passed(self, now_ns: int) -> None:
        """What was announced up to now has happened."""
        self._now_ns = now_ns

    def clear_ns(self, replica: int, behind_ns: int) -> int:
        """Nothing reaches the replica before. behind_ns: no replica that computes is earlier than that."""
        anywhere = self._pauses_anywhere
        while anywhere and anywhere[0][1] not in self._open:
            heapq.heappop(anywhere)
        pause = min(self._pauses[replica].values(), default=NEVER_NS)
        pause = min(pause, anywhere[0][0] if anywhere else NEVER_NS)
        due = min(self._next(self._due[replica]), self._next(self._due_anywhere))
        return min(due, behind_ns + pause) - SLACK_NS

    def _may_reach_any(self, request_id: int, pause_ns: int) -> None:
        self._open.add(request_id)
        heapq.heappush(self._pauses_anywhere, (pause_ns, request_id))

    def _next(self, due: list[int]) -> int:
        while due and due[0] <= self._now_ns + SLACK_NS:
            heapq.heappop(due)
        return due[0] if due else NEVER_NS
