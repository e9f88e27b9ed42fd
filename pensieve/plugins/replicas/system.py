"""Several engines on Ray, as one system: turns go where their conversation's KV is, and none is lost with a replica."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, History, Request, TokenArray
from pensieve.device.asked import physical_cores
from pensieve.errors import ConfigError, HardwareMissing, WorkerError
from pensieve.lab.compose.build import check_memory
from pensieve.lab.compose.model_files import check_weights
from pensieve.lab.compose.plan import TrialPlan, free_device_bytes, memory_limit_bytes
from pensieve.plugins.cluster.cluster_system import Turn
from pensieve.plugins.cluster.routing import ROUTERS
from pensieve.plugins.replicas.actors import Actors, Replica
from pensieve.plugins.replicas.engine import Described, moved
from pensieve.serve.record import Listener, Transcripts, TurnRecord
from pensieve.serve.systems.base import Capabilities, Outbox, WallClock
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, Answer

ATTEMPTS = 3
"""A turn whose replica ended is asked again elsewhere, up to so many times in all: it may be what ends them."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request on its way.

    told: its tokens so far, of whichever attempt; place: of the next one in this attempt. serves: the replica that has it,
    where its id is `sent`. cut: the status with which somebody has ended it.
    """

    request: Request
    listener: Listener
    told: list[int] = field(default_factory=list)
    place: int = 0
    serves: Replica | None = None
    sent: int = 0
    cut: str | None = None


class ReplicaSystem:
    """Replicas share nothing but what was said, which comes with every request, so one that ends loses KV and no text.

    A turn that was under way there is asked again elsewhere, from its beginning; tokens that were told before are not told
    again. The noise of sampling depends on the position alone, so they are the same ones; should rounding in 16 bits have
    made another of one of them, the turn fails, rather than go on from what nobody was told.

    replicas: not started yet. router: of plugins/cluster/routing.py, under `seed`. connected: as of Actors.start. Any thread
    may call anything here.
    """

    def __init__(
        self, replicas: Actors, router: str, seed: int = 0, connected: Callable[[], object] | None = None
    ) -> None:
        self.clock: Clock = WallClock()
        self.can = Capabilities()
        self.replicas, self._connected = replicas, connected
        self._router, self._seed = router, seed
        self._outbox = Outbox(self.clock, lambda: WorkerError(ENGINE_CLOSED) if self._closed else None)
        self._said = Transcripts()  # of conversations whose requests are submitted
        self._closed = False
        self._lock = threading.Lock()  # of what follows
        self._tickets: dict[int, _Ticket] = {}
        self._home: dict[str, Replica] = {}  # of each conversation, that of its last turn
        self._family: dict[str, str] = {}  # of forks, the conversation that they come from
        self._counted: Counter[str] = Counter()  # by this object
        self._ids = itertools.count(1)

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        """Ray, then the replicas. Raises EngineFailed with the reason of a replica that cannot start."""
        began = time.perf_counter()
        try:
            self._described: Described = self.replicas.start(self._connected)
        except BaseException:
            self.close()
            raise
        report = self._described.report
        warmup_ms = (time.perf_counter() - began - (report.load_s or 0.0)) * 1e3
        return StartReport(report.load_s, warmup_ms, self.settings(), report.eos, sampling=report.sampling)

    def submit(self, request: Request) -> None:
        """What its prompt shares with what was said before is its history, for a replica that serves it anew."""
        self._outbox.expect(request.id)
        known = self._said.of(request.session).known(request.prompt)
        if known and request.history is None:  # by the replica that may serve it now, at the latest
            request = replace(request, history=History(known, "kept"))
        self.begin(request, _ToOutbox(self._outbox, self._said, request))

    def begin(self, request: Request, listener: Listener) -> None:
        ticket = _Ticket(request, listener)
        with self._lock:
            closed = self._closed
            if not closed:
                self._tickets[request.id] = ticket
        if closed:
            listener.failed(WorkerError(ENGINE_CLOSED))
        else:
            self.replicas.soon(self._serve(ticket))

    def cancel(self, request_id: int, status: str) -> None:
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None:
                return
            ticket.cut = ticket.cut or status
        self.replicas.soon(self._cut(ticket))

    def poll(self, until_s: float | None) -> list[Event]:
        return self._outbox.poll(until_s)

    def drive(self, awaited: Future[Any]) -> None:
        wait((awaited,))

    def ask(self, request: Request) -> TurnRecord:
        answer = Answer()
        self.begin(request, answer)
        return answer.future.result()

    def forget(self, session: str | None) -> None:
        if session is not None:
            self.release(session)
            return
        self._said.forget(None)
        with self._lock:
            self._home.clear()
            self._family.clear()
        for replica in self.replicas.up:
            replica.homes.clear()
        self.replicas.now(self.replicas.each("forget"))

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """left: ignored, since a replica's disk ends with it."""
        self._said.forget(session)
        with self._lock:
            if (home := self._home.pop(session, None)) is not None:
                home.homes.pop(session, None)
            self._family.pop(session, None)
        self.replicas.soon(self.replicas.each("release", lambda _: session))

    @property
    def chunk_tokens(self) -> int:
        return self._described.chunk_tokens

    def places(self, session: str) -> str:
        """Where its KV is, in the replica of its last turn; up to PLACES_S old."""
        home = self._home.get(session)
        if home is None or home not in self.replicas.up or (told := self.replicas.reports().get(home)) is None:
            return ""
        return told.places.get(session, "")

    def counters(self) -> dict[str, float]:
        """Sums over the replicas, those that ended included up to when they were asked last; moved_turns: turns that stand,
        served elsewhere than the one before; restarted_requests: asked again since their replica ended."""
        every = self.replicas.reports(fresh=True).values()
        with self._lock:
            found = Counter(self._counted)
        for one in every:
            found.update(one.counters)
        return dict(found)

    def gauges(self) -> dict[str, tuple[float, str]]:
        found: dict[str, tuple[float, str]] = {}
        told = self.replicas.reports()
        running = [told[one] for one in self.replicas.up if one in told]
        for one in running:
            for name, (value, unit) in one.gauges.items():
                found[name] = (found.get(name, (0.0, unit))[0] + value, unit)
        return {**found, "replicas": (len(running), "replicas")}

    def settings(self) -> dict[str, Any]:
        """Of one replica; tokens and bytes of the tiers are those of all together."""
        one, count = self._described.settings, self.replicas.count
        summed = ("gpu_tokens", "cpu_tokens", "disk_tokens", "gpu_bytes", "cpu_bytes")
        return {**one, **{name: one[name] * count for name in summed}, "replicas": count, "router": self._router}

    def close(self) -> None:
        """Requests under way end with WorkerError. Safe after a start that failed, and twice."""
        with self._lock:
            closed, self._closed = self._closed, True
            tickets, self._tickets = list(self._tickets.values()), {}
        if closed:
            return
        for ticket in tickets:
            ticket.listener.failed(WorkerError(ENGINE_CLOSED))
        self.replicas.close()
        self._outbox.put([])

    # -- one turn -----------------------------------------------------------------------------------------------------

    async def _serve(self, ticket: _Ticket) -> None:
        try:
            event = await self._answered(ticket)
        except Exception as error:  # whatever it was, whoever asked must learn of it
            log.error("A turn failed in its replica: %s", type(error).__name__)
            said = f"The replica failed the request ({type(error).__name__})."
            event = _over(ticket, "failed", self.clock.now_s(), said)
        with self._lock:
            if self._tickets.pop(ticket.request.id, None) is None:
                return  # closed: it has been told
        turn = event.turn
        assert turn is not None
        if turn.stands and ticket.serves is not None:
            self._stands(ticket.request, turn, ticket.serves)
        ticket.listener.happened(event)

    async def _answered(self, ticket: _Ticket) -> Event:
        """Its last event, of the first attempt whose replica lives to tell it."""
        import ray

        for _ in range(ATTEMPTS):
            replica = self._chosen(ticket.request, await self.replicas.some_up())
            replica.in_flight += 1
            try:
                return await self._attempt(ticket, replica)
            except ray.exceptions.RayActorError:
                self.replicas.gone(replica)
                with self._lock:
                    self._counted["restarted_requests"] += 1
                ticket.serves, ticket.place = None, 0
                if ticket.cut is not None:
                    return _over(ticket, ticket.cut, self.clock.now_s())
            finally:
                replica.in_flight -= 1
        said = f"{ATTEMPTS} replicas ended while they served this request, so it is not tried again."
        return _over(ticket, "failed", self.clock.now_s(), said)

    async def _attempt(self, ticket: _Ticket, replica: Replica) -> Event:
        request, origin_s = ticket.request, self._origin_s
        asked = replace(self._as_sent(request, replica), id=next(self._ids), intended_s=request.intended_s + origin_s)
        async for promised in replica.actor.answer.options(num_returns="streaming").remote(asked):
            part: list[Event] = await promised
            if not part:
                ticket.serves, ticket.sent = replica, asked.id
                if ticket.cut is not None:
                    await self._cut(ticket)
            for event in part:
                told: Event = event._replace(request_id=request.id, at_s=event.at_s - origin_s)
                if event.turn is not None:
                    moved(event.turn, -origin_s)
                    event.turn.request_id = request.id
                    return told
                assert event.token is not None
                ticket.place += 1
                if ticket.place > len(ticket.told):
                    ticket.told.append(event.token)
                    ticket.listener.happened(told)
                elif ticket.told[ticket.place - 1] != event.token:
                    raise WorkerError("A reply that was begun by a replica that ended came out otherwise in another.")
        raise WorkerError("The replica's answer broke off.")

    async def _cut(self, ticket: _Ticket) -> None:
        import ray

        if ticket.serves is not None:
            with suppress(ray.exceptions.RayError):
                await ticket.serves.actor.cancel.remote(ticket.sent, ticket.cut)

    # -- where conversations are --------------------------------------------------------------------------------------

    def _chosen(self, request: Request, up: list[Replica]) -> Replica:
        """By the router; a fork as the conversation that it comes from."""
        with self._lock:
            if request.fork is not None:
                self._family[request.session] = self._family.get(request.fork.session, request.fork.session)
            family = self._family.get(request.session, request.session)
        chosen = ROUTERS[self._router](Turn(family, request.turn), up, self._seed)
        assert isinstance(chosen, Replica)
        return chosen

    def _as_sent(self, request: Request, replica: Replica) -> Request:
        """Where the conversation's last turn was served elsewhere, what was said before is its history there, found or
        computed again."""
        home, known = self._home.get(request.session), request.history
        if home in (None, replica) or known is None or known.lost == "edited":
            return request
        assert home is not None
        computed = min(known.tokens, max(home.held_tokens(request.session) - 1, 0))
        return replace(request, history=History(computed, "restarted")) if computed else request

    def _stands(self, request: Request, turn: TurnRecord, replica: Replica) -> None:
        with self._lock:
            before = self._home.get(request.session, replica)
            before.homes.pop(request.session, None)
            self._counted["moved_turns"] += before is not replica
            self._home[request.session] = replica
            replica.homes[request.session] = len(request.prompt) + len(turn.token_ids)

    @property
    def _origin_s(self) -> float:
        """Of this clock, in seconds since 1970."""
        return time.time() - self.clock.now_s()


