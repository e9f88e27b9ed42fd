"""Several engines as one system: turns go where their conversation's KV is, and none is lost with a replica."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, History, Request, TokenArray
from pensieve.device.asked import physical_cores
from pensieve.errors import ConfigError, EngineFailed, HardwareMissing, PensieveError, WorkerError
from pensieve.lab.compose.build import check_memory
from pensieve.lab.compose.model_files import check_weights
from pensieve.lab.compose.plan import TrialPlan, free_device_bytes, memory_limit_bytes
from pensieve.plugins.cluster.routing import ROUTERS, Turn, gauges_together, settings_together
from pensieve.plugins.engines.process import EngineProcess
from pensieve.plugins.replicas.engine import Described
from pensieve.serve.record import Listener, Transcripts, TurnRecord
from pensieve.serve.systems.base import Capabilities, Outbox, WallClock
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, Answer

ATTEMPTS = 3
"""A turn whose replica ended is asked again elsewhere, up to so many times in all: it may be what ends them."""

CALL_S = 10.0  # a call that is no turn may take so long
RETRY_S = 5.0  # after a start that failed
MAIN = "from pensieve.plugins.replicas.engine import main; main()"

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request on its way.

    told: its tokens so far, of whichever attempt; place: of the next one in this attempt. serves: the replica that has it;
    None: none is up. cut: the status with which somebody has ended it.
    """

    request: Request
    listener: Listener
    told: list[int] = field(default_factory=list)
    place: int = 0
    attempts: int = 0
    serves: Replica | None = None
    cut: str | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """One engine in a process of its own, as routing.Known. number: its place among them, which the one that replaces it
    gets. in_flight: turns that it was given. homes: conversations whose last turn it served, and tokens that it may hold of
    each. orders: what a thread of its own sends it, so that nobody waits for the pipe; None: the end. calls: that it has not
    answered yet, and since when."""

    number: int
    process: EngineProcess
    in_flight: int = 0
    homes: dict[str, int] = field(default_factory=dict)
    orders: SimpleQueue[tuple[int | None, str, tuple[Any, ...]] | None] = field(default_factory=SimpleQueue)
    calls: dict[int, tuple[float, Future[Any]]] = field(default_factory=dict)

    @property
    def hangs(self) -> bool:
        """It owes an answer for longer than anybody waits."""
        return any(time.monotonic() - since_s > CALL_S for since_s, _ in list(self.calls.values()))

    def held_tokens(self, session: str) -> int:
        return self.homes.get(session, 0)

    def order(self, method: str, *given: Any, number: int | None = None) -> None:
        """Have it call this method of EngineReplica."""
        self.orders.put((number, method, given))

    def send_orders(self) -> None:
        with suppress(OSError):  # it has ended, as whoever hears it learns too
            while (order := self.orders.get()) is not None:
                self.process.sends.send(order)


