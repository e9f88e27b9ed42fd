"""Several engines on Ray Serve, as one system: turns go where their conversation's KV is, and none is lost with a replica."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from pensieve.core.clock import Clock, WallClock
from pensieve.core.event import Event
from pensieve.core.plan import StartReport
from pensieve.core.request import History, Request, TokenArray
from pensieve.errors import EngineFailed, WorkerError
from pensieve.plugins.engines.ray_cluster import RayCluster
from pensieve.plugins.replicas.call_routing import CallRouting, running, unregister
from pensieve.plugins.replicas.engine import Begun, Described, EngineReplica, ReplicaReport, moved
from pensieve.plugins.replicas.router import SessionRouter
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities, Listener
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, Answer
from pensieve.serve.systems.outbox import Outbox
from pensieve.serve.transcript import Transcripts

ATTEMPTS = 3
"""A turn whose replica ended is asked again elsewhere, up to so many times in all: it may be what ends them."""
CALL_S = 30.0  # a call that is no turn may take so long
GLANCE_S = 2.0  # and one that somebody makes who may be told what was so a moment ago
START_S = 60.0  # and the first one, for which Ray learns where the replicas are
PLACES_S = 0.5  # for how long what replicas hold is told again without asking them

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scaling:
    """least, most: replicas. turns: under way a replica that autoscaling aims at; up_s, down_s: for how long the load must
    have been above or below. drain_s: how long a replica that is to end may take for the turns it has."""

    least: int
    most: int
    turns: float = 8.0
    up_s: float = 10.0
    down_s: float = 300.0
    drain_s: float = 30.0


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request on its way. told: its tokens so far, of whichever attempt; place: of the next one in this attempt. sent: as
    what it was begun, at which replica. cut: the status with which somebody has ended it. moved: another replica served the
    turn before."""

    request: Request
    listener: Listener
    told: list[int] = field(default_factory=list)
    place: int = 0
    sent: Begun | None = None
    cut: str | None = None
    moved: bool = False


