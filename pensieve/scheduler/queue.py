"""Requests that wait: first come, first served, the turns of one conversation in order."""

from __future__ import annotations

import heapq
from collections import deque

from pensieve.scheduler.sequence import Sequence


class WaitingQueue:
    """In the order of arrival. Nobody overtakes a deferred head; only a request whose conversation is still busy with an
    earlier one is passed over: it is parked, and gets the place of its own arrival when that one ends.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[int, Sequence]] = []
        self._parked: dict[str, deque[Sequence]] = {}
        self._busy: set[str] = set()
        self._gone: set[int] = set()
        self._size = 0

    def __len__(self) -> int:
        """All that wait, parked ones included."""
        return self._size

    def push(self, sequence: Sequence) -> None:
        self._size += 1
        name = sequence.session.name
        if name in self._busy:
            self._parked.setdefault(name, deque()).append(sequence)
        else:
            self._busy.add(name)
            heapq.heappush(self._ready, (sequence.arrival, sequence))

    def push_back(self, sequence: Sequence) -> None:
        """A preempted request: its conversation is busy with it already."""
        self._size += 1
        heapq.heappush(self._ready, (sequence.arrival, sequence))

    def head(self) -> Sequence | None:
        while self._ready and self._ready[0][0] in self._gone:
            self._gone.discard(heapq.heappop(self._ready)[0])
        return self._ready[0][1] if self._ready else None

    def pop(self) -> Sequence:
        head = self.head()
        assert head is not None
        heapq.heappop(self._ready)
        self._size -= 1
        return head

    def ended(self, session: str) -> None:
        """The conversation's current request is over: the next parked one, if any, becomes ready."""
        parked = self._parked.get(session)
        if not parked:
            self._busy.discard(session)
            return
        following = parked.popleft()
        if not parked:
            del self._parked[session]
        heapq.heappush(self._ready, (following.arrival, following))

    def remove(self, sequence: Sequence) -> None:
        """Cancelled while it waited. If its conversation was busy with it, the next one becomes ready."""
        self._size -= 1
        name = sequence.session.name
        parked = self._parked.get(name)
        if parked and sequence in parked:
            parked.remove(sequence)
            if not parked:
                del self._parked[name]
            return
        self._gone.add(sequence.arrival)
        self.ended(name)
