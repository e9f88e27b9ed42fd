"""Decides each iteration: who is admitted, what is computed, what is copied (paper sections 4.2 and 4.3)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pensieve.core.cache.base import CacheManager, Copying, Room
from pensieve.core.facts import Facts
from pensieve.core.plan import NO_DECODES, Decodes, Move, Moved, Row, StepPlan, StepResult
from pensieve.core.request import Event
from pensieve.core.scheduler.active_request import ActiveRequest, WaitingQueue
from pensieve.core.session import Run, Session
from pensieve.errors import ConfigError

Share = tuple[ActiveRequest, int]
"""A running request and how many positions of its work this iteration computes."""

Composition = Callable[[Sequence[ActiveRequest], int], list[Share]]
"""From the running requests and the token budget of an iteration to its shares."""


def unified(running: Sequence[ActiveRequest], max_tokens: int) -> list[Share]:
    """Prefill and decode in one batch (paper section 4.2): decodes first, since they are one token each and somebody reads
    them; the rest of the budget goes to prefills, first come, first served."""
    shares: list[Share] = []
    others: list[ActiveRequest] = []
    for active in running:
        if active.work_tokens == 1 and active.decoding:
            shares.append((active, 1))
        else:
            others.append(active)
    shares = shares[:max_tokens]
    return shares + _prefills(others, max_tokens - len(shares))


def split(running: Sequence[ActiveRequest], max_tokens: int) -> list[Share]:
    """Prefill and decode in separate iterations, prefill first: the paper's ablation."""
    prefills = _prefills((active for active in running if not active.decoding), max_tokens)
    return prefills or [(active, 1) for active in running if active.decoding][:max_tokens]


def _prefills(running: Iterable[ActiveRequest], budget: int) -> list[Share]:
    shares: list[Share] = []
    for active in running:
        if budget <= 0:
            break
        if active.work_tokens:
            count = min(active.work_tokens, budget)
            shares.append((active, count))
            budget -= count
    return shares


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How iterations are composed and when memory is made free; the defaults are the paper's.

    max_batch_tokens: positions an iteration computes, at most. max_batch_requests: requests that run at once.
    swap_out_start, swap_out_stop: the low and the high watermark of available blocks; admission_reserve: what an admission
    leaves. All three are shares of the GPU blocks (sections 4.3.2 and 4.3.5). admit_beyond_budget: admit whoever fits into
    memory, so that what it has on the CPU is loaded before its turn to compute; False: only while this iteration has
    positions left, as vLLM does. Whoever starts the engine makes strategies of copy_ahead and load_apart
    (plugins/overlap.py).
    """

    composition: Composition = unified
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    swap_out_start: float = 0.25
    swap_out_stop: float = 0.30
    admission_reserve: float = 0.10
    copy_ahead: str = "paper"
    load_apart: bool = False
    admit_beyond_budget: bool = True

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.max_batch_requests < 1:
            raise ConfigError("scheduler.max_batch_tokens and scheduler.max_batch_requests must be at least 1.")
        if not 0 <= self.swap_out_start <= self.swap_out_stop <= 1:
            raise ConfigError("scheduler.swap_out_start and swap_out_stop are shares with 0 <= start <= stop <= 1.")
        if not 0 <= self.admission_reserve < 1:
            raise ConfigError("scheduler.admission_reserve is a share of the GPU blocks, at least 0 and below 1.")


@dataclass(slots=True)
class Step:
    """A plan, and the requests it is made of.

    rows: each row's request and its runs. sampled: how many rows, the first ones, yield a token. admitted: requests that
    start with this plan, which performs their swap-ins. members: these, and those that have a row.
    """

    plan: StepPlan
    rows: list[tuple[ActiveRequest, tuple[Run, ...]]]
    sampled: int
    admitted: list[ActiveRequest]
    members: list[ActiveRequest]


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
    admitted: list[ActiveRequest] = field(default_factory=list)


class Joining(Protocol):
    """When a request whose KV is being loaded joins the batch; see Loads of plugins/overlap.py."""

    @property
    def expected(self) -> bool: ...

    def begin(self, active: ActiveRequest, blocks: int, now_s: float) -> None: ...

    def end(self, active: ActiveRequest) -> None: ...

    def joined(self, running: Sequence[ActiveRequest], max_tokens: int, now_s: float) -> Sequence[ActiveRequest]: ...


class Forward(Protocol):
    """Decodes without rows, and plans that stand for several iterations, for a worker that computes nothing.

    members: the requests that decode without rows. events: where what they get is told. decodes: what the plan being made
    computes of them. Iterators are of members that have their last token, each after its event. counted: see
    Engine.counts_windows.
    """

    events: list[Event]
    decodes: Decodes

    @property
    def members(self) -> Mapping[ActiveRequest, Any]: ...

    def stand(self, running: Sequence[ActiveRequest], now_s: float) -> Sequence[ActiveRequest]:
        """Take the blocks that members need for the plan being made. Returns who has rows: all, where a member cannot simply
        go on."""
        ...

    def iterations(self, rows: list[tuple[ActiveRequest, Row]]) -> int:
        """How many iterations the plan of these rows and the members may stand for."""
        ...

    def performed(self, result: StepResult, now_s: float, counted: bool) -> Iterator[ActiveRequest]:
        """The members have gone through the first iteration of a plan."""
        ...

    def repeated(self, step: Step, result: StepResult, now_s: float, counted: bool) -> Iterator[ActiveRequest]:
        """Make members of those whose row gave a token, and apply the plan's further iterations."""
        ...

    def leave(self, going: Iterable[ActiveRequest]) -> None:
        """These members are none any longer; they have all that they got."""
        ...


