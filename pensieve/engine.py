"""The step loop: admit and plan, launch, collect, commit; on any clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import repeat
from typing import Literal

from pensieve.cache.base import CacheManager
from pensieve.clock import Clock
from pensieve.cost.base import CostModel
from pensieve.event import Event
from pensieve.facts import SILENT, Computed, Facts
from pensieve.idle_sessions import IdleSessions, MemoryLimits
from pensieve.plan import Repeats, StepResult
from pensieve.request import Request, TokenArray
from pensieve.scheduler.composition import SchedulerSettings
from pensieve.scheduler.scheduler import Scheduler, Step
from pensieve.scheduler.sequence import Sequence, turn_of
from pensieve.session import Session
from pensieve.worker.base import Worker

_LOOKED_AT = 4  # ended sessions looked at whenever one more ends; so at most one in four of those kept has no KV left
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
        decode_text: Callable[[Many[int]], str] | None = None,
        limits: MemoryLimits | None = None,
        cost: CostModel | None = None,
        facts: Facts = SILENT,
    ) -> None:
        """cost: what decisions go by. facts: where it is told what happens; what that returns of a request that ended is in
        its event `finished`."""
        assert worker.depth in (1, 2), "one plan in flight, or one more that is made before it is collected"
        self.cache = cache
        self.facts = facts
        cache.report_to(facts)
        self.scheduler = Scheduler(
            cache, settings, max_context, ahead=worker.depth > 1, cost=cost, computes=worker.computes, facts=facts
        )
        self.worker = worker
        self.clock = clock
        self._eos = eos
        self._decode_text = decode_text
        self._launched: deque[Step] = deque()  # oldest first
        self._sequences: dict[int, Sequence] = {}  # requests under way, by id
        self._under_way: dict[str, int] = {}  # session name -> its requests under way
        self._idle = IdleSessions(limits or MemoryLimits())
        self._arrived = 0  # requests, ever
        self._over: deque[Session] = deque()  # sessions that will not be asked again
        self.progressed = False
        """The last step performed a plan or finished copies; else only an arrival or time can change anything."""
        self.counts_windows = False
        """Whoever takes the events wants to know how many tokens a window gave a request before its last, not which."""
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Some request waits or runs, or a plan is in flight."""
        return bool(self._sequences or self._launched)

    @property
    def next_expiry_ns(self) -> int | None:
        """When a `step` will forget the next idle session for its age; None: not before another request ends."""
        return self._idle.next_expiry_ns

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served comes out of the next `step` as refused."""
        self.facts.at(self.clock.now_ns())
        self._forget_surplus()  # may be this very session: whoever returns too late begins anew
        known = self.cache.find(request.session)
        session = known or self.cache.open(request.session, self.clock.now_s(), request.tenant)
        try:
            taken = self._take(request, session, known is None)
        except BaseException:  # nothing of the request stays
            session.turns -= 1
            if known is None:
                self.cache.forget(session)
            raise
        if known is None and not taken:
            self.cache.forget(session)

    def _take(self, request: Request, session: Session, new: bool) -> bool:
        """Queue a request, unless it can never be served. Counts as under way what nothing can refuse any more."""
        now_s = self.clock.now_s()
        session.turns += 1
        self.facts.arrived(request, turn_of(request, session), now_s)
        sequence = Sequence.arrive(request, session, self._arrived, self._eos, self._decode_text)
        self._arrived += 1
        error = self.scheduler.refusal(sequence)
        if error is not None:
            self._close(sequence, "refused", error.reason, now_s, str(error))
            return False
        session.next_use_s = request.next_use_s
        if new and request.forgotten is not None and request.forgotten[1] == "restarted":
            self.cache.recall(session, request.prompt[: request.forgotten[0] + 1])
        parent = self.cache.find(request.fork.session) if new and request.fork is not None else None
        if parent is not None and request.fork is not None:
            self.cache.fork(parent, session, request.fork.tokens, request.fork.takes_kv)
        self.scheduler.submit(sequence, now_s)
        self._sequences[request.id] = sequence
        self._under_way[session.name] = self._under_way.get(session.name, 0) + 1
        self._idle.remove(session.name)
        return True

    def failed(self, request: Request, error: Exception) -> None:
        """End a request that `submit` raised this error for; the next `step` returns its end. Others go on."""
        now_s = self.clock.now_s()
        message = f"The engine cannot take the request ({type(error).__name__}: {error})."
        self.facts.arrived(request, request.turn, now_s)
        told = self.facts.ended(request, "failed", None, now_s, message)
        self._events.append(Event("finished", request.id, now_s, turn=told))

    def cancel(self, request_id: int, status: str) -> None:
        """End a request early. What it generated so far stays in the session; a turn without any output is undone."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.closed:
            return
        self.facts.at(self.clock.now_ns())
        self._close(sequence, status, None, self.clock.now_s())
        self._release(sequence)

    def expect(self, session: str, next_use_s: float | None) -> None:
        """Set when the schedule will ask a session again; read by offline policies only."""
        known = self.cache.find(session)
        if known is not None:
            self.cache.expect(known, next_use_s)

    def forget(self, session: str | None) -> None:
        """Free sessions that have no request under way; what is in flight is collected first."""
        while self._launched:
            self._collect(None)
        self.facts.at(self.clock.now_ns())
        if session is None:
            self._idle.clear()
        for name in [session] if session is not None else self.cache.names():
            if name in self._under_way:
                continue
            self._idle.remove(name)
            known = self.cache.find(name)
            if known is not None:
                self.cache.forget(known)

    def ended(self, session: str) -> None:
        """Let go of a session that nobody will ask again, without any change for others: its KV stays until its blocks
        are needed, and its tokens and chunk records are deleted then."""
        known = self.cache.find(session)
        if known is not None:
            self._over.append(known)
        for _ in range(min(_LOOKED_AT, len(self._over))):
            over = self._over.popleft()
            if over.name in self._under_way or not self.cache.let_go(over):
                self._over.append(over)
            else:
                self._idle.let_go(over)

    def disown(self, session: str, tenant: str, tokens: TokenArray[int]) -> None:
        """`forget` a session, and delete what an earlier engine left of it on disk. tokens: all but the last had KV.
        Does nothing while it has a request under way."""
        self.forget(session)  # it may have been asked since, and the turn come to nothing
        if tokens and self.cache.find(session) is None:
            known = self.cache.open(session, self.clock.now_s(), tenant)
            self.cache.recall(known, tokens)
            self.cache.forget(known)

    def receive(self, session: str, tenant: str, tokens: TokenArray[int], lengths: Many[int]) -> int:
        """Take over KV of a session from another engine (CacheManager.receive). Returns how many tokens of it were
        taken: 0 while it has a request under way."""
        if session in self._under_way:
            return 0
        self.facts.at(self.clock.now_ns())
        known = self.cache.open(session, self.clock.now_s(), tenant)
        taken = self.cache.receive(known, tokens, lengths, self.clock.now_s())
        self._idle.add(known, self.clock.now_ns())
        return taken

    def step(self, until_ns: int | None) -> list[Event]:
        """Perform one iteration, or finish copies, or reach `until_ns`; returns what requests got."""
        while self._may_launch() and (step := self._plan(until_ns)) is not None:
            self._launched.append(step)
            self.worker.launch(step.plan)
        self._collect(until_ns)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return, once, the events since the last call; `step` returns them too."""
        events, self._events = self._events, []
        return events

    # -- plan ---------------------------------------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        launched = len(self._launched)
        return launched < self.worker.depth and not (launched and self.scheduler.must_drain)

    def _plan(self, until_ns: int | None) -> Step | None:
        """Plan the next iteration, and close the requests that turn out to be too large for the machine."""
        began = time.perf_counter_ns()
        now_s = self.clock.now_s()
        self.facts.at(self.clock.now_ns())
        self._forget_surplus()
        expiry_ns = self._idle.next_expiry_ns
        horizon_ns = until_ns if expiry_ns is None or (until_ns is not None and until_ns < expiry_ns) else expiry_ns
        step = self.scheduler.plan(now_s, in_flight=bool(self._launched), horizon_ns=horizon_ns)
        for sequence, error in self.scheduler.take_refused():
            self._close(sequence, "refused", error.reason, now_s, str(error))
            self._remove(sequence)
        self.facts.scheduled(time.perf_counter_ns() - began)
        return step

    def _forget_surplus(self) -> None:
        """Forget sessions that were idle for too long, or are too many."""
        for session in self._idle.take_surplus(self.clock.now_ns()):
            self.facts.expired()
            if session is not None:
                self.cache.forget(session)

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
        self.facts.at(self.clock.now_ns() if result.ended_ns is None else result.ended_ns)
        self.cache.remove_from_disk(result.unkept)
        repeats = result.repeats if result.repeats is not None and result.repeats.ended_ns else None
        if result.failed and repeats is None:
            self._fail_copies(result.failed)
        misread = self._running_on(self.cache.void(result.unread)) if result.unread else []
        if self.scheduler.disk_reads is not None:
            self.scheduler.disk_reads.done((*result.done, *result.unread))
        if result.step is None:
            self.facts.collected(None, {}, result)
            self.cache.complete(result.done)
            self._start_over(misread)
            return
        step = self._launched.popleft()
        assert step.plan.step == result.step, "plans are collected in the order of their launch"
        self.facts.collected(step.plan, step.copied_for, result)
        now_s = self.clock.now_s() if result.ended_ns is None else result.ended_ns / 1e9
        self.cache.collected(result.step)
        for sequence in step.members:
            sequence.collected()
        if result.error is not None:
            self.cache.complete([ticket for ticket in result.done if ticket not in step.tickets])
            self._fail_step(step, result.error, now_s)
        elif repeats is None:
            self.cache.complete(result.done)
            self._commit_rows(step, result, now_s, misread)
        else:  # its copies ended with the last iteration, if any did
            self._commit_rows(step, result, now_s, misread)
            self._commit_repeats(step, repeats, now_s)
            self.facts.at(repeats.ended_ns[-1])
            self._fail_copies(result.failed)
            self.cache.complete(result.done)
        for sequence in step.members:
            if sequence.closed:
                self._release(sequence)
        self._start_over(misread)

    def _commit_rows(self, step: Step, result: StepResult, now_s: float, misread: Many[Sequence]) -> None:
        """Give times and tokens to the requests that had a row. A request that was closed meanwhile gets none, and the
        cache was never told of its position. misread: requests whose rows read something else from disk than was asked for;
        what they computed is discarded."""
        drawn: list[int | None] = []
        rows: list[Computed] = []
        for sequence, _ in step.rows:
            slot, token = sequence.slot, None
            if not (sequence.closed or sequence in misread or slot in result.not_finite):
                assert slot is not None
                sampled = result.tokens.get(slot)
                token = None if sampled is None else sequence.append(sampled)
                rows.append((sequence.request.id, token, result.margins.get(slot)))
            drawn.append(token)
        self.facts.computed(step.plan, result, rows, now_s)
        for (sequence, runs), token in zip(step.rows, drawn, strict=True):
            if token is not None:
                self._emit(sequence, token, now_s)
            elif sequence in misread:
                sequence.discard_result()
                self.cache.invalidate(sequence.session, runs)
            elif sequence.slot in result.not_finite:
                # What it read may be the cause: none of it is read again, neither by this conversation nor by another.
                self.cache.invalidate(sequence.session, ((0, runs[-1][1]),))
                self._fail_requests([sequence], _NOT_FINITE, now_s)

    def _commit_repeats(self, step: Step, repeats: Repeats, now_s: float) -> None:
        """Apply the further iterations of a repeated plan, as one result for each of them would have."""
        times_s = [ended_ns / 1e9 for ended_ns in repeats.ended_ns]
        decodes = step.rows[: step.sampled]
        emitted: list[TokenArray[int]] = []
        for sequence, _ in decodes:
            assert sequence.slot is not None
            emitted.append(sequence.repeated(repeats.tokens[sequence.slot]))
        self.facts.repeated(step.plan, repeats, [sequence.request.id for sequence, _ in step.rows], emitted)
        self.scheduler.repeated(step, [now_s, *times_s[:-1]])
        if emitted:
            self._tell_earlier([sequence.request.id for sequence, _ in decodes], times_s[:-1], emitted)
        for (sequence, _), tokens in zip(decodes, emitted, strict=True):
            self._events.append(Event("token", sequence.request.id, times_s[-1], tokens[-1]))
            if sequence.generated >= sequence.max_new_tokens:
                self._close(sequence, "completed", "length", times_s[-1])
            else:
                sequence.decode_next()

    def _tell_earlier(self, ids: list[int], times_s: list[float], emitted: list[TokenArray[int]]) -> None:
        """Emit the tokens of all iterations of a window but the last. times_s: when each of these iterations ended."""
        if self.counts_windows:
            if times_s:
                self._events += [Event("token", one, times_s[-1], tokens=len(times_s)) for one in ids]
            return
        *earlier, _ = zip(*emitted, strict=True)  # the tokens of each iteration
        for at_s, tokens in zip(times_s, earlier, strict=True):
            self._events += [Event("token", *each) for each in zip(ids, repeat(at_s), tokens)]

    def _emit(self, sequence: Sequence, token: int, now_s: float) -> None:
        """Tell of the token that was appended to a request, and close the request if it was the last."""
        kind: Literal["first_token", "token"] = "token" if sequence.generated > 1 else "first_token"
        self._events.append(Event(kind, sequence.request.id, now_s, token))
        reason = sequence.finish_reason(token)
        if reason is not None:
            self._close(sequence, "completed", reason, now_s)
            return
        if sequence.awaited:  # a plan in flight computes this token's position already
            length = len(sequence.session.tokens)
            self.cache.advance(sequence.session, ((length - 1, length),))
        sequence.decode_next()

    # -- failure ------------------------------------------------------------------------------------------------------

    def _fail_step(self, step: Step, error: str, now_s: float) -> None:
        """Fail the requests that had a part of the plan, also those it only swapped in, and those that run on KV that its
        copies should have brought. Where sessions share blocks, a request that was admitted after the plan was
        launched may read a block that it wrote, and fails too. Nobody else is touched."""
        failing = [*step.members, *self._running_on(self.cache.void(step.tickets))]
        for sequence, runs in step.rows:
            self.cache.invalidate(sequence.session, runs)
        if self.cache.shares:
            failing += [sequence for later in self._launched for sequence in later.admitted]
        self._fail_requests(failing, error, now_s)

    def _fail_copies(self, tickets: Many[int]) -> None:
        """Fail the requests that run on KV that these copies should have brought."""
        failing = self._running_on(self.cache.void(tickets))
        self._fail_requests(failing, "A copy between the CPU and the GPU tier failed.", self.clock.now_s())

    def _start_over(self, misread: Many[Sequence]) -> None:
        """Make these requests wait again, and compute what they could not read."""
        for sequence in misread:
            if not sequence.closed and sequence.slot is not None:
                self.scheduler.start_over(sequence, self.clock.now_s())

    def _running_on(self, sessions: Many[Session]) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.running if sequence.session in sessions]

    def _fail_requests(self, failing: Many[Sequence], error: str, now_s: float) -> None:
        """Close these requests as failed; what plans in flight compute for them is not valid."""
        for later in self._launched:
            for sequence, runs in later.rows:
                if sequence in failing:
                    self.cache.invalidate(sequence.session, runs)
        for sequence in failing:
            if not sequence.closed:
                self._close(sequence, "failed", None, now_s, error)
            self._release(sequence)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _close(
        self, sequence: Sequence, status: str, reason: str | None, now_s: float, error: str | None = None
    ) -> None:
        """End the request for whoever asked, and emit `finished`."""
        sequence.close(status, now_s)
        told = self.facts.ended(sequence.request, status, reason, now_s, error)
        self._events.append(Event("finished", sequence.request.id, now_s, turn=told))

    def _release(self, sequence: Sequence) -> None:
        """Give back slot and blocks of a closed request once nothing of it is in flight, as of the time at which it was
        closed, and undo a turn that does not stand."""
        if sequence.in_flight or self._sequences.get(sequence.request.id) is not sequence:
            return  # not yet, or done already
        if sequence.admitted:  # before its chunks get their places among the victims
            sequence.session.hint = sequence.request.hint if sequence.status == "completed" else None
        self.scheduler.remove(sequence, sequence.closed_s)
        if sequence.undone:
            session = sequence.session
            length = min(sequence.length_before, len(session.tokens))
            self.cache.truncate(session, length, sequence.computed_before)
            session.extend(sequence.replaced)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Stop counting the request as under way; its session becomes idle if it has no other."""
        if self._sequences.pop(sequence.request.id, None) is not None:
            name = sequence.session.name
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]
                self._idle.add(sequence.session, self.clock.now_ns())
