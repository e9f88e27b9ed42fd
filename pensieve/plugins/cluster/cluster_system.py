"""Many simulated replicas behind a router, on one virtual clock."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, History, Request
from pensieve.lab.workload.base import Following
from pensieve.plugins.cluster.outlook import NEVER_NS, Outlook
from pensieve.plugins.cluster.routing import LOAD_BLIND, Router, Turn, gauges_together, settings_together
from pensieve.serve.record import Transcripts
from pensieve.serve.systems.base import Capabilities
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.sim.worker import VirtualClock


@dataclass(slots=True)
class Replica:
    """One engine of the cluster, on a clock of its own.

    requests: that it was given, until the cluster tells of their end. computing: those of them that the engine has not
    ended yet.
    """

    number: int
    system: InlineSystem
    requests: dict[int, Request] = field(default_factory=dict)
    computing: set[int] = field(default_factory=set)

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    @property
    def now_ns(self) -> int:
        return self.system.clock.now_ns()

    def held_tokens(self, session: str) -> int:
        places = self.system.places(session)
        return (len(places) - places.count("-")) * self.system.chunk_tokens


class ClusterSystem:
    """A System of engines that share nothing but what was said: the tokens of each conversation, in a log.

    `poll` steps whichever replica is the furthest behind, never beyond the earliest event that somebody outside could react
    to, so nothing reaches a replica in its past. One replica behind a router is the single engine, call for call. A turn
    that is served where its conversation's last one was is sent as it came; elsewhere what was said before counts as
    history (Request.history). What another replica holds of earlier turns stays there until it is evicted, and is a hit
    if the conversation returns.

    Where the caller announces what it will do (base.LooksAhead), a replica runs ahead of the others as far as nothing can
    reach it (outlook.py), in windows as long as a single engine's; what becomes of each request is the same. What all of them
    count and hold together at a moment (counters, gauges) is then read of each at its own time.
    """

    def __init__(self, make: Callable[[], InlineSystem], replicas: int, router: Router, *, seed: int = 0) -> None:
        self.clock: Clock = VirtualClock()
        self.can = Capabilities()
        self._router, self._seed = router, seed
        self._moved: set[int] = set()  # requests under way that were sent elsewhere than the turn before
        self._replicas = [Replica(number, make()) for number in range(replicas)]
        self._sequence = count()
        self._behind: list[tuple[int, int]] = []  # clock and number of replicas that compute; outdated ones are skipped
        self._events: list[tuple[int, int, int, Event]] = []  # ns, replica, sequence
        self._finishes: list[int] = []  # ns: what a caller may react to
        self._said = Transcripts()
        self._home: dict[str, int] = {}  # of each conversation, the replica of its last turn that stands
        self._served: dict[str, set[int]] = {}  # of each conversation, the replicas that were given turns of it
        self._moved_turns = 0
        self._outlook: Outlook | None = None

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        reports = [replica.system.start() for replica in self._replicas]
        return replace(reports[0], settings={**reports[0].settings, **self.settings()})

    def submit(self, request: Request) -> None:
        replica = self._replicas[self._choose(request.session, request.turn)]
        if self._outlook is not None:
            self._outlook.sent(request, replica.number)
        replica.requests[request.id] = request
        sent = self._as_sent(request, replica)
        if not replica.computing:  # its clock stood still meanwhile
            replica.system.poll(self.clock.now_s())
            heapq.heappush(self._behind, (replica.now_ns, replica.number))
        replica.computing.add(sent.id)
        replica.system.submit(sent)
        self._served.setdefault(request.session, set()).add(replica.number)

    def cancel(self, request_id: int, status: str) -> None:
        for replica in self._replicas:
            if request_id in replica.computing:
                replica.system.cancel(request_id, status)

    def poll(self, until_s: float | None) -> list[Event]:
        bound = self._run(NEVER_NS if until_s is None else round(until_s * 1e9))
        if bound == NEVER_NS:
            return []
        told = []
        while self._events and self._events[0][0] <= bound:
            _, number, _, event = heapq.heappop(self._events)
            told.append(event)
            if event.turn is not None:
                request = self._replicas[number].requests.pop(event.request_id)
                self._said.note(request, event.turn)
                if event.turn.stands:
                    self._home[request.session] = number
                self._moved_turns += event.request_id in self._moved
                self._moved.discard(event.request_id)
                if self._outlook is not None:
                    self._outlook.ended(event.request_id)
        self._advance(bound)
        if self._outlook is not None:
            self._outlook.passed(bound)
        return told

    def count_windows(self) -> None:
        """See InlineSystem.count_windows."""
        for replica in self._replicas:
            replica.system.count_windows()

    def look_ahead(self, foresee: Callable[[str, int], Following | None]) -> None:
        """See base.LooksAhead."""
        if len(self._replicas) > 1:
            self._outlook = Outlook(len(self._replicas), self._destination, foresee)

    def announce(self, at_ns: int, request: Request | None) -> None:
        """See base.LooksAhead."""
        if self._outlook is not None:
            self._outlook.announce(at_ns, request)

    def withdraw(self, request_id: int) -> None:
        """See base.LooksAhead."""
        if self._outlook is not None:
            self._outlook.ended(request_id)

    def expect(self, session: str, next_use_s: float | None) -> None:
        if (number := self._home.get(session)) is not None:
            self._replicas[number].system.expect(session, next_use_s)

    def forget(self, session: str | None) -> None:
        for replica in self._replicas:
            replica.system.forget(session)
        self._said.forget(session)
        known: dict[str, Any]
        for known in (self._home, self._served):
            if session is None:
                known.clear()
            else:
                known.pop(session, None)

    def ended(self, session: str) -> None:
        """See base.ForgetsEnded: each replica that has served it gives up what others do not need."""
        for number in self._served.pop(session, ()):
            self._replicas[number].system.ended(session)
        self._said.forget(session)
        self._home.pop(session, None)

    def counters(self) -> dict[str, float]:
        """Sums over the replicas; moved_turns: ended turns that went to another replica than the turn before."""
        found = Counter[str]()
        for replica in self._replicas:
            found.update(replica.system.counters())
        return {"moved_turns": self._moved_turns, **found}

    def gauges(self) -> dict[str, tuple[float, str]]:
        under_way = [one.in_flight for one in self._replicas]
        return {
            **gauges_together(one.system.gauges() for one in self._replicas),
            "fullest_replica": (max(under_way), "requests"),
            "requests_under_way": (sum(under_way), "requests"),
        }

    def settings(self) -> dict[str, Any]:
        return settings_together(self._replicas[0].system.settings(), len(self._replicas))

    def close(self) -> None:
        for replica in self._replicas:
            replica.system.close()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _run(self, until: int) -> int:
        """Run all replicas up to the first finish, or to `until`; returns the time that is now. NEVER_NS: nothing runs."""
        while True:
            bound = min(until, self._finishes[0] if self._finishes else NEVER_NS)
            if self._first_behind() == NEVER_NS == bound:
                return NEVER_NS
            if self._first_behind() >= bound:
                break
            self._step(bound)
        if len(self._replicas) == 1:  # the caller waits for its step, as for a single engine's
            return max(bound, self._replicas[0].now_ns)
        return bound

    def _first_behind(self) -> int:
        while self._behind:
            ns, number = self._behind[0]
            if self._replicas[number].computing and self._replicas[number].now_ns == ns:
                return ns
            heapq.heappop(self._behind)
        return NEVER_NS

    def _step(self, limit: int) -> None:
        """The replica that is the furthest behind, until it is past the next one, something finishes, or `limit`."""
        now, number = heapq.heappop(self._behind)
        replica = self._replicas[number]
        others = self._first_behind()
        limit = max(min(limit, others), now + 1)
        if self._outlook is not None:
            limit = max(limit, self._outlook.clear_ns(number, now))
        for event in replica.system.poll(None if limit == NEVER_NS else limit / 1e9):
            ns = round(event.at_s * 1e9)
            heapq.heappush(self._events, (ns, number, next(self._sequence), event))
            if event.kind == "finished":
                replica.computing.discard(event.request_id)
                heapq.heappush(self._finishes, ns)
        if replica.computing:
            heapq.heappush(self._behind, (replica.now_ns, number))

    def _advance(self, ns: int) -> None:
        clock = self.clock
        assert isinstance(clock, VirtualClock)
        clock.advance_to(ns)
        while self._finishes and self._finishes[0] <= ns:
            heapq.heappop(self._finishes)

    # -- where conversations are --------------------------------------------------------------------------------------

    def _choose(self, session: str, turn: int) -> int:
        """The replica that serves it."""
        return self._router(Turn(session, turn), self._replicas, self._seed).number

    def _destination(self, session: str, turn: int) -> int | None:
        """As outlook.Destination."""
        return self._choose(session, turn) if self._router in LOAD_BLIND else None

    def _as_sent(self, request: Request, replica: Replica) -> Request:
        """What was said before is its history where the conversation's last turn was served elsewhere."""
        if self._home.get(request.session, replica.number) == replica.number:
            return request
        known = self._said.known(request.session, request.prompt)
        if not known:
            return request
        self._moved.add(request.id)
        return request if request.history is not None else replace(request, history=History(known))
