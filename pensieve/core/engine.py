"""The step loop: admit and plan, launch, collect, commit; on any clock. And the conversations that it keeps between turns."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pensieve.core.cache.base import CacheManager
from pensieve.core.facts import NOBODY_NOW, SILENT, Computed, Facts
from pensieve.core.machine import Clock, Worker
from pensieve.core.plan import StepResult
from pensieve.core.request import UNNUMBERED, Event, Request, TokenArray
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import Scheduler, SchedulerSettings, Step, Strategies
from pensieve.core.session import Session

_LOOKED_AT = 4  # ended sessions looked at whenever one more ends; so at most one in four of those kept has no KV left
_NOT_FINITE = (
    "The logits of this request are not finite, so no token can be drawn; check the model's weights, or set "
    "model.dtype=float32."
)


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """ttl_s: an idle session is forgotten after this long; None: never. tokens: raw tokens of all idle sessions
    together (4 bytes each); beyond, the one idle longest is forgotten first."""

    ttl_s: float | None = None
    tokens: int | None = None


class Engine:
    """Drives one scheduler and one worker; not thread-safe, owned by whoever calls `step`.

    search: makes of a request's stop strings what says of each token whether one of them is there. eos: token ids that end a
    Free output.
    """

    def __init__(
        self,
        *,
        cache: CacheManager,
        settings: SchedulerSettings,
        worker: Worker,
        clock: Clock,
        max_context: int,
        eos: frozenset[int] = frozenset(),
        search: Callable[[Sequence[str]], Callable[[int], bool]] | None = None,
        limits: MemoryLimits | None = None,
        facts: Facts = SILENT,
        strategies: Strategies | None = None,
    ) -> None:
        """facts: where it is told what happens; what that returns of a request that ended is in its event `finished`."""
        assert worker.depth in (1, 2), "one plan in flight, or one more that is made before it is collected"
        self.cache = cache
        """For queries alone."""
        self.facts = facts
        self.scheduler = Scheduler(
            cache, settings, worker.depth > 1, worker.computes, facts, strategies or Strategies()
        )
        self.sessions = Sessions(cache, limits or MemoryLimits(), facts)
        self.worker = worker
        self.clock = clock
        self._eos, self._max_context = eos, max_context
        self._search = search
        self._active: dict[int, ActiveRequest] = {}  # requests under way, by id
        self._arrived = 0  # requests, ever
        self.progressed = False
        """The last step performed a plan or finished copies; else only an arrival or time can change anything."""
        self.ended_requests = 0
        """Ever, as events that are taken or still to be taken say."""
        self.counts_windows = False
        """Whoever takes the events wants to know how many tokens a request got while it had no row, once they are told."""
        self._events: list[Event] = [] if self.scheduler.forward is None else self.scheduler.forward.events

    @property
    def busy(self) -> bool:
        """Some request waits or runs, or a plan is in flight."""
        return bool(self._active or self.scheduler.in_flight)

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served comes out of the next `step` as refused."""
        now_ns = self.clock.now_ns()
        self.facts.at(now_ns)
        self.sessions.forget_surplus(now_ns)  # may be this very one: whoever returns too late begins anew
        session, new = self.sessions.asked(request, now_ns / 1e9)
        try:
            taken = self._take(request, session, new, now_ns / 1e9)
        except BaseException:  # nothing of the request stays
            session.turns -= 1
            self.sessions.refused(session, new)
            raise
        if not taken:
            self.sessions.refused(session, new)

    def _take(self, request: Request, session: Session, new: bool, now_s: float) -> bool:
        """Queue a request, unless it can never be served. Counts as under way what nothing can refuse any more."""
        turn = session.turns if request.turn == UNNUMBERED else request.turn
        self.facts.arrived(request, turn, now_s)
        active = ActiveRequest.arrive(request, session, self._arrived, turn, self._eos, self._search)
        self._arrived += 1
        error = active.refusal(self.cache.chunk_tokens, self.cache.request_blocks, self._max_context)
        if error is not None:
            self._close(active, "refused", error.reason, now_s, str(error))
            return False
        if request.fork is not None and (forward := self.scheduler.forward) is not None:
            forward.leave(list(forward.members))  # so that its parent has all its tokens
        self.sessions.prepare(session, new, request)
        self.scheduler.submit(active)
        self._active[request.id] = active
        self.sessions.begin(session)
        return True

    def failed(self, request: Request, error: Exception) -> None:
        """End a request that `submit` raised this error for; the next `step` returns its end. Others go on."""
        now_s = self.clock.now_s()
        message = f"The engine cannot take the request ({type(error).__name__}: {error})."
        self.facts.arrived(request, request.turn, now_s)
        self._tell_ended(request, "failed", None, now_s, message)

    def cancel(self, request_id: int, status: str) -> None:
        """End a request early. What it generated so far stays in the session, of its last token no KV that counts
        (Session.stop); a turn without any output is undone."""
        active = self._active.get(request_id)
        if active is None or active.closed:
            return
        self.facts.at(self.clock.now_ns())
        self._close(active, status, None, self.clock.now_s())
        self._release(active)

    def forget(self, session: str | None, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """Free sessions that have no request under way; what is in flight is collected first. left: see Sessions.forget."""
        while self.scheduler.in_flight:
            self._collect(None)
        self.facts.at(self.clock.now_ns())
        self.sessions.forget(session, tenant, left)

    def step(self, until_ns: int | None) -> list[Event]:
        """Perform one iteration, or finish copies, or reach `until_ns`; returns what requests got."""
        scheduler, worker = self.scheduler, self.worker
        while len(scheduler.in_flight) < worker.depth and not scheduler.must_drain:
            step = self._plan(until_ns)
            if step is None:
                break
            worker.launch(step.plan)
        self._collect(until_ns)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return, once, the events since the last call; `step` returns them too."""
        events, self._events[:] = self._events[:], []
        return events

    # -- plan ---------------------------------------------------------------------------------------------------------

    def _plan(self, until_ns: int | None) -> Step | None:
        """Plan the next iteration."""
        began = time.perf_counter_ns()
        now_ns = self.clock.now_ns()
        self.facts.at(now_ns)
        expiry_ns = self.sessions.forget_surplus(now_ns)
        horizon_ns = until_ns if expiry_ns is None or (until_ns is not None and until_ns < expiry_ns) else expiry_ns
        step = self.scheduler.plan(now_ns / 1e9, horizon_ns)
        self.facts.scheduled(time.perf_counter_ns() - began)
        return step

    # -- collect and commit -------------------------------------------------------------------------------------------

    def _collect(self, until_ns: int | None) -> None:
        result = self.worker.collect(until_ns)
        self.progressed = result is not None
        if result is not None:
            began = time.perf_counter_ns()
            self._commit(result)
            self.facts.scheduled(time.perf_counter_ns() - began)

    def _commit(self, result: StepResult) -> None:
        """Apply what the worker has done to the cache and to the requests."""
        ended_ns = self.clock.now_ns() if result.ended_ns is None else result.ended_ns
        self.facts.at(ended_ns)
        repeats, scheduler = result.repeats, self.scheduler
        failed = [one for one in result.moved if not one.ok] if result.moved else ()
        misread: Sequence[ActiveRequest] = ()
        if failed:
            failing, misread = scheduler.lost(failed)
            self._fail_requests(failing, "A copy between the CPU and the GPU tier failed.", self.clock.now_s())
        if result.step is None:
            self.facts.collected(None, result)
            if result.moved:
                scheduler.moved(result.moved)
            if misread:
                scheduler.start_over(misread, self.clock.now_s())
            return
        step = scheduler.collected(result)
        now_s = ended_ns / 1e9
        if result.error is not None:
            own = {move.ticket for move in step.plan.moves}
            scheduler.moved([one for one in result.moved if one.ticket not in own])
            self._fail_requests(scheduler.failed(step), result.error, now_s)
        else:
            forward, counted, ended = scheduler.forward, self.counts_windows, list[ActiveRequest]()
            if result.moved and repeats is None:
                scheduler.moved(result.moved)
            if forward is not None and scheduler.standing:
                ended = self._end(forward.performed(result, now_s, counted), now_s)
            self._commit_rows(step, result, now_s, misread)
            if forward is not None and (step.sampled or repeats):
                last_s = int(repeats.ended_ns[-1]) / 1e9 if repeats else now_s
                ended += self._end(forward.repeated(step, result, now_s, counted), last_s)
            if repeats is not None:
                self.facts.at(int(repeats.ended_ns[-1]))
                if result.moved:  # its copies ended with the last iteration, if any did
                    scheduler.moved(result.moved)
            for active in ended:
                self._release(active)
        for active in step.members:
            if active.closed:
                self._release(active)
        if misread:
            scheduler.start_over(misread, self.clock.now_s())

    def _end(self, members: Iterable[ActiveRequest], now_s: float) -> list[ActiveRequest]:
        """Close these, who have had no rows and have all their tokens; returns them."""
        ended = []
        for active in members:
            self._close(active, "completed", "length", now_s)
            ended.append(active)
        return ended

    def _commit_rows(self, step: Step, result: StepResult, now_s: float, misread: Sequence[ActiveRequest]) -> None:
        """Give times and tokens to the requests that had a row. A request that was closed meanwhile gets none, and the
        cache was never told of its position. misread: requests whose rows read something else than was asked for;
        what they computed is discarded."""
        drawn: list[int | None] = []
        rows: list[Computed] = []
        for active, _ in step.rows:
            slot, token = active.slot, None
            if not (active.closed or active in misread or slot in result.not_finite):
                assert slot is not None
                sampled = result.tokens.get(slot)
                token = None if sampled is None else active.append(sampled)
                rows.append((active.request.id, token, result.margins.get(slot)))
            drawn.append(token)
        self.facts.computed(step.plan, result, rows, now_s)
        for (active, runs), token in zip(step.rows, drawn, strict=True):
            if token is not None:
                self._emit(active, token, now_s)
            elif active in misread:
                active.discard_result()
                self.scheduler.invalidate(active, runs)
            elif active.slot in result.not_finite:
                # What it read may be the cause: none of it is read again, neither by this conversation nor by another.
                self.scheduler.invalidate(active, ((0, runs[-1][1]),))
                self._fail_requests([active], _NOT_FINITE, now_s)

    def _emit(self, active: ActiveRequest, token: int, now_s: float) -> None:
        """Tell of the token that was appended to a request, and close the request if it was the last."""
        kind: Literal["first_token", "token"] = "token" if active.generated > 1 else "first_token"
        self._events.append(Event(kind, active.request.id, now_s, token))
        reason = active.finish_reason(token)
        if reason is not None:
            self._close(active, "completed", reason, now_s)
        else:
            self.scheduler.goes_on(active)

    # -- failure ------------------------------------------------------------------------------------------------------

    def _fail_requests(self, failing: Sequence[ActiveRequest], error: str, now_s: float) -> None:
        """Close these requests as failed; nobody else is touched."""
        self.scheduler.stop(failing)
        for active in failing:
            if not active.closed:
                self._close(active, "failed", None, now_s, error)
            self._release(active)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _close(
        self, active: ActiveRequest, status: str, reason: str | None, now_s: float, error: str | None = None
    ) -> None:
        """End the request for whoever asked, and emit `finished`."""
        if active in self.scheduler.standing and self.scheduler.forward is not None:
            self.scheduler.forward.leave((active,))
        active.close(status, now_s)
        self._tell_ended(active.request, status, reason, now_s, error)

    def _tell_ended(self, request: Request, status: str, reason: str | None, now_s: float, error: str | None) -> None:
        told = self.facts.ended(request, status, reason, now_s, error)
        self._events.append(Event("finished", request.id, now_s, turn=told))
        self.ended_requests += 1

    def _release(self, active: ActiveRequest) -> None:
        """Give back slot and blocks of a closed request once nothing of it is in flight."""
        if not active.in_flight and self._active.get(active.request.id) is active:
            self.scheduler.remove(active)
            del self._active[active.request.id]
            self.sessions.end(active.session, self.clock.now_ns())


@dataclass(frozen=True, slots=True)
class _Idle:
    """One idle session. session None: the cache has let it go; its tokens and its age count as before."""

    session: Session | None
    tokens: int
    since_ns: int


class Sessions:
    """A session with a request under way is never forgotten; of the others the one idle longest goes first. A call costs what
    it forgets, whoever else is idle."""

    def __init__(self, cache: CacheManager, limits: MemoryLimits, facts: Facts) -> None:
        self._cache, self._facts = cache, facts
        self._ttl_ns = None if limits.ttl_s is None or math.isinf(limits.ttl_s) else round(limits.ttl_s * 1e9)
        self._most_tokens = limits.tokens
        self._under_way: dict[str, int] = {}  # session name -> its requests under way
        self._idle: OrderedDict[str, _Idle] = OrderedDict()  # by name, the one idle longest first
        self._idle_tokens = 0
        self._over: deque[Session] = deque()  # sessions that will not be asked again

    @property
    def next_expiry_ns(self) -> int | None:
        """When the next idle session is to be forgotten for its age; None: not before another request ends."""
        if self._ttl_ns is None or not self._idle:
            return None
        return next(iter(self._idle.values())).since_ns + self._ttl_ns

    def asked(self, request: Request, now_s: float) -> tuple[Session, bool]:
        """Return the session of a request that has arrived, and whether it is new."""
        known = self._cache.sessions.get(request.session)
        session = known or self._cache.open(request.session, now_s, request.tenant)
        session.turns += 1
        return session, known is None

    def refused(self, session: Session, new: bool) -> None:
        """The request that it was asked by came to nothing; a new one is forgotten."""
        if new:
            self._cache.forget(session)

    def prepare(self, session: Session, new: bool, request: Request) -> None:
        """A request will be queued for it. A new one begins as its parent, where that is known, else with what an earlier
        engine has computed of it."""
        session.next_use_s, history = request.next_use_s, request.history
        parent = self._cache.sessions.get(request.fork.session) if new and request.fork is not None else None
        if parent is not None and request.fork is not None:
            self._cache.fork(parent, session, request.fork.tokens, request.fork.takes_kv)
        elif new and history is not None and history.lost == "restarted":
            session.begin(request.prompt[: history.tokens + 1], history.tokens)

    def begin(self, session: Session) -> None:
        """A request of it is under way from now on."""
        self._under_way[session.name] = self._under_way.get(session.name, 0) + 1
        self._not_idle(session.name)

    def end(self, session: Session, now_ns: int) -> None:
        """A request of it is over; it becomes idle if it has no other."""
        name = session.name
        self._under_way[name] -= 1
        if not self._under_way[name]:
            del self._under_way[name]
            self.rests(session, now_ns)

    def expect(self, name: str, next_use_s: float | None) -> None:
        """Set when the schedule will ask it again; read by offline policies only."""
        known = self._cache.sessions.get(name)
        if known is not None:
            known.next_use_s = next_use_s
            self._cache.reorder(known)

    def forget(self, name: str | None, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """Free a session, or all, where no request is under way. No plan is in flight. left: its tokens in an earlier engine,
        whose KV the disk may have."""
        if name is None:
            self._idle.clear()  # also those that the cache has let go
            self._idle_tokens = 0
        for one in [name] if name is not None else list(self._cache.sessions):
            if one in self._under_way:
                continue
            self._not_idle(one)
            known = self._cache.sessions.get(one)
            if known is not None:
                self._cache.forget(known)
            if left:
                earlier = Session(one, NOBODY_NOW, 0.0, 0.0, tenant=tenant)
                earlier.begin(left, len(left))
                self._cache.below.forget(earlier)
                earlier.close()

    def forget_surplus(self, now_ns: int) -> int | None:
        """Forget sessions that were idle for too long, or are too many; returns next_expiry_ns."""
        if self._ttl_ns is None and self._most_tokens is None:
            return None
        while True:
            expiry_ns = self.next_expiry_ns
            expired = expiry_ns is not None and expiry_ns <= now_ns
            surplus = self._most_tokens is not None and self._idle_tokens > self._most_tokens
            if not self._idle or not (expired or surplus):
                return expiry_ns
            _, oldest = self._idle.popitem(last=False)
            self._idle_tokens -= oldest.tokens
            self._facts.expired()
            if oldest.session is not None:
                self._cache.forget(oldest.session)

    def ended(self, name: str) -> None:
        """Let go of a session that nobody will ask again, without any change for others: its KV stays until its blocks
        are needed, and its tokens and chunk records are deleted then."""
        known = self._cache.sessions.get(name)
        if known is not None:
            self._over.append(known)
        for _ in range(min(_LOOKED_AT, len(self._over))):
            over = self._over.popleft()
            if over.name in self._under_way or not self._cache.forget(over, if_empty=True):
                self._over.append(over)
            else:
                self._let_go(over)

    def rests(self, session: Session, now_ns: int) -> None:
        """Count a session as idle from now on."""
        self._not_idle(session.name)
        self._idle[session.name] = _Idle(session, len(session.tokens), now_ns)
        self._idle_tokens += len(session.tokens)

    def _not_idle(self, name: str) -> None:
        """Stop counting a session, also one that the cache has let go: a request of it arrived, or it was forgotten."""
        known = self._idle.pop(name, None)
        if known is not None:
            self._idle_tokens -= known.tokens

    def _let_go(self, session: Session) -> None:
        """Record that the cache has let the session go. Where there are limits its tokens and age go on counting, so
        that which others are forgotten does not depend on it."""
        known = self._idle.get(session.name)
        if known is None or known.session is not session:
            return  # it was forgotten, and its name may be another session's by now
        if self._ttl_ns is None and self._most_tokens is None:
            self._not_idle(session.name)
        else:
            self._idle[session.name] = _Idle(None, known.tokens, known.since_ns)