class ReplicaSystem:
    """Replicas share nothing but what was said, which comes with every request, so one that ends loses KV and no text.

    A turn that was under way there is asked again elsewhere, from its beginning; tokens that were told before are not told
    again. The noise of sampling depends on the position alone, so they are the same ones; should rounding in 16 bits have
    made another of one of them, the turn fails, rather than go on from what nobody was told.

    fields: of a trial's configuration, which each replica builds its engine from. router: of plugins/cluster/routing.py,
    under `seed`. gpus: of one replica. environment: of the replicas' processes, over this one's. Any thread may call anything
    here; a thread a replica hears what it says, and begins another where it ends.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        count: int,
        router: str,
        seed: int = 0,
        gpus: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.clock: Clock = WallClock()
        self.can = Capabilities()
        self.fields, self.count = dict(fields), count
        self._router, self._seed, self._gpus, self._environment = router, seed, gpus, dict(environment or {})
        self._outbox = Outbox(self.clock, lambda: WorkerError(ENGINE_CLOSED) if self._closed.is_set() else None)
        self._said = Transcripts()  # of conversations whose requests are submitted
        self._closed = threading.Event()
        self._numbers = itertools.count(1)  # of calls
        self._counters: dict[Replica, dict[str, float]] = {}  # as told last, by those that ended too
        self._lock = threading.Lock()  # of what follows, and of what replicas have
        self._processes: dict[int, EngineProcess] = {}
        self._up: dict[int, Replica] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._home: dict[str, Replica] = {}  # of each conversation, that of its last turn
        self._family: dict[str, str] = {}  # of forks, the conversation that they come from
        self._counted: Counter[str] = Counter()  # by this object

    @property
    def up(self) -> list[Replica]:
        """Those that serve now, by number."""
        return [one for _, one in sorted(self._up.items())]

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        """Raises EngineFailed with the reason of a replica that cannot start."""
        began = time.perf_counter()
        try:
            begun = [self._begin(number) for number in range(self.count)]
            described = [self._ready(one) for one in begun]
        except BaseException as error:
            self.close()
            if isinstance(error, PensieveError):
                raise EngineFailed(f"The replicas cannot start: {error}") from error
            raise
        for replica in begun:
            threading.Thread(target=self._keep, args=(replica,), name="pensieve-replica", daemon=True).start()
        self._described, report = described[0], described[0].report
        warmup_ms = (time.perf_counter() - began - (report.load_s or 0.0)) * 1e3
        return StartReport(report.load_s, warmup_ms, self.settings(), report.eos, sampling=report.sampling)

    def submit(self, request: Request) -> None:
        """What its prompt shares with what was said before is its history, for a replica that serves it anew."""
        self._outbox.expect(request.id)
        known = self._said.known(request.session, request.prompt)
        if known and request.history is None:  # by the replica that may serve it now, at the latest
            request = replace(request, history=History(known, "kept"))
        self.begin(request, self._outbox)

    def begin(self, request: Request, listener: Listener) -> None:
        ticket = _Ticket(request, listener)
        with self._lock:
            closed = self._closed.is_set()
            if not closed:
                self._tickets[request.id] = ticket
        if closed:
            listener.failed(WorkerError(ENGINE_CLOSED))
        else:
            self._send(ticket)

    def cancel(self, request_id: int, status: str) -> None:
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is not None and ticket.cut is None:
                ticket.cut = status
                if ticket.serves is not None:
                    ticket.serves.order("cancel", request_id, status)

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
            for replica in self._up.values():
                replica.homes.clear()
        self._ask(self.up, "forget", None)

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """left: ignored, since a replica's disk ends with it."""
        self._said.forget(session)
        with self._lock:
            if (home := self._home.pop(session, None)) is not None:
                home.homes.pop(session, None)
            self._family.pop(session, None)
            for replica in self._up.values():
                replica.order("release", session)

    @property
    def chunk_tokens(self) -> int:
        return self._described.chunk_tokens

    def places(self, session: str) -> str:
        """Where its KV is, in the replica of its last turn."""
        return str(next(iter(self._ask([self._home.get(session)], "places", session).values()), ""))

    def counters(self) -> dict[str, float]:
        """Sums over the replicas, those that ended included up to when they were asked last; moved_turns: turns that stand,
        served elsewhere than the one before; restarted_requests: asked again since their replica ended."""
        self._counters |= self._ask(self.up, "counters")
        with self._lock:
            found = Counter(self._counted)
        for one in list(self._counters.values()):
            found.update(one)
        return dict(found)

    def gauges(self) -> dict[str, tuple[float, str]]:
        told = self._ask(self.up, "gauges").values()
        return {**gauges_together(told), "replicas": (len(told), "replicas")}

    def settings(self) -> dict[str, Any]:
        """Of one replica; tokens and bytes of the tiers are those of all together."""
        return {**settings_together(self._described.settings, self.count), "router": self._router}

    def close(self) -> None:
        """Requests under way end with WorkerError. Safe after a start that failed, and twice."""
        with self._lock:
            closed = self._closed.is_set()
            self._closed.set()
            tickets, self._tickets = list(self._tickets.values()), {}
        if closed:
            return
        for ticket in tickets:
            ticket.listener.failed(WorkerError(ENGINE_CLOSED))
        for number in range(self.count):
            self._close(number)
        self._outbox.put([])

    # -- the replicas -------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> Replica:
        """One that was not heard yet. Raises WorkerError once this is closed."""
        environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"), **self._environment}
        if self._gpus:
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            seen = named.split(",") if named else list(map(str, range(self.count * self._gpus)))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen[number * self._gpus : (number + 1) * self._gpus])
        with self._lock:
            if self._closed.is_set():
                raise WorkerError(ENGINE_CLOSED)
            process = self._processes[number] = EngineProcess.ours("replica", MAIN, environment, talk=True)
        with suppress(OSError):  # it has ended, as `_ready` finds
            process.sends.send((self.fields, time.perf_counter() - self.clock.now_s()))
        return Replica(number, process)

    def _ready(self, replica: Replica) -> Described:
        """Returns once it serves. Raises what it says is wrong, or EngineFailed."""
        said = replica.process.first_word(math.inf)
        if isinstance(said, PensieveError):
            self._close(replica.number)
            raise said
        threading.Thread(target=replica.send_orders, name="pensieve-orders", daemon=True).start()
        with self._lock:
            self._up[replica.number] = replica
            waiting = [one for one in self._tickets.values() if one.serves is None]
        for ticket in waiting:
            self._send(ticket)
        described: Described = said
        return described

    def _keep(self, replica: Replica) -> None:
        """Hear a replica until it ends, then one that takes its number, and so on until this is closed."""
        while not self._closed.is_set():
            with suppress(EOFError, OSError):
                while True:
                    self._hear(replica, *replica.process.receives.recv())
            self._gone(replica)
            while not self._closed.is_set():
                try:
                    replica = self._begin(replica.number)
                    self._ready(replica)
                    break
                except (PensieveError, OSError) as error:
                    if not self._closed.wait(RETRY_S):
                        log.error("A replica ended, and cannot be started again: %s", error)

    def _gone(self, replica: Replica) -> None:
        """It has ended: what it served is asked again elsewhere."""
        with self._lock:
            self._up.pop(replica.number, None)
            tickets = [one for one in self._tickets.values() if one.serves is replica]
            for ticket in tickets:
                ticket.serves, ticket.place = None, 0
                self._counted["restarted_requests"] += 1
            for _, call in replica.calls.values():
                call.set_exception(WorkerError("The replica has ended."))
        replica.orders.put(None)
        self._close(replica.number)
        for ticket in tickets:
            self._send(ticket)

    def _close(self, number: int) -> None:
        """End the process that has this number, once."""
        with self._lock:
            process = self._processes.pop(number, None)
        if process is not None:
            process.close()

    def _hear(self, replica: Replica, number: int | None, said: Any) -> None:
        if number is not None:
            if (asked := replica.calls.pop(number, None)) is not None:
                asked[1].set_result(said)
        elif (ticket := self._tickets.get(said.request_id)) is not None and ticket.serves is replica:
            self._happened(ticket, said)

    def _ask(self, replicas: Collection[Replica | None], method: str, *given: Any) -> dict[Replica, Any]:
        """What each of these answers, but for those that are not up, end meanwhile or take longer than CALL_S; one that
        hangs is not asked again before it has answered."""
        asked: dict[Future[Any], Replica] = {}
        with self._lock:
            for replica in self._up.values():
                if replica in replicas and not replica.hangs:
                    number, call = next(self._numbers), Future[Any]()
                    asked[call] = replica
                    replica.calls[number] = time.monotonic(), call
                    replica.order(method, *given, number=number)
        done, _ = wait(asked, CALL_S)
        return {asked[call]: call.result() for call in done if call.exception() is None}

    # -- one turn -----------------------------------------------------------------------------------------------------

    def _send(self, ticket: _Ticket) -> None:
        """To a replica, as soon as one is up; or its end, where it was cut or has ended too many. Nothing where another
        thread has sent it meanwhile."""
        request = ticket.request
        with self._lock:
            if ticket.serves is not None:
                return
            over = ticket.cut is not None or ticket.attempts == ATTEMPTS
            if not over and self._up:
                ticket.serves = replica = self._chosen(request, self.up)
                ticket.attempts += 1
                replica.in_flight += 1
                replica.order("begin", self._as_sent(request, replica))
        if ticket.cut is not None and over:
            self._end(ticket, ticket.cut)
        elif over:
            said = f"{ATTEMPTS} replicas ended while they served this request, so it is not tried again."
            self._end(ticket, "failed", said)

    def _happened(self, ticket: _Ticket, event: Event) -> None:
        if event.turn is not None:
            self._finish(ticket, event)
            return
        assert event.token is not None and ticket.serves is not None
        ticket.place += 1
        if ticket.place > len(ticket.told):
            ticket.told.append(event.token)
            ticket.listener.happened(event)
        elif ticket.told[ticket.place - 1] != event.token:
            ticket.serves.order("cancel", event.request_id, "cancelled")
            said = "A reply that was begun by a replica that ended came out otherwise in another."
            self._end(ticket, "failed", said)

    def _end(self, ticket: _Ticket, status: str, error: str | None = None) -> None:
        """A request ends that no replica tells of, with what was told of it."""
        request, now_s = ticket.request, self.clock.now_s()
        turn = TurnRecord.arrived(request, request.turn, request.intended_s)
        for token in ticket.told:
            turn.token(token, None, now_s)
        turn.close(status, None, now_s, error)
        self._finish(ticket, Event("finished", request.id, now_s, None, turn))

    def _finish(self, ticket: _Ticket, event: Event) -> None:
        """Its last event."""
        turn, replica = event.turn, ticket.serves
        assert turn is not None
        with self._lock:
            if self._tickets.pop(event.request_id, None) is None:
                return  # closed: it has been told
            if replica is not None:
                replica.in_flight -= 1
                if turn.stands:
                    self._stands(ticket.request, turn, replica)
            if ticket.listener is self._outbox:
                self._said.note(ticket.request, turn)
        ticket.listener.happened(event)

    # -- where conversations are --------------------------------------------------------------------------------------

    def _chosen(self, request: Request, up: list[Replica]) -> Replica:
        """By the router; a fork as the conversation that it comes from."""
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
        before = self._home.get(request.session, replica)
        before.homes.pop(request.session, None)
        self._counted["moved_turns"] += before is not replica
        self._home[request.session] = replica
        replica.homes[request.session] = len(request.prompt) + len(turn.token_ids)


def build_replicas(
    plan: TrialPlan, count: int, router: str, environment: Mapping[str, str] | None = None
) -> ReplicaSystem:
    """The system of a real machine's replicas, not started yet. environment: as of ReplicaSystem.

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
    return ReplicaSystem(fields, count, router, config.seed, gpus, environment)


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
