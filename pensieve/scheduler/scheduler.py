"""Decides each iteration: who is admitted, what is computed, what is copied (paper sections 4.2 and 4.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pensieve.cache.base import CacheManager, Run
from pensieve.errors import RequestRefused
from pensieve.plan import Copy, Row, Sample, StepPlan
from pensieve.scheduler.queue import WaitingQueue
from pensieve.scheduler.refusal import refusal
from pensieve.scheduler.sequence import Sequence
from pensieve.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class Step:
    """A plan and whose it is. admitted: requests that start with it, whose swap-ins it performs. members: these, and those
    that have a row. copied_for: tickets of the copies that a request waits for, and whose they are: swap-ins and urgent
    swap-outs; what is copied ahead of time is nobody's."""

    plan: StepPlan
    rows: list[tuple[Sequence, tuple[Run, ...]]]
    admitted: list[Sequence]
    members: list[Sequence]
    tickets: tuple[int, ...]
    copied_for: dict[int, Sequence]


@dataclass(slots=True)
class SchedulerCounters:
    """preempted, deferred: requests, each counted once however long it waited. steps: plans made."""

    preempted: int = 0
    deferred: int = 0
    steps: int = 0
    batched_tokens: int = 0


@dataclass(slots=True)
class _Draft:
    """The plan being made."""

    tables: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)
    swap_out: list[Copy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    copied_for: dict[int, Sequence] = field(default_factory=dict)

    def add_swap_out(self, copies: Iterable[Copy], waiting: Sequence | None) -> None:
        """waiting: who cannot go on without them; None: they are made ahead of time."""
        for copy in copies:
            self.swap_out.append(copy)
            if waiting is not None:
                self.copied_for[copy.ticket] = waiting


class Scheduler:
    """Iteration-level batching over any CacheManager; knows no tensor and no baseline.

    A request waits, runs (its blocks reserved, none of them evictable), may be preempted when decode runs out of blocks (it
    then waits again, in its order of arrival), and ends. With nothing running the admission reserve is 0, and idle chunks
    are dropped if copies cannot make room: so something always starts.

    ahead: plans are made while an earlier one is in flight. A request whose token that one samples is then planned for the
    position of that token, unseen; the cache learns of the position when the token is known. Nobody is preempted while a
    plan is in flight: `must_drain` asks for the next plan to be made with none.
    """

    def __init__(self, cache: CacheManager, settings: SchedulerSettings, max_context: int, ahead: bool = False) -> None:
        self.cache = cache
        self.must_drain = False
        self._ahead = ahead
        self._in_flight = False
        self.settings = settings
        self.queue = WaitingQueue()
        self.running: list[Sequence] = []  # by arrival
        self.counters = SchedulerCounters()
        self._slots = list(range(settings.max_batch_requests - 1, -1, -1))
        self._max_context = max_context
        self._deferred: set[int] = set()
        self._refused: list[tuple[Sequence, RequestRefused]] = []
        self._low_watermark = math.ceil(settings.swap_out_start * cache.gpu_blocks)
        self._high_watermark = math.ceil(settings.swap_out_stop * cache.gpu_blocks)
        self._reserve = math.ceil(settings.admission_reserve * cache.gpu_blocks)

    def refusal(self, sequence: Sequence) -> RequestRefused | None:
        """Why it can never be served, or None."""
        return refusal(sequence, self.cache.chunk_tokens, self.cache.request_blocks, self._max_context)

    def take_refused(self) -> list[tuple[Sequence, RequestRefused]]:
        """Requests whose conversation outgrew the machine while they waited."""
        refused, self._refused = self._refused, []
        return refused

    def submit(self, sequence: Sequence, now_s: float) -> None:
        self.cache.mark_waiting(sequence.session, now_s)
        self.queue.push(sequence)

    def plan(self, now_s: float, in_flight: bool = False) -> Step | None:
        """The next iteration; None when there is nothing to compute or copy. in_flight: an earlier one is not collected."""
        self._in_flight, self.must_drain = in_flight, False
        draft = _Draft()
        wanted = self._admit(draft, now_s)
        rows = self._compose(draft, now_s)
        self._swap_out(draft, wanted, now_s)
        while wanted and not self.running and not self.cache.outgoing:
            # Nothing runs and nothing is on its way: lose idle KV rather than stand still. More than once where the
            # policy's choice was the head's own.
            dropped = self.cache.drop(wanted, now_s)
            wanted = self._admit(draft, now_s)
            rows = self._compose(draft, now_s)
            if not dropped:
                break
        if not rows and not draft.swap_out and not draft.swap_in:
            assert not draft.tables
            return None
        plan = StepPlan(
            step=self.counters.steps,
            rows=tuple(row for _, row in rows),
            tables=tuple(draft.tables),
            swap_in=tuple(draft.swap_in),
            swap_out=tuple(draft.swap_out),
        )
        self.counters.steps += 1
        self.counters.batched_tokens += sum(row.positions for _, row in rows)
        self.cache.launched(plan.step)
        tickets = tuple(copy.ticket for copy in (*plan.swap_in, *plan.swap_out))
        members = list(dict.fromkeys([*(sequence for sequence, _ in rows), *draft.admitted]))
        for sequence in members:
            sequence.in_flight += 1
        computed = [(sequence, row.runs) for sequence, row in rows]
        return Step(plan, computed, draft.admitted, members, tickets, draft.copied_for)

    def end(self, sequence: Sequence, now_s: float) -> None:
        """The turn is over: its blocks may be evicted, and the next turn of its conversation may start."""
        self.running.remove(sequence)
        self._leave_slot(sequence)
        self.cache.release(sequence.session, now_s)
        self.queue.ended(sequence.session.name)

    def withdraw(self, sequence: Sequence, now_s: float) -> None:
        """It was cancelled while it waited (or was preempted)."""
        self.queue.remove(sequence)
        self._deferred.discard(sequence.arrival)
        self.cache.unmark_waiting(sequence.session, now_s)
        if sequence.preempted:
            self.cache.end_preempted(sequence.session, now_s)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, draft: _Draft, now_s: float) -> int:
        """Admit from the head while it fits; returns the blocks that a deferred head lacks."""
        while (head := self.queue.head()) is not None and self._slots:
            cache, session = self.cache, head.session
            error = None if head.preempted else self.refusal(head)
            if error is not None:
                self.withdraw(head, now_s)
                self._refused.append((head, error))
                continue
            keep = len(session.tokens) if head.preempted else head.kept()
            length = keep if head.preempted else head.prompt_length()
            demand = cache.demand(session, keep, length)
            reserve = self._reserve if self.running and cache.grows else 0
            lacking = demand.blocks + demand.own_available + reserve - cache.available
            if lacking > 0:
                if head.arrival not in self._deferred:
                    self._deferred.add(head.arrival)
                    self.counters.deferred += 1
                return lacking
            self._start_running(self.queue.pop(), keep, draft, now_s)
        return 0

    def _start_running(self, sequence: Sequence, keep: int, draft: _Draft, now_s: float) -> None:
        cache, session, record = self.cache, sequence.session, sequence.record
        self._deferred.discard(sequence.arrival)
        if sequence.preempted:
            admission = cache.resume(session, now_s)
            record.resumed_swapped_tokens += admission.swapped_tokens
            record.resumed_recomputed_tokens += admission.again_tokens
            sequence.preempted = False
        else:
            sequence.length_before = len(session.tokens) if sequence.request.continues else keep
            sequence.computed_before = min(session.computed, sequence.length_before)
            sequence.replaced = session.tokens[sequence.length_before :]
            admission = cache.admit(session, keep, sequence.suffix(keep), sequence.request.known_tokens, now_s)
            residency = admission.residency
            record.admitted_s = now_s
            record.prompt_tokens, record.history_tokens = residency.prompt, residency.history
            record.gpu_hit_tokens, record.cpu_hit_tokens = residency.gpu_hit, residency.cpu_hit
            record.recomputed_tokens, record.new_tokens = residency.recomputed, residency.new
            record.shared_hit_tokens = residency.shared_hit
            record.elsewhere_tokens, record.anywhere_tokens = residency.elsewhere, residency.anywhere
            record.cpu_recomputed_tokens = admission.cpu_recomputed_tokens
        cache.unmark_waiting(session, now_s)
        sequence.set_work(admission.work)
        sequence.slot = self._slots.pop()
        position = len(self.running)
        while position and self.running[position - 1].arrival > sequence.arrival:
            position -= 1
        self.running.insert(position, sequence)
        draft.admitted.append(sequence)
        draft.tables.append((sequence.slot, 0, admission.table))
        draft.swap_in.extend(admission.swap_in)
        draft.copied_for.update((copy.ticket, sequence) for copy in admission.swap_in)

    # -- iterations ---------------------------------------------------------------------------------------------------

    def _compose(self, draft: _Draft, now_s: float) -> list[tuple[Sequence, Row]]:
        rows: list[tuple[Sequence, Row]] = []
        running = [sequence for sequence in self.running if not sequence.closed] if self._ahead else self.running
        for sequence, count in self.settings.composition(running, self.settings.max_batch_tokens):
            if sequence.slot is None:
                continue  # preempted a moment ago, to make room for an earlier one
            if sequence.decoding and not self._extend(sequence, draft, rows, now_s):
                continue
            rows.append((sequence, self._row(sequence, count)))
        return rows

    def _extend(self, sequence: Sequence, draft: _Draft, rows: list[tuple[Sequence, Row]], now_s: float) -> bool:
        """A block for the next decoded position. False: the request skips this iteration, or was preempted."""
        cache, session = self.cache, sequence.session
        length = sequence.work[0][1]
        while True:
            added = cache.extend(session, length, now_s)
            if added is not None:
                if added[1]:
                    assert sequence.slot is not None
                    draft.tables.append((sequence.slot, *added))
                return True
            if cache.outgoing:
                return False  # blocks are on their way
            draft.add_swap_out(cache.swap_out(1, now_s, urgent=True), sequence)
            if cache.outgoing or cache.available:
                continue
            if self._in_flight:
                self.must_drain = True
                return False
            victim = self._latest_idle_in(rows)
            if len(self.running) > 1 and victim is not None:
                self._preempt(victim, draft, now_s)
                if victim is sequence:
                    return False
            elif not cache.drop(1, now_s):
                return False  # the other blocks are in this very plan; the next iteration preempts

    def _latest_idle_in(self, rows: list[tuple[Sequence, Row]]) -> Sequence | None:
        """The latest-arrived running request, unless this iteration already computes it."""
        planned = {id(sequence) for sequence, _ in rows}
        return next((s for s in reversed(self.running) if id(s) not in planned), None)

    def _preempt(self, sequence: Sequence, draft: _Draft, now_s: float) -> None:
        self.counters.preempted += 1
        self.running.remove(sequence)
        self._leave_slot(sequence)
        sequence.preempted = True
        self.cache.mark_waiting(sequence.session, now_s)
        draft.add_swap_out(self.cache.preempt(sequence.session, now_s), sequence)
        self.queue.push_back(sequence)

    def _row(self, sequence: Sequence, count: int) -> Row:
        runs = sequence.take(count)
        tokens, (first, _), (_, position) = sequence.session.tokens, runs[0], runs[-1]
        ids: tuple[int, ...] | None
        if position > len(tokens):  # of a token that is still being sampled
            awaited = sequence.awaited_token()
            ids = None if awaited is None else (awaited,)
        else:
            self.cache.advance(sequence.session, runs)
            ids = (tokens[first],) if count == 1 else tuple(token for run in runs for token in tokens[slice(*run)])
        sample = None
        if not sequence.work_tokens:
            drawn = sequence.request.sampling
            sample = Sample(position, sequence.noise_key, drawn.temperature, drawn.top_p, drawn.top_k)
            sequence.awaited += 1
            if self._ahead and sequence.awaited == 1:
                sequence.decode_next()
        assert sequence.slot is not None
        return Row(sequence.slot, runs, ids, sample)

    def _leave_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        sequence.slot = None

    # -- making room --------------------------------------------------------------------------------------------------

    def _swap_out(self, draft: _Draft, wanted: int, now_s: float) -> None:
        """Ahead of time below the low watermark, up to the high one (section 4.3.2); at once for a head that lacks blocks."""
        cache = self.cache
        have = cache.available + cache.outgoing
        target = self._high_watermark if have < self._low_watermark else 0
        if wanted:
            target = max(target, cache.available + wanted)
        if target > have:
            copies = cache.swap_out(target - have, now_s, urgent=bool(wanted))
            draft.add_swap_out(copies, self.queue.head() if wanted else None)