def _over(ticket: _Ticket, status: str, now_s: float, error: str | None = None) -> Event:
    """The end of a request that no replica tells, with what was told of it."""
    turn = TurnRecord.arrived(ticket.request, ticket.request.turn, ticket.request.intended_s)
    for token in ticket.told:
        turn.token(token, None, now_s)
    turn.close(status, None, now_s, error)
    return Event("finished", ticket.request.id, now_s, None, turn)


@dataclass(frozen=True, slots=True)
class _ToOutbox:
    """The listener of a request that was submitted."""

    outbox: Outbox
    said: Transcripts
    request: Request
    streams = False

    def happened(self, event: Event) -> None:
        if event.turn is not None:
            self.said.note(self.request, event.turn)
        self.outbox.put([event])

    def failed(self, error: WorkerError) -> None:
        """Poll raises it."""


def build_replicas(
    plan: TrialPlan,
    count: int,
    router: str,
    environment: Mapping[str, str] | None = None,
    connected: Callable[[], object] | None = None,
) -> ReplicaSystem:
    """The system of a real machine's replicas, not started yet. environment: as of Actors; connected: as of ReplicaSystem.

    Raises HardwareMissing where so many do not fit: before the first of them starts, not after the last. WeightsMissing.
    """
    assert not plan.device.simulated
    config = plan.config
    gpus = config.hardware.gpus if plan.device.kind == "cuda" else 0
    if gpus and ":" in config.hardware.device:
        raise ConfigError(
            f"hardware.device={config.hardware.device} with replicas: each gets GPUs of its own; "
            "use hardware.device=cuda."
        )
    _check_room(plan, count, gpus)
    check_weights(config.model)
    fields = config.model_dump()
    limit = memory_limit_bytes(config.hardware)  # of all of them together
    fields["hardware"] |= {
        "threads": config.hardware.threads or max(1, physical_cores() // count),
        "cpu_memory": None if limit is None else f"{limit // count} B",
        "replicas": 1,
        "router": "single",
    }
    return ReplicaSystem(Actors(fields, count, gpus=gpus, environment=environment), router, config.seed, connected)


def _check_room(plan: TrialPlan, count: int, gpus: int) -> None:
    free = free_device_bytes(plan.device)
    if gpus:
        import torch

        if (there := torch.cuda.device_count()) < count * gpus:
            raise HardwareMissing(
                f"{count} replicas need {count * gpus} GPUs, and this machine has {there}; use fewer."
            )
    else:
        free = min(free, plan.device.gpu_bytes) // count  # the latter is hardware.cpu_memory, where set
    try:
        check_memory(plan, free)
    except HardwareMissing as error:
        raise HardwareMissing(f"Of {count} replicas each needs room: {error}") from error
