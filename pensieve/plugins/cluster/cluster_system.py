"""Many simulated replicas behind a router, on one virtual clock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, History, Request
from pensieve.lab.workload.base import Following
from pensieve.plugins.cluster.migration import KvTransfer, Migration, lacking, receive
from pensieve.plugins.cluster.outlook import NEVER_NS, Outlook
from pensieve.plugins.cluster.routing import LOAD_BLIND, Asked, Router
from pensieve.serve.record import Transcripts, TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.sim.worker import VirtualClock

COUNTED = ("moved_turns", "migrated_turns")
"""Counts of the cluster itself: 0 where there was none."""


class Turn(NamedTuple):
    """What a router reads of a request that is still to come."""

    session: str
    turn: int


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

    def __init__(
        self,
        make: Callable[[], InlineSystem],
        replicas: int,
        router: Router,
        *,
        seed: int = 0,
        migration: Migration | None = None,
    ) -> None:
        """migration: of the KV of conversations that are served elsewhere than before; None: it is computed again."""
        self.clock: Clock = VirtualClock()
        self.can = Capabilities()
        self._router, self._seed = router, seed
        self._migration = migration
        self._on_the_way: list[tuple[int, int, Request, KvTransfer]] = []  # ns, sequence
        self._received: Counter[int] = Counter()  # tokens whose KV has arrived, by request
        self._moved: set[int] = set()  # requests under way that were sent elsewhere than the turn before
        self._replicas = [Replica(number, make()) for number in range(replicas)]
        self._sequence = count()
        self._behind: list[tuple[int, int]] = []  # clock and number of replicas that compute; outdated ones are skipped
        self._events: list[tuple[int, int, int, Event]] = []  # ns, replica, sequence
        self._finishes: list[int] = []  # ns: what a caller may react to
        self._said = Transcripts()
        self._home: dict[str, int] = {}  # of each conversation, the replica of its last turn that stands
        self._served: dict[str, set[int]] = {}  # of each conversation, the replicas that were given turns of it
        self._counted: Counter[str] = Counter()  # of the cluster itself
        self._outlook: Outlook | None = None

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        reports = [replica.system.start() for replica in self._replicas]
        return replace(reports[0], settings={**reports[0].settings, **self.settings()})

    def submit(self, request: Request) -> None:
        now = self.clock.now_ns()
        replica = self._replicas[self._choose(request)]
        if self._outlook is not None:
            self._outlook.sent(request, replica.number)
        replica.requests[request.id] = request
        sent = self._as_sent(request, replica)
        transfer = self._transfer(request, replica, now) if request.id in self._moved else None
        if transfer is None:
            self._hand_over(sent, replica, now)
        else:
            heapq.heappush(self._on_the_way, (transfer.arrives_ns, next(self._sequence), sent, transfer))
        self._served.setdefault(request.session, set()).add(replica.number)

    def cancel(self, request_id: int, status: str) -> None:
        for way in [way for way in self._on_the_way if way[2].id == request_id]:  # it waits for KV, which never arrives
            self._on_the_way.remove(way)
            heapq.heapify(self._on_the_way)
            self._hand_over(way[2], self._replicas[way[3].target], self.clock.now_ns())
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
                self._count(event.request_id, event.turn)
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
        """Sums over the replicas; moved_turns: ended turns that went to another replica than the turn before. Of KV that has
        arrived with a conversation: sent_tokens and sent_bytes, migrated_turns, the ended turns it came for, and
        migrated_tokens, for which the CPU tier there had room."""
        found = Counter(dict.fromkeys(COUNTED, 0))
        found.update(self._counted)
        for replica in self._replicas:
            found.update(replica.system.counters())
        return dict(found)

    def gauges(self) -> dict[str, tuple[float, str]]:
        found: dict[str, tuple[float, str]] = {}
        for replica in self._replicas:
            for name, (value, unit) in replica.system.gauges().items():
                found[name] = (found.get(name, (0.0, unit))[0] + value, unit)
        under_way = [one.in_flight for one in self._replicas]
        return {
            **found,
            "fullest_replica": (max(under_way), "requests"),
            "requests_under_way": (sum(under_way), "requests"),
        }

    def settings(self) -> dict[str, Any]:
        one, number = self._replicas[0].system.settings(), len(self._replicas)
        sums = {
            name: one[name] * number for name in ("gpu_tokens", "cpu_tokens", "disk_tokens", "gpu_bytes", "cpu_bytes")
        }
        return {**one, **sums, "replicas": number}

    def close(self) -> None:
        for replica in self._replicas:
            replica.system.close()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _run(self, until: int) -> int:
        """Run all replicas up to the first finish, or to `until`; returns the time that is now. NEVER_NS: nothing runs."""
        while True:
            bound = min(until, self._finishes[0] if self._finishes else NEVER_NS)
            arrives = self._next_arrival
            limit = min(bound, arrives)
            if self._first_behind() == NEVER_NS == limit:
                return NEVER_NS
            if self._first_behind() < limit:
                self._step(limit)
            elif arrives < bound:
                self._deliver(*heapq.heappop(self._on_the_way))
            else:
                break
        if len(self._replicas) == 1:  # the caller waits for its step, as for a single engine's
            return max(bound, self._replicas[0].now_ns)
        return bound

    @property
    def _next_arrival(self) -> int:
        """Of KV."""
        return self._on_the_way[0][0] if self._on_the_way else NEVER_NS

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
            clear = self._outlook.clear_ns(number, now)
            limit = max(limit, min(clear, self._next_arrival))
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

    def _hand_over(self, sent: Request, replica: Replica, now: int) -> None:
        """The engine has it from now on."""
        self._wake(replica, now)
        replica.computing.add(sent.id)
        replica.system.submit(sent)

    def _deliver(self, ns: int, order: int, sent: Request, transfer: KvTransfer) -> None:
        """KV has arrived, and the request that waited for it goes on."""
        self._advance(ns)
        replica = self._replicas[transfer.target]
        self._wake(replica, ns)
        taken = receive(replica.system.engine, sent.session, sent.tenant, transfer.tokens, transfer.lengths)
        self._received[sent.id] += transfer.count
        self._counted.update(
            {"migrated_tokens": taken, "sent_tokens": transfer.count, "sent_bytes": self._bytes(transfer.count)}
        )
        self._hand_over(sent, replica, ns)

    def _wake(self, replica: Replica, now: int) -> None:
        """The clock of a replica that computes nothing stood still meanwhile."""
        if not replica.computing:
            replica.system.poll(now / 1e9)
            heapq.heappush(self._behind, (replica.now_ns, replica.number))

    # -- where conversations are --------------------------------------------------------------------------------------

    def _choose(self, request: Asked) -> int:
        """The replica that serves it."""
        return self._router(request, self._replicas, self._seed).number

    def _destination(self, session: str, turn: int) -> int | None:
        """As outlook.Destination."""
        foreseen = self._router in LOAD_BLIND and self._migration is None
        return self._choose(Turn(session, turn)) if foreseen else None

    def _as_sent(self, request: Request, replica: Replica) -> Request:
        """What was said before is its history where the conversation's last turn was served elsewhere."""
        if self._home.get(request.session, replica.number) == replica.number:
            return request
        known = self._said.of(request.session).known(request.prompt)
        if not known:
            return request
        self._moved.add(request.id)
        return request if request.history is not None else replace(request, history=History(known))

    def _transfer(self, request: Request, replica: Replica, now: int) -> KvTransfer | None:
        """The KV that goes along to a replica that has not got it, where it is worth that."""
        number = self._home.get(request.session, replica.number)
        source = self._replicas[number]
        if self._migration is None or source is replica:
            return None
        held, there = (one.system.engine.cache.sessions.get(request.session) for one in (source, replica))
        if held is None or any(one is not None and (one.running or one.waiting) for one in (held, there)):
            return None
        size, known = replica.system.chunk_tokens, self._said.of(request.session).known(request.prompt)
        tokens = request.prompt[: known + 1]  # the last one is computed there
        return self._migration.transfer(
            tokens, lacking(held, there, tokens, size), replica.system.cost, chunk_tokens=size,
            bytes_per_token=self._bytes(1), source=number, target=replica.number, now_ns=now,
        )  # fmt: skip

    def _bytes(self, tokens: int) -> int:
        """Of the KV of so many tokens."""
        system = self._replicas[0].system
        return tokens * (system.block_bytes // system.chunk_tokens)

    def _count(self, request_id: int, turn: TurnRecord) -> None:
        """It has ended."""
        self._counted["moved_turns"] += request_id in self._moved
        self._moved.discard(request_id)
        if self._migration is not None:
            tokens = self._received.pop(request_id, 0)
            self._counted["migrated_turns"] += tokens > 0
            turn.received(self._bytes(tokens))
