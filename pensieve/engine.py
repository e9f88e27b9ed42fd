"""Admit, schedule, plan, launch, collect, commit: one step of serving, on any clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from pensieve.cache.base import CacheManager
from pensieve.clock import Clock
from pensieve.cost.base import CostModel, predicted_s
from pensieve.idle_sessions import IdleSessions, MemoryLimits
from pensieve.plan import StepResult
from pensieve.request import UNNUMBERED, Event, Forced, Free, Request, TurnRecord
from pensieve.scheduler.scheduler import Scheduler, Step
from pensieve.scheduler.sequence import Sequence
from pensieve.scheduler.settings import SchedulerSettings
from pensieve.session import Session
from pensieve.stop import StopSearch
from pensieve.worker.base import Worker

_LONG_ROW = 128  # positions of a row whose time the cost model should tell


@dataclass(slots=True)
class EngineCounters:
    """Times in ns. schedule: scheduler and cache, on the wall, also where the worker is simulated. predicted, predictable:
    the cost model's time and the measured one, of the iterations that computed a single row of at least _LONG_ROW.
    """

    steps: int = 0
    schedule_ns: int = 0
    compute_ns: int = 0
    stall_ns: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    failed_steps: int = 0
    predicted_ns: int = 0
    predictable_ns: int = 0
    forgotten_sessions: int = 0


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
    ) -> None:
        assert worker.depth in (1, 2), "one plan in flight, or one more that is made before it is collected"
        self.cache = cache
        self.scheduler = Scheduler(cache, settings, max_context, ahead=worker.depth > 1)
        self.worker = worker
        self.clock = clock
        self.counters = EngineCounters()
        self._eos = eos
        self._decode_text = decode_text
        self._launched: deque[Step] = deque()  # oldest first
        self._sequences: dict[int, Sequence] = {}
        self._pending: dict[str, int] = {}  # conversation -> requests under way
        self._cost = cost
        self._idle = IdleSessions(limits or MemoryLimits())
        self._arrivals = 0
        self.progressed = False
        """The last step performed a plan or finished copies; else only an arrival or time can change anything."""
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Some request waits or runs, or a plan is in flight."""
        return bool(self._sequences or self._launched)

    @property
    def next_expiry_ns(self) -> int | None:
        """When a `step` will forget the next idle conversation for its age; None: not before another request ends."""
        return self._idle.next_expiry_ns

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served comes out of the next `step` as refused."""
        self._forget_surplus()  # may be this very conversation: whoever returns too late begins anew
        now_s = self.clock.now_s()
        known = self.cache.find(request.session)
        session = known or self.cache.open(request.session, now_s)
        session.turns += 1
        record = TurnRecord(
            session=request.session,
            turn=session.turns if request.turn == UNNUMBERED else request.turn,
            iteration=request.iteration,
            label=request.label,
            phase=request.phase,
            stream=request.stream,
            intended_s=request.intended_s,
            arrived_s=now_s,
            request_id=request.id,
            h2d_bytes=0,
            d2h_bytes=0,
        )
        noise_key = request.sampling.noise_key(request.session, record.turn)
        sequence = Sequence(request, record, self._arrivals, session, noise_key)
        if isinstance(request.output, Free) and request.output.stop and self._decode_text is not None:
            sequence.stop = StopSearch(self._decode_text, request.output.stop)
        self._arrivals += 1
        error = self.scheduler.refusal(sequence)
        if error is not None:
            if known is None:
                self.cache.forget(session)
            self._close(sequence, "refused", error.reason, now_s, str(error))
            return
        session.next_use_s = request.next_use_s
        self._sequences[request.id] = sequence
        self._pending[session.name] = self._pending.get(session.name, 0) + 1
        self._idle.remove(session)
        self.scheduler.submit(sequence, now_s)

    def cancel(self, request_id: int, status: str) -> None:
        """What was generated so far stays in the conversation; without any output the turn is undone."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.closed:
            return
        self._close(sequence, status, None, self.clock.now_s())
        if not sequence.in_flight:
            self._retire(sequence)

    def expect(self, session: str, next_use_s: float | None) -> None:
        """When a conversation will be asked again, by the schedule; read by offline policies only."""
        known = self.cache.find(session)
        if known is not None:
            self.cache.expect(known, next_use_s)

    def forget(self, session: str | None) -> None:
        """Free conversations that have no request under way; what is in flight is collected first."""
        while self._launched:
            self._collect(None)
        for name in [session] if session is not None else self.cache.names():
            known = self.cache.find(name)
            if known is not None and name not in self._pending:
                self._idle.remove(known)
                self.cache.forget(known)

    def step(self, until_ns: int | None) -> list[Event]:
        """One iteration, or finished copies, or nothing by `until_ns`; returns what requests got."""
        while len(self._launched) < self.worker.depth and not (self._launched and self.scheduler.must_drain):
            step = self._plan()
            if step is None:
                break
            self._launched.append(step)
            self.worker.launch(step.plan, until_ns)
        self._collect(until_ns)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """What happened since the last call; `step` returns it too."""
        events, self._events = self._events, []
        return events

    # -- how --------------------------------------------------------------------------------------------------------

    def _plan(self) -> Step | None:
        began = time.perf_counter_ns()
        now_s = self.clock.now_s()
        self._forget_surplus()
        step = self.scheduler.plan(now_s, in_flight=bool(self._launched))
        for sequence, error in self.scheduler.take_refused():
            self._close(sequence, "refused", error.reason, now_s, str(error))
            self._leave(sequence)
        self.counters.schedule_ns += time.perf_counter_ns() - began
        return step

    def _forget_surplus(self) -> None:
        for session in self._idle.take_surplus(self.clock.now_ns()):
            self.counters.forgotten_sessions += 1
            self.cache.forget(session)

    def _collect(self, until_ns: int | None) -> None:
        result = self.worker.collect(until_ns)
        self.progressed = result is not None
        if result is not None:
            began = time.perf_counter_ns()
            self._commit(result)
            self.counters.schedule_ns += time.perf_counter_ns() - began

    def _commit(self, result: StepResult) -> None:
        counters = self.counters
        counters.compute_ns += result.compute_ns
        counters.stall_ns += result.stall_ns
        counters.h2d_bytes += result.h2d_bytes
        counters.d2h_bytes += result.d2h_bytes
        if result.failed:
            self._lose(result.failed)
        if result.step is None:
            self.cache.complete(result.done)
            return
        step = self._launched.popleft()
        assert step.plan.step == result.step, "plans are collected in the order of their launch"
        counters.steps += 1
        self._count_copies(step, result)
        now_s = result.ended_ns[-1] / 1e9 if result.ended_ns else self.clock.now_s()
        self.cache.collected(result.step)
        for sequence in step.members:
            sequence.in_flight -= 1
        if result.error is not None:
            self.cache.complete([ticket for ticket in result.done if ticket not in step.tickets])
            self._fail(step, result.error, now_s)
        else:
            self.cache.complete(result.done)
            self._hand_out(step, result, now_s)
        for sequence in step.members:
            if sequence.closed and not sequence.in_flight:
                self._retire(sequence)

    def _count_copies(self, step: Step, result: StepResult) -> None:
        """The bytes that the step moved, to the turns that waited for them. Blocks are equally large; of a step that failed
        nobody knows what it moved. A record does not change once it was given out."""
        for name, copies, moved in (
            ("h2d_bytes", step.plan.swap_in, result.h2d_bytes),
            ("d2h_bytes", step.plan.swap_out, result.d2h_bytes),
        ):
            blocks = sum(len(copy.src) for copy in copies)
            for copy in copies:
                sequence = step.copied_for.get(copy.ticket)
                if sequence is not None and not sequence.closed:
                    before = getattr(sequence.record, name)
                    known = before is not None and result.error is None
                    setattr(sequence.record, name, before + moved // blocks * len(copy.src) if known else None)

    def _hand_out(self, step: Step, result: StepResult, now_s: float) -> None:
        """The tokens to their requests. A row of a request that is closed is waste: its token is dropped, and its position
        was never the cache's."""
        counters = self.counters
        if self._cost is not None and len(step.rows) == 1 and step.plan.rows[0].positions >= _LONG_ROW:
            predicted = predicted_s(self._cost, step.rows[0][1], self.cache.chunk_tokens)
            counters.predicted_ns += round(predicted * 1e9)
            counters.predictable_ns += result.compute_ns
        for sequence, _ in step.rows:
            if sequence.closed:
                continue
            record = sequence.record
            record.compute_ms = (record.compute_ms or 0.0) + result.compute_ns / 1e6
            record.transfer_ms = (record.transfer_ms or 0.0) + result.stall_ns / 1e6
            assert sequence.slot is not None
            token = result.tokens.get(sequence.slot)
            if token is not None:
                self._append(sequence, token, result.margins.get(sequence.slot), now_s)

    def _append(self, sequence: Sequence, token: int, margin: float | None, now_s: float) -> None:
        record, output, session = sequence.record, sequence.request.output, sequence.session
        sequence.awaited -= 1
        if isinstance(output, Forced):
            token = output.tokens[sequence.generated]
        session.append(token)
        record.token_ids.append(token)
        record.margins.append(float("nan") if margin is None else margin)
        record.emitted_s.append(now_s)
        first = record.first_token_s is None
        if first:
            record.first_token_s = now_s
        self._events.append(Event("first_token" if first else "token", record.request_id, now_s, token))
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            self._close(sequence, "completed", reason, now_s)
            return
        if sequence.awaited:  # the row of this token is in flight already
            self.cache.advance(session, ((len(session.tokens) - 1, len(session.tokens)),))
        sequence.decode_next()

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        output = sequence.request.output
        if isinstance(output, Free):
            if token in self._eos and not output.ignore_eos:
                return "eos"
            if sequence.stop is not None and sequence.stop.push(token):
                return "stop"
        return "length" if sequence.generated >= output.max_new_tokens else None

    def _fail(self, step: Step, error: str, now_s: float) -> None:
        """The plan's requests, also those it only swapped in, fail and their turns are undone; nobody else is touched, unless
        he was let in behind this plan to a cache whose conversations share blocks that it wrote."""
        self.counters.failed_steps += 1
        spoilt = [*step.members, *self._running_on(self.cache.void(step.tickets))]
        for sequence, runs in step.rows:
            self.cache.fail(sequence.session, runs)
        if self.cache.shares:
            spoilt += [sequence for later in self._launched for sequence in later.admitted]
        self._spoil(spoilt, error, now_s)

    def _lose(self, tickets: Many[int]) -> None:
        """Copies failed by themselves: who runs on what they should have brought cannot go on."""
        lost = self._running_on(self.cache.void(tickets))
        self._spoil(lost, "A copy between the CPU and the GPU tier failed.", self.clock.now_s())

    def _running_on(self, sessions: Many[Session]) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.running if sequence.session in sessions]

    def _spoil(self, spoilt: Many[Sequence], error: str, now_s: float) -> None:
        """These requests fail, and what plans in flight compute for them is not valid."""
        for later in self._launched:
            for sequence, runs in later.rows:
                if sequence in spoilt:
                    self.cache.fail(sequence.session, runs)
        for sequence in spoilt:
            if not sequence.closed:
                self._close(sequence, "failed", None, now_s, error)
            if not sequence.in_flight:
                self._retire(sequence)

    def _close(
        self, sequence: Sequence, status: str, reason: str | None, now_s: float, error: str | None = None
    ) -> None:
        """Over for whoever asked. `_retire` or `_leave` follows, once nothing of it is in flight."""
        record = sequence.record
        record.status, record.finish_reason, record.error = status, reason, error
        record.close(now_s)
        sequence.closed = True
        self._events.append(Event("finished", record.request_id, now_s, turn=record))

    def _retire(self, sequence: Sequence) -> None:
        """Give back its slot and pins, as of when it was closed; a turn that does not stand is undone."""
        record, session = sequence.record, sequence.session
        if self._sequences.get(record.request_id) is not sequence:
            return  # it has
        assert record.finished_s is not None
        if sequence.slot is not None:
            self.scheduler.end(sequence, record.finished_s)
        else:
            self.scheduler.withdraw(sequence, record.finished_s)
        if record.admitted_s is not None and not record.stands:
            length = min(sequence.length_before, len(session.tokens))
            self.cache.truncate(session, length, sequence.computed_before)
            session.extend(sequence.replaced)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.request.id, None) is not None:
            name = sequence.record.session
            self._pending[name] -= 1
            if not self._pending[name]:
                del self._pending[name]
                self._idle.add(sequence.session, self.clock.now_ns())