@dataclass(frozen=True, slots=True)
class Strategies:
    """How the scheduler differs from the paper's: None: not at all, and each plan is one iteration."""

    copying: Callable[[Room], Copying] | None = None
    joining: Joining | None = None
    forward: Callable[[Scheduler], Forward] | None = None


class Scheduler:
    """Iteration-level batching over any CacheManager; knows no tensor and no baseline.

    A request waits, runs (its blocks reserved, none of them evictable), may be preempted when decode runs out of blocks (it
    then waits again, in its order of arrival), and ends. With nothing running the admission reserve is 0, and idle chunks
    are dropped if copies cannot make room: so something always starts.

    ahead: plans are made while an earlier one is in flight. A request whose token that one samples is then planned for the
    position of that token, unseen; the cache learns of the position when the token is known. Nobody is preempted while a
    plan is in flight: `must_drain` asks for the next plan to be made with none.

    computes: as the worker says; if not, rows need no token ids.
    """

    def __init__(
        self,
        cache: CacheManager,
        settings: SchedulerSettings,
        ahead: bool,
        computes: bool,
        facts: Facts,
        strategies: Strategies,
    ) -> None:
        cache.begin(facts=facts)
        self.cache, self.room = cache, cache.room
        self.in_flight: deque[Step] = deque()
        """Plans that are launched and not collected, the oldest first."""
        self.facts = facts
        self.must_drain = False
        """The next plan is to be made when none is in flight."""
        self._ahead = ahead
        self._joining = strategies.joining
        self._reading: dict[int, int] = {}  # by arrival of a request that waits for a tier below, the ticket
        self._computes = computes
        self.settings = settings
        self.queue = WaitingQueue()
        self.running: list[ActiveRequest] = []  # by arrival
        self.counters = SchedulerCounters()
        self._slots = list(range(settings.max_batch_requests - 1, -1, -1))
        self.deferred: set[int] = set()  # arrivals of the requests that were counted as deferred
        self._unsent = _Draft()  # admissions that no plan has told the worker of
        cache.room.low = math.ceil(settings.swap_out_start * cache.gpu_blocks)
        cache.room.high = math.ceil(settings.swap_out_stop * cache.gpu_blocks)
        self.copying = cache.room if strategies.copying is None else strategies.copying(cache.room)
        self._reserve = math.ceil(settings.admission_reserve * cache.gpu_blocks)
        self.forward = None if strategies.forward is None else strategies.forward(self)
        self.standing: Mapping[ActiveRequest, Any] = {} if self.forward is None else self.forward.members
        """Requests that decode without rows."""

    def submit(self, active: ActiveRequest) -> None:
        self._waits(active)
        self.queue.push(active)

    def _waits(self, active: ActiveRequest) -> None:
        active.session.mark_waiting(active.arrival)
        self.cache.reorder(active.session)

    def _waits_no_more(self, active: ActiveRequest) -> None:
        active.session.unmark_waiting(active.arrival)
        self.cache.reorder(active.session)

    def plan(self, now_s: float, horizon_ns: int | None = None) -> Step | None:
        """Plan the next iteration; None when there is nothing to compute or copy. The plan is in flight from now on.
        horizon_ns: when something from outside may change what is planned."""
        self.must_drain = bool(self.in_flight) and self._must_preempt()
        if self.must_drain:
            return None
        draft, self._unsent = self._unsent, _Draft()
        if draft.admitted:
            draft.admitted = [active for active in draft.admitted if active.slot is not None and not active.closed]
        lacking = self._admit(draft, now_s)
        rows = self._compose(draft, now_s)
        head = self.queue.head() if lacking else None
        self.copying.make_room(None if head is None else head.session, lacking, now_s)
        room, copying = self.room, self.copying
        while lacking and not self.running and not (room.outgoing or copying.on_its_way(bool(self.in_flight))):
            # Nothing runs and nothing is on its way: lose idle KV rather than stand still, unless what was dropped for
            # want of CPU room is enough. More than once where the policy's choice was the head's own.
            still = self._admit(draft, now_s)
            if not self.running and still == lacking and not room.drop(lacking, now_s):
                break
            lacking = still
            rows = self._compose(draft, now_s)
        moves = self.cache.take_moves()
        if not (rows or moves or self.standing):
            draft.tables += self._unsent.tables
            self._unsent = draft  # who was admitted has no share of an iteration yet
            return None
        return self._launch(draft, rows, moves, horizon_ns)

    # -- what became of plans and copies ------------------------------------------------------------------------------

    def collected(self, result: StepResult) -> Step:
        """The oldest plan in flight is over."""
        step = self.in_flight.popleft()
        self.must_drain = self.must_drain and bool(self.in_flight)
        assert step.plan.step == result.step, "plans are collected in the order of their launch"
        self.facts.collected(step.plan, result)
        following = self.counters.steps
        self.cache.plans(self.in_flight[0].plan.step if self.in_flight else following, following)
        for active in step.members:
            active.in_flight -= 1
        return step

    def moved(self, moved: Sequence[Moved]) -> None:
        """These moves are over; `lost` has been told of those that failed."""
        if self._reading:
            over = {one.ticket for one in moved}
            self._reading = {arrival: ticket for arrival, ticket in self._reading.items() if ticket not in over}
        done = [one for one in moved if one.ok]
        if done:
            self.cache.finish(done)

    def lost(self, failed: Sequence[Moved]) -> tuple[list[ActiveRequest], list[ActiveRequest]]:
        """These moves failed. Returns the requests that run on KV that a copy from the CPU should have brought, and those
        that read something else than was asked for; `start_over` makes these wait again."""
        broken = self.cache.finish(failed)
        return self._running_on(broken.copied), self._running_on(broken.read)

    def failed(self, step: Step) -> list[ActiveRequest]:
        """Nothing that this plan wrote is valid. Returns the requests that cannot go on: those that had a part of it, also
        those it only swapped in, and those that run on KV that its copies should have brought. Where sessions share blocks, a
        request that was admitted after the plan was launched may read a block that it wrote, and cannot go on either."""
        broken = self.cache.finish([Moved(move.ticket, ok=False) for move in step.plan.moves])
        failing = [*self.standing, *step.members, *self._running_on((*broken.copied, *broken.read))]
        for active, runs in step.rows:
            self.invalidate(active, runs)
        if self.room.shares:
            failing += [active for later in self.in_flight for active in later.admitted]
        return failing

    def stop(self, failing: Sequence[ActiveRequest]) -> None:
        """What plans in flight compute for these requests is not valid."""
        for later in self.in_flight:
            for active, runs in later.rows:
                if active in failing:
                    self.invalidate(active, runs)

    def invalidate(self, active: ActiveRequest, runs: Iterable[Run]) -> None:
        """What was computed at these positions is not valid."""
        self.cache.invalidate(active.session, runs)

    def goes_on(self, active: ActiveRequest) -> None:
        """It got a token that is not its last: the position of that is its next work, or is computed by a plan in flight."""
        if active.awaited:
            length = len(active.session.tokens)
            self.cache.advance(active.session, ((length - 1, length),))
        active.decode_next()

    def _running_on(self, sessions: Sequence[Session]) -> list[ActiveRequest]:
        return [active for active in self.running if active.session in sessions] if sessions else []

    # -- requests that stop running -----------------------------------------------------------------------------------

    def remove(self, active: ActiveRequest) -> None:
        """Remove a closed request, nothing of which is in flight, as of the time at which it was closed: its blocks may be
        evicted, a turn that does not stand leaves none, and the next turn of its session may start."""
        session, cache, now_s = active.session, self.cache, active.closed_s
        if active.admitted:  # before its chunks get their places among the victims
            session.hint = active.request.hint if active.status == "completed" else None
        if active.slot is None:
            self.queue.remove(active)
            self.deferred.discard(active.arrival)
            self._waits_no_more(active)
            if active.preempted:
                cache.release(session, now_s)
        else:
            self.running.remove(active)
            self._expect_no_load(active)
            self._slots.append(active.leave_slot())
            cache.release(session, now_s)
            self.queue.ended(active)
        if active.admitted and not active.stands:
            length = min(active.length_before, len(session.tokens))
            cache.truncate(session, length, active.computed_before)

    def start_over(self, misread: Sequence[ActiveRequest], now_s: float) -> None:
        """Make requests wait again, as though they had been preempted, because something else was read than was asked for;
        what has no KV then is computed."""
        for active in misread:
            if not active.closed and active.slot is not None:
                self._wait_again(active, now_s, misread=True)

    def _expect_no_load(self, active: ActiveRequest) -> None:
        """Stop waiting for what it loads or reads: it no longer runs."""
        self._reading.pop(active.arrival, None)
        if self._joining is not None:
            self._joining.end(active)

    def _launch(
        self, draft: _Draft, rows: list[tuple[ActiveRequest, Row]], moves: tuple[Move, ...], horizon_ns: int | None
    ) -> Step:
        """Make a plan of the draft, to be launched next."""
        planned, computed, tokens, sampled = [], [], 0, 0
        members: dict[ActiveRequest, None] = {}
        for active, row in rows:
            planned.append(row)
            computed.append((active, row.runs))
            members[active] = None
            sampled += row.sample is not None
            for start, stop in row.runs:
                tokens += stop - start
        members.update(dict.fromkeys(draft.admitted))
        plan = StepPlan(
            step=self.counters.steps,
            rows=tuple(planned),
            decodes=self.forward.decodes if self.forward is not None and self.standing else NO_DECODES,
            tables=tuple(draft.tables),
            moves=moves,
            repeat=1 if self.forward is None else self.forward.iterations(rows),
            horizon_ns=horizon_ns,
        )
        for active in members:
            active.in_flight += 1
        self.counters.steps += 1
        self.counters.batched_tokens += tokens + len(self.standing)
        step = Step(plan, computed, sampled, draft.admitted, list(members))
        self.in_flight.append(step)
        self.cache.plans(self.in_flight[0].plan.step, self.counters.steps)
        return step

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, draft: _Draft, now_s: float) -> int:
        """Admit waiting requests, in order, while they fit; returns the blocks that a deferred one lacks, else 0."""
        settings = self.settings
        budget = None if settings.admit_beyond_budget else settings.max_batch_tokens
        while (head := self.queue.head()) is not None and self._slots:
            if budget is not None and sum(active.work_tokens for active in self.running) >= budget:
                return 0  # it would not compute anything yet
            session = head.session
            keep = head.kept()
            if self.running and self.room.awaits(session, head.prompt):
                return 0
            lacking = self.lacking(head, keep)
            self.facts.room_for(session, now_s)
            if lacking > 0:
                if head.arrival not in self.deferred:
                    self.deferred.add(head.arrival)
                    self.counters.deferred += 1
                return lacking
            self.queue.pop()
            self._start(head, keep, draft, now_s)
        return 0

    @property
    def loading(self) -> bool:
        """A request that runs is not computed before what it loads or reads is there, or is about to be."""
        return bool(self._reading or (self._joining is not None and self._joining.expected))

    def lacking(self, head: ActiveRequest, keep: int) -> int:
        """Blocks that its admission takes beyond those available; 0 or less: it fits."""
        reserve = self._reserve if self.running and self.room.grows else 0
        return self.room.lacking(head.session, keep, head.prompt) + reserve

    def _start(self, active: ActiveRequest, keep: int, draft: _Draft, now_s: float) -> None:
        """Admit the request, or resume it, into a slot of its own."""
        cache, session = self.cache, active.session
        facts, request = self.facts, active.request
        self.deferred.discard(active.arrival)
        if active.preempted:
            admission = cache.admit(session, keep, None, now_s)
            facts.resumed(request, session, admission, active.misread)
        else:
            active.remember_session(keep)
            suffix = request.prompt[keep:]
            facts.admitting(request, session, keep, suffix)
            admission = cache.admit(session, keep, suffix, now_s)
            facts.admitted(request, session, admission, now_s)
        self._waits_no_more(active)
        active.start(admission, self._slots.pop())
        active.reserved = len(admission.table) * cache.chunk_tokens
        position = len(self.running)
        while position and self.running[position - 1].arrival > active.arrival:
            position -= 1
        self.running.insert(position, active)
        assert active.slot is not None
        draft.admitted.append(active)
        draft.tables.append((active.slot, 0, admission.table))
        if self._joining is not None:
            self._joining.begin(active, admission.loading, now_s)
        if admission.read_ticket is not None:
            self._reading[active.arrival] = admission.read_ticket

    # -- iterations ---------------------------------------------------------------------------------------------------

    def _compose(self, draft: _Draft, now_s: float) -> list[tuple[ActiveRequest, Row]]:
        """Choose the rows of the plan, and take a block for each position that they need."""
        running: Sequence[ActiveRequest] = self.running
        if self._ahead:
            running = [active for active in running if not active.closed]
        joined = running
        if self._reading:  # how long that takes nobody knows, so each joins when it has read
            joined = [active for active in running if active.arrival not in self._reading]
        if self._joining is not None:
            if self.forward is not None and self.standing and self._joining.expected:
                self.forward.leave(list(self.standing))  # so that all have the work that is asked for
            joined = self._joining.joined(joined, self.settings.max_batch_tokens, now_s)
        rows = self._compose_from(joined, draft, now_s)
        if not (rows or self.standing) and joined is not running:  # rather wait for a load than stand still
            rows = self._compose_from(running, draft, now_s)
        return rows

    def _compose_from(
        self, running: Sequence[ActiveRequest], draft: _Draft, now_s: float
    ) -> list[tuple[ActiveRequest, Row]]:
        rows: list[tuple[ActiveRequest, Row]] = []
        decoded, stores, most = None, self.room.stores, self.settings.max_batch_tokens
        if self.forward is not None and self.standing:
            running = self.forward.stand(running, now_s)
            most -= len(self.standing)
        for active, count in self.settings.composition(running, most):
            if active.slot is None:
                continue  # preempted a moment ago, to make room for an earlier one
            if count == 1 and active.decoding:
                decoded = active
                needs = stores or active.work[0][1] > active.reserved  # who stores what is computed is asked each time
                if needs and not self._extend(active, draft, rows, now_s):
                    continue
            row = active.next_row(count, self._ahead, self._computes)
            if row.runs[-1][1] <= len(active.session.tokens):
                self.cache.advance(active.session, row.runs)
            rows.append((active, row))
        if decoded is not None:
            self.facts.room_for(decoded.session, now_s)  # as though each of them had asked in its turn
        return rows

    def _extend(
        self, active: ActiveRequest, draft: _Draft, rows: list[tuple[ActiveRequest, Row]], now_s: float
    ) -> bool:
        """Take a block for the next decoded position. Returns False where the request skips this iteration, or was
        preempted."""
        cache, room, session = self.cache, self.room, active.session
        length = active.work[0][1]
        self.facts.room_for(session, now_s)
        while True:
            added = cache.extend(session, length, now_s)
            if added is not None:
                self._take_table(active, added, draft)
                return True
            if room.outgoing:
                return False  # blocks are on their way
            room.swap_out(room.chunk_blocks, now_s, session)
            if room.outgoing or room.available >= room.chunk_blocks:
                continue
            if self.in_flight:
                self.must_drain = True
                return False
            planned = [active for active, _ in rows]
            victim = next((one for one in reversed(self.running) if one not in planned), None)
            if len(self.running) > 1 and victim is not None:
                self.counters.preempted += 1
                self._wait_again(victim, now_s, misread=False)
                room.swap_out_all(victim.session, now_s)
                if victim is active:
                    return False
            elif not room.drop(room.chunk_blocks, now_s):
                return False  # the other blocks are in this very plan; the next iteration preempts

    @property
    def next_head(self) -> ActiveRequest | None:
        """Who is admitted next; None where nobody waits, or no slot is free."""
        return self.queue.head() if self._slots else None

    def take_block(self, active: ActiveRequest, length: int, now_s: float) -> bool:
        """Take the block of a decode without a row; returns whether there was one."""
        self.facts.room_for(active.session, now_s)
        added = self.cache.extend(active.session, length, now_s)
        if added is not None:
            self._take_table(active, added, self._unsent)
        return added is not None

    def _take_table(self, active: ActiveRequest, added: tuple[int, tuple[int, ...]], draft: _Draft) -> None:
        """Blocks were added to those of the request, from that chunk on."""
        first, blocks = added
        if blocks:
            assert active.slot is not None
            active.reserved = (first + len(blocks)) * self.cache.chunk_tokens
            draft.tables.append((active.slot, first, blocks))

    def _must_preempt(self) -> bool:
        """The next decodes need more blocks than there are, and only a preemption makes some free, for which nothing may be
        in flight. To plan for those that have their blocks would cost a whole iteration for a part of the batch."""
        cache = self.cache
        if cache.cpu_blocks:
            return False  # copies to the CPU tier make room without a preemption
        size = cache.chunk_tokens
        needed = sum(active.decoding and active.work[0][0] % size == 0 for active in self.running)
        return needed * self.room.chunk_blocks > self.room.available

    def _wait_again(self, active: ActiveRequest, now_s: float, misread: bool) -> None:
        """Make a running request wait again."""
        self.running.remove(active)
        self._expect_no_load(active)
        self._slots.append(active.preempt(misread))
        self._waits(active)
        self.cache.release(active.session, now_s, finished=False)
        self.queue.push_back(active)
