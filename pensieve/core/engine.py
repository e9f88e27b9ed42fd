"""The step loop: admit and plan, launch, collect, commit; on any clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from pensieve.core.cache.base import CacheManager
from pensieve.core.clock import Clock
from pensieve.core.cost import CostModel
from pensieve.core.event import Event
from pensieve.core.facts import SILENT, Computed, Facts
from pensieve.core.plan import Moved, Repeats, StepResult
from pensieve.core.request import UNNUMBERED, Request, TokenArray
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.composition import SchedulerSettings
from pensieve.core.scheduler.scheduler import Forward, Scheduler, Step
from pensieve.core.scheduler.sessions import MemoryLimits
from pensieve.core.session import Session
from pensieve.core.worker import Worker

_NOT_FINITE = (
    "The logits of this request are not finite, so no token can be drawn; check the model's weights, or set "
    "model.dtype=float32."
)


class Engine:
    """Drives one scheduler and one worker; not thread-safe, owned by whoever calls `step`.

    decode_text: token ids to text, needed for stop strings only. eos: token ids that end a Free output.
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
        decode_text: Callable[[Sequence[int]], str] | None = None,
        limits: MemoryLimits | None = None,
        cost: CostModel | None = None,
        facts: Facts = SILENT,
        forward: Callable[[Scheduler], Forward] | None = None,
    ) -> None:
        """cost: what decisions go by. facts: where it is told what happens; what that returns of a request that ended is in
        its event `finished`."""
        assert worker.depth in (1, 2), "one plan in flight, or one more that is made before it is collected"
        self.cache = cache
        """For queries alone."""
        self.facts = facts
        self.scheduler = Scheduler(cache, settings, max_context, worker.depth > 1, cost, worker.computes, facts, limits)
        self.scheduler.forward = None if forward is None else forward(self.scheduler)
        self.sessions = self.scheduler.sessions
        self.worker = worker
        self.clock = clock
        self._eos = eos
        self._decode_text = decode_text
        self._active: dict[int, ActiveRequest] = {}  # requests under way, by id
        self._arrived = 0  # requests, ever
        self.progressed = False
        """The last step performed a plan or finished copies; else only an arrival or time can change anything."""
        self.ended_requests = 0
        """Ever, as events that are taken or still to be taken say."""
        self.counts_windows = False
        """Whoever takes the events wants to know how many tokens a window gave a request before its last, not which."""
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Some request waits or runs, or a plan is in flight."""
        return bool(self._active or self.scheduler.in_flight)

    @property
    def next_expiry_ns(self) -> int | None:
        """When a `step` will forget the next idle session for its age; None: not before another request ends."""
        return self.sessions.next_expiry_ns

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
        active = ActiveRequest.arrive(request, session, self._arrived, turn, self._eos, self._decode_text)
        self._arrived += 1
        error = self.scheduler.refusal(active)
        if error is not None:
            self._close(active, "refused", error.reason, now_s, str(error))
            return False
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

    def receive(self, session: str, tenant: str, tokens: TokenArray[int], lengths: Sequence[int]) -> int:
        """See Sessions.receive."""
        self.facts.at(self.clock.now_ns())
        return self.sessions.receive(session, tenant, tokens, lengths, self.clock.now_ns())

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
        events, self._events = self._events, []
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
        misread = self._fail_moves(failed) if failed else ()
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
        elif repeats is None:
            if result.moved:
                scheduler.moved(result.moved)
            self._commit_rows(step, result, now_s, misread)
        else:  # its copies ended with the last iteration, if any did
            self._commit_rows(step, result, now_s, misread)
            self._commit_repeats(step, repeats, now_s)
            self.facts.at(repeats.ended_ns[-1])
            if result.moved:
                scheduler.moved(result.moved)
        for active in step.members:
            if active.closed:
                self._release(active)
        if misread:
            scheduler.start_over(misread, self.clock.now_s())

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

    def _commit_repeats(self, step: Step, repeats: Repeats, now_s: float) -> None:
        """Apply the further iterations of a repeated plan, as one result for each of them would have."""
        assert self.scheduler.forward is not None
        emitted, earlier = self.scheduler.forward.apply(step, repeats, now_s, self.counts_windows)
        self._events += earlier
        ended_s = repeats.ended_ns[-1] / 1e9
        for (active, _), tokens in zip(step.rows, emitted, strict=False):
            self._events.append(Event("token", active.request.id, ended_s, tokens[-1]))
            if active.generated >= active.max_new_tokens:
                self._close(active, "completed", "length", ended_s)
            else:
                active.decode_next()

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

    def _fail_moves(self, failed: Sequence[Moved]) -> Sequence[ActiveRequest]:
        """Fail the requests that run on KV that one of these should have brought from the CPU. Returns those that read
        something else than was asked for."""
        failing, misread = self.scheduler.lost(failed)
        self._fail_requests(failing, "A copy between the CPU and the GPU tier failed.", self.clock.now_s())
        return misread

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