class ReplicaSystem:
    """Replicas share nothing but what was said, which comes with every request, so one that ends loses KV and no text.

    A turn that was under way there is asked again elsewhere, from its beginning; tokens that were told before are not told
    again. The noise of sampling depends on the position alone, so they are the same ones; should rounding in 16 bits have
    made another of one of them, the turn fails, rather than go on from what nobody was told.

    Calls of Ray are made by one thread, in an event loop of its own; any thread may call anything here.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        scaling: Scaling,
        router: str,
        *,
        seed: int = 0,
        gpus: int = 0,
        environment: Mapping[str, str] | None = None,
        connected: Callable[[], object] | None = None,
    ) -> None:
        """fields: of a trial's configuration, which each replica builds its engine from. gpus: of one replica. environment:
        of all its processes, over this one's. connected: called when this process is connected to Ray, before any replica
        starts; what it raises ends the start."""
        self.clock: Clock = WallClock()
        self.can = Capabilities()
        self._fields, self._scaling, self._router, self._seed, self._gpus = dict(fields), scaling, router, seed, gpus
        self._app = f"pensieve-{id(self):x}"
        self._cluster = RayCluster(scaling.most, gpus * scaling.most, environment=environment)
        self._outbox = Outbox(self.clock, lambda: WorkerError(ENGINE_CLOSED) if self._closed else None)
        self._said = Transcripts()  # of conversations whose requests are submitted
        self._connected = connected
        self._closed = False
        self._lock = threading.Lock()  # of what follows
        self._tickets: dict[int, _Ticket] = {}
        self._home: dict[str, tuple[str, int]] = {}  # of each conversation, the replica of its last turn and its tokens
        self._served: dict[str, set[str]] = {}  # all replicas that may hold something of it
        self._family: dict[str, str] = {}  # of forks, the conversation that they come from
        self._counted: Counter[str] = Counter()  # by this object
        self._asking = threading.Lock()  # of what follows; taken before the other lock
        self._told: dict[str, ReplicaReport] = {}  # by replicas that run, when they answered last
        self._told_counters: dict[str, dict[str, float]] = {}  # the same of all there ever were
        self._told_at = {places: float("-inf") for places in (False, True)}  # by whether places were asked for
        self._ids = itertools.count(1)
        self._restarting = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        """Ray, then the replicas. Raises EngineFailed with the reason of a replica that cannot start."""
        began = time.perf_counter()
        try:
            self._cluster.start()
            if self._connected is not None:
                self._connected()
            logging.getLogger("ray.serve").setLevel(
                logging.ERROR
            )  # a slow answer is no news of a machine that computes
            self._handle = self._deployed()
            self._thread = threading.Thread(target=self._loop.run_forever, name="pensieve-replicas", daemon=True)
            self._thread.start()
            self._described: Described = self._now(self._describe(), START_S)
        except BaseException:
            self.close()
            raise
        report = self._described.report
        warmup_ms = (time.perf_counter() - began - (report.load_s or 0.0)) * 1e3
        return StartReport(report.load_s, warmup_ms, self.settings(), report.eos, sampling=report.sampling)

    def _deployed(self) -> Any:
        s = self._scaling
        # Its own proxy stays out: it reads no bodies, where most sessions are named, and asks nobody for a key.
        serve.start(proxy_location="Disabled", logging_config=_QUIET)
        scale: dict[str, Any] = {"num_replicas": s.least}
        if s.most > s.least:
            often_s = min(1.0, s.up_s or 1.0)
            scale = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=s.least,
                    max_replicas=s.most,
                    target_ongoing_requests=s.turns,
                    upscale_delay_s=s.up_s,
                    downscale_delay_s=s.down_s,
                    metrics_interval_s=often_s,
                    look_back_period_s=max(2.0, often_s),
                )
            }
        deployment = serve.deployment(
            EngineReplica,
            name="engine",
            ray_actor_options={"num_cpus": 1, "num_gpus": self._gpus},
            max_ongoing_requests=1_000_000,  # who is let in is decided before, and a cancellation must never wait
            graceful_shutdown_timeout_s=s.drain_s,
            graceful_shutdown_wait_loop_s=0.2,
            health_check_period_s=2.0,
            max_constructor_retry_count=1,
            logging_config=_QUIET,
            request_router_config=RequestRouterConfig(
                request_router_class=f"{SessionRouter.__module__}.{SessionRouter.__qualname__}",
                request_router_kwargs={"router": self._router, "seed": self._seed},
            ),
            **scale,
        )
        try:
            return serve.run(deployment.bind(self._fields), name=self._app, route_prefix=None)
        except RuntimeError as error:
            told = str(error)
            with suppress(Exception):  # Ray tells the cause by another way, if it still can
                told = serve.status().applications[self._app].deployments["engine"].message or told
            raise EngineFailed(f"The replicas cannot start: {reason_in(told)}") from error

    def restart(self) -> None:
        """Replace the replicas one after another, and return when that is done: each gets no more turns, ends those it has
        (within Scaling.drain_s; what is left is asked again elsewhere) and is followed by an empty one. Raises EngineFailed
        where a new one cannot start."""
        with self._restarting:
            if self._closed:
                raise EngineFailed("The server is stopping; its replicas are not replaced.")
            self._deployed()  # what is deployed again is a new version, which Ray Serve rolls out

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
            self._soon(self._serve(ticket))

    def cancel(self, request_id: int, status: str) -> None:
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None:
                return
            ticket.cut = ticket.cut or status
        self._soon(self._cut(ticket))

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
            for known in (self._home, self._served, self._family):
                known.clear()
        self._now(self._each("forget"))

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """left: ignored, since a replica's disk ends with it."""
        self._said.forget(session)
        with self._lock:
            self._home.pop(session, None)
            self._family.pop(session, None)
            served = self._served.pop(session, set())
        for replica in served.intersection(self.up):
            self._soon(self._quietly(self._call("release", CallRouting(to=replica), session)))

    @property
    def up(self) -> list[str]:
        """The ids of the replicas that run now."""
        return running(self._app)

    @property
    def chunk_tokens(self) -> int:
        return self._described.chunk_tokens

    def places(self, session: str) -> str:
        """Where its KV is, in the replica of its last turn; up to PLACES_S old."""
        home = self._home.get(session)
        if home is None:
            return ""
        told = self._what_they_tell(places=True).get(home[0])
        return "" if told is None else told.places.get(session, "")

    def counters(self) -> dict[str, float]:
        """Sums over the replicas, those that ended included up to when they were asked last; moved_turns: served elsewhere
        than the turn before; restarted_requests: asked again since their replica ended."""
        with self._asking:
            self._ask_all(CALL_S)
            with self._lock:
                found = Counter(self._counted)
            for counters in self._told_counters.values():
                found.update(counters)
        return dict(found)

    def gauges(self) -> dict[str, tuple[float, str]]:
        found: dict[str, tuple[float, str]] = {}
        told = self._what_they_tell()
        for one in told.values():
            for name, (value, unit) in one.gauges.items():
                found[name] = (found.get(name, (0.0, unit))[0] + value, unit)
        return {**found, "replicas": (len(told), "replicas")}

    def settings(self) -> dict[str, Any]:
        """Of one replica; tokens and bytes of the tiers are those of the least number of them together."""
        one, least = self._described.settings, self._scaling.least
        summed = ("gpu_tokens", "cpu_tokens", "disk_tokens", "gpu_bytes", "cpu_bytes")
        bounds = {"replicas": least, "most_replicas": self._scaling.most, "router": self._router}
        return {**one, **{name: one[name] * least for name in summed}, **bounds}

    def close(self) -> None:
        """Requests under way end with WorkerError. Safe after a start that failed, and twice."""
        with self._lock:
            closed, self._closed = self._closed, True
            tickets, self._tickets = list(self._tickets.values()), {}
        if closed:
            return
        for ticket in tickets:
            ticket.listener.failed(WorkerError(ENGINE_CLOSED))
        if self._thread is not None:
            with suppress(Exception):
                self._now(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            with suppress(Exception):  # whatever it finds gone by now
                self._handle.shutdown()  # its router reports its load to Ray as long as it is there
        unregister(self._app)
        self._cluster.close()
        self._outbox.put([])

    # -- one turn -----------------------------------------------------------------------------------------------------

    async def _serve(self, ticket: _Ticket) -> None:
        try:
            event = await self._answered(ticket)
        except Exception as error:  # whatever it was, whoever asked must learn of it
            log.error("A turn failed in its replica: %s", type(error).__name__)
            event = _over(
                ticket, "failed", self.clock.now_s(), f"The replica failed the request ({type(error).__name__})."
            )
        with self._lock:
            if self._tickets.pop(ticket.request.id, None) is None:
                return  # closed: it has been told
        turn = event.turn
        assert turn is not None
        if turn.stands and ticket.sent is not None:
            self._stands(ticket.request, turn, ticket.sent.replica)
        ticket.listener.happened(event)

    async def _answered(self, ticket: _Ticket) -> Event:
        """Its last event, of the first attempt whose replica lives to tell it."""
        for _ in range(ATTEMPTS):
            try:
                return await self._attempt(ticket)
            except ray.exceptions.RayActorError:
                with self._lock:
                    self._counted["restarted_requests"] += 1
                ticket.sent, ticket.place = None, 0
                if ticket.cut is not None:
                    return _over(ticket, ticket.cut, self.clock.now_s())
        said = f"{ATTEMPTS} replicas ended while they served this request, so it is not tried again."
        return _over(ticket, "failed", self.clock.now_s(), said)

    async def _attempt(self, ticket: _Ticket) -> Event:
        request, origin_s = ticket.request, self._origin_s
        routing = self._routing(request)
        asked = replace(request, id=next(self._ids), intended_s=request.intended_s + origin_s)
        stream = self._handle.options(method_name="answer", stream=True).remote(routing, asked)
        async for part in stream:
            if isinstance(part, Begun):
                ticket.sent = part
                self._begun(ticket, routing, part.replica)
                if ticket.cut is not None:
                    await self._cut(ticket)
                continue
            for event in part:
                told: Event = event._replace(request_id=request.id, at_s=event.at_s - origin_s)
                if event.turn is not None:
                    moved(event.turn, -origin_s)
                    event.turn.request_id = request.id
                    return told
                assert event.token is not None
                if self._is_new(ticket, event.token):
                    ticket.listener.happened(told)
        raise WorkerError("The replica's answer broke off.")

    def _is_new(self, ticket: _Ticket, token: int) -> bool:
        place, told = ticket.place, ticket.told
        ticket.place += 1
        if place < len(told):
            if told[place] != token:
                raise WorkerError("A reply that was begun by a replica that ended came out otherwise in another.")
            return False
        told.append(token)
        return True

    async def _cut(self, ticket: _Ticket) -> None:
        sent = ticket.sent
        if sent is not None:
            cancel = self._call("cancel", CallRouting(to=sent.replica), sent.request_id, ticket.cut)
            await self._quietly(cancel)

    # -- where conversations are --------------------------------------------------------------------------------------

    def _routing(self, request: Request) -> CallRouting:
        with self._lock:
            if request.fork is not None:
                self._family[request.session] = self._family.get(request.fork.session, request.fork.session)
            home, tokens = self._home.get(request.session, (None, 0))
            return CallRouting(self._family.get(request.session, request.session), request.turn, None, home, tokens)

    def _begun(self, ticket: _Ticket, routing: CallRouting, replica: str) -> None:
        with self._lock:
            self._served.setdefault(ticket.request.session, set()).add(replica)
            if (
                routing.home not in (None, replica) and not ticket.moved
            ):  # a turn counts once, however often it is asked
                ticket.moved = True
                self._counted["moved_turns"] += 1

    def _stands(self, request: Request, turn: TurnRecord, replica: str) -> None:
        with self._lock:
            self._home[request.session] = (replica, len(request.prompt) + len(turn.token_ids))

    def _what_they_tell(self, places: bool = False) -> dict[str, ReplicaReport]:
        """Of each replica that runs, up to PLACES_S old; older where one does not answer in time. places: those of all
        conversations too, which cost as much as there are; counts and gauges are kept anyway."""
        if self._asking.acquire(timeout=GLANCE_S):
            try:
                if time.monotonic() - self._told_at[places] > PLACES_S:
                    self._ask_all(GLANCE_S, places)
            finally:
                self._asking.release()
        return self._told

    def _ask_all(self, patience_s: float, places: bool = False) -> None:
        """By one thread at a time, so that what is told never gets older. For a replica that does not answer stands what it
        told before; it is not asked again at once, or everybody would wait for it."""
        homes: dict[str, list[str]] = {}
        if places:
            with self._lock:
                for session, (replica, _) in self._home.items():
                    homes.setdefault(replica, []).append(session)
        found: list[ReplicaReport] = []
        with suppress(Late):
            found = self._now(self._each("tell", homes, patience_s), 2 * patience_s)
        self._told_counters.update((one.replica, one.counters) for one in found)
        if not places:
            found = [
                replace(one, places=self._told[one.replica].places) if one.replica in self._told else one
                for one in found
            ]
        told = self._told | {one.replica: one for one in found}
        self._told = {name: told[name] for name in self.up if name in told}
        self._told_at |= dict.fromkeys((False, places), time.monotonic())

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def _origin_s(self) -> float:
        """Of this clock, in seconds since 1970."""
        return time.time() - self.clock.now_s()

    async def _describe(self) -> Described:
        """The first call. It is one of the handle itself, which gets its router now and gives it to all that `options` makes
        of it; before, each of those would make one of its own."""
        described: Described = await self._handle.remote(CallRouting())
        return described

    async def _call(self, method: str, routing: CallRouting, *arguments: Any) -> Any:
        return await self._handle.options(method_name=method).remote(routing, *arguments)

    async def _each(
        self, method: str, homes: Mapping[str, list[str]] | None = None, patience_s: float = CALL_S
    ) -> list[Any]:
        """What each replica answers, but for those that end meanwhile or take longer. homes: an argument for each."""

        async def in_time(to: str, *arguments: Any) -> Any:
            async with asyncio.timeout(patience_s):
                return await self._call(method, CallRouting(to=to), *arguments)

        calls = [in_time(one, *(() if homes is None else (tuple(homes.get(one, ())),))) for one in self.up]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _quietly(self, call: Coroutine[Any, Any, Any]) -> None:
        """A call to a replica that may be gone, and with it what the call is about."""
        with suppress(ray.exceptions.RayError):
            await call

    def _now(self, call: Coroutine[Any, Any, T], seconds: float = CALL_S) -> T:
        """Called from other threads, which wait for it."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(seconds)

    def _soon(self, call: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._spawn, call)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        others = list(self._tasks)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


_QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")


def reason_in(account: str) -> str:
    """Of Ray's account of a replica that could not start, with its traceback: the sentence of our own error, else the last
    line that says something."""
    lines = [line.strip() for line in account.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("pensieve.errors.")]
    return ours[-1].partition(": ")[2] if ours else lines[-1] if lines else "Ray does not say why."


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

    @property
    def streams(self) -> bool:
        return False

    def happened(self, event: Event) -> None:
        if event.turn is not None:
            self.said.note(self.request, event.turn)
        self.outbox.put([event])

    def failed(self, error: WorkerError) -> None:
        """Poll raises it."""
