"""Drives a system with a workload, on a wall clock or a virtual one: one loop over a heap of events.

Times given to and taken from a workload are seconds since the replay began; the system's clock may have run before.
"""

import gc
import heapq
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from pensieve.core.request import Event, Request, TokenArray
from pensieve.lab.metrics import Measurement, out_of_memory
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.turns import HITS, MeasuredStretches, TurnLog, Turns, find_window
from pensieve.lab.workload.base import Arrival, Foresees, KnowsEnds, KnowsUsers, Workload, WorkloadPlan
from pensieve.serve.record import Transcripts, TurnRecord, is_measured
from pensieve.serve.systems.base import CountsTokens, ExpectsReuse, ForgetsEnded, LooksAhead, System

CANCEL, ARRIVE = 0, 1  # at equal times a cancellation goes first: what it frees serves the arrival
SLACK_NS = 2  # an idle system may stop a rounding error before the time it was told
WAKE_S = 0.25  # how long a wall clock is waited on before progress and the deadline are looked at again
LATE_SEND_MS = 5.0
LATE_SEND_SHARE = 0.01  # of the median time to first token, where that is more


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """What one replay observed; `measurement` is what metrics.summarise takes. turns: the records, where they were kept.

    origin_s: the system's clock when the replay began, which all other times here count from. drain_share: of the measured
    output tokens, those finished after the window. flags: what a reader of the numbers should know, a sentence each.
    """

    measurement: Measurement
    plan: WorkloadPlan
    origin_s: float
    drain_share: float
    flags: Mapping[str, str]
    turns: Sequence[TurnRecord] = ()

    @property
    def load(self) -> str:
        return self.plan.load


def replay(
    system: System,
    workload: Workload,
    *,
    on_batch: Callable[[Sequence[TurnRecord]], None] | None = None,
    batch_size: int = 256,
    progress: Callable[[int, int], None] | None = None,
    deadline_s: float | None = None,
    keep_turns: bool = True,
) -> ReplayRecord:
    """Send every arrival when it is due, until the workload has no more; the system is started and stays open.

    on_batch: finished turns, `batch_size` at a time and at the end, also when the replay is interrupted. progress: after each
    poll that brought news, of the turns that are over and of all output tokens so far. deadline_s: seconds after which
    everything in flight is cancelled as a timeout and nothing more is sent. keep_turns=False: records are dropped once
    on_batch has seen them, and what is measured of them is columns in a file (turns.py).

    Every submitted request finishes exactly once. A turn is sent once the one before it has ended: its prompt holds that.
    """
    run = _Run(system, workload, on_batch, batch_size, progress, keep_turns)
    gc.freeze()  # the workload stays: no collection looks through it
    try:
        run.loop(deadline_s)
    finally:
        gc.unfreeze()
        run.flush()
    return run.record()


@dataclass(slots=True)
class _Sent:
    """A request in flight. at_s: when it was sent. tokens: of its reply, as they stream. overdue: past its deadline in a
    system that cannot cancel."""

    request: Request
    at_s: float
    tokens: int = 0
    overdue: bool = False


class _Run:
    """The state of one replay."""

    def __init__(
        self,
        system: System,
        workload: Workload,
        on_batch: Callable[[Sequence[TurnRecord]], None] | None,
        batch_size: int,
        progress: Callable[[int, int], None] | None,
        keep_turns: bool,
    ) -> None:
        self.system, self.workload, self.plan = system, workload, workload.describe()
        self.on_batch, self.batch_size = on_batch, batch_size
        self.progress = progress
        self.expects = system if isinstance(system, ExpectsReuse) else None
        self.forgets = system if isinstance(system, ForgetsEnded) else None
        self.ends = workload if isinstance(workload, KnowsEnds) else None
        self.users = workload if isinstance(workload, KnowsUsers) else None
        if isinstance(system, CountsTokens):
            system.count_windows()
        self.ahead: LooksAhead | None = None
        if isinstance(system, LooksAhead) and isinstance(workload, Foresees):
            self.ahead = system
            system.look_ahead(workload.foresee)
        self.origin_ns = system.clock.now_ns()
        self.heap: list[tuple[int, int, int, Arrival | int]] = []  # ns, priority, sequence, and a request id to cancel
        self.sequence = count()
        self.pending = 0  # arrivals in the heap
        self.held: dict[int, Arrival] = {}  # due, but the system is full or its conversation busy
        self.lines: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)  # by session: place and id of those
        self.ready: list[tuple[int, int]] = []  # the first of each conversation that has none in flight; some are over
        self.said = Transcripts()
        self.said_s: dict[str, float] = {}  # when the last turn of a conversation ended
        self.under_way: set[str] = set()  # conversations with a request in flight
        self.in_flight: dict[int, _Sent] = {}
        self.asked: Counter[str] = Counter()  # by session, its requests that are held or in flight
        self.ordinals: dict[int, int] = {}  # of those that are not over
        self.scheduled = count()
        self.due: dict[str, list[int]] = {}  # of each session, when the arrivals in the heap are due
        self.arrived: dict[str, int] = {}  # the first arrival of each measured session
        self.output_tokens = 0
        self.finished = 0
        self.batch: list[TurnRecord] = []  # those of the finished turns that nobody has seen
        self.kept: list[TurnRecord] | None = [] if keep_turns else None
        self.log = TurnLog()
        self.lags: TokenArray[float] = array("d")
        self.stretches = MeasuredStretches(system.counters)
        self.out_of_work_s: float | None = None
        self.cut_off = False
        self.flags: dict[str, str] = {}

    def loop(self, deadline_s: float | None) -> None:
        clock = self.system.clock
        end_ns = None if deadline_s is None else self.origin_ns + round(deadline_s * 1e9)
        self._push(self.workload.start())
        if end_ns is not None and self.ahead is not None:
            self.ahead.announce(end_ns, None)
        while True:
            now = clock.now_ns()
            if end_ns is not None and now + SLACK_NS >= end_ns and not self.cut_off:
                end_ns = None
                self._cut_off()
            self._do_due(now)
            if not (self.pending or self.held or self.in_flight):
                return
            until = min((ns for ns in (self._next_ns(), end_ns) if ns is not None), default=None)
            if not clock.virtual:
                wake = now + round(WAKE_S * 1e9)
                until = wake if until is None else min(until, wake)
            events = self.system.poll(None if until is None else until / 1e9)
            stuck = not events and clock.virtual and clock.now_ns() <= now
            assert not stuck, "poll gave nothing and moved no time, yet requests or arrivals are left"
            self._take(events)

    def flush(self) -> None:
        batch, self.batch = self.batch, []
        if batch and self.on_batch is not None:
            self.on_batch(batch)
        self.log.add(batch)
        if self.kept is not None:
            self.kept += batch

    def record(self) -> ReplayRecord:
        turns = Turns(self.log)
        measured = turns.measured
        window = find_window(
            measured,
            load=self.plan.load,
            warm_s=self._warm_s(turns),
            arrivals_s={session: self._since(ns) for session, ns in self.arrived.items()},
            out_of_work_s=self.out_of_work_s,
        )
        measurement = Measurement(
            turns=turns,
            measure_start_s=window.start_s,
            measure_end_s=window.end_s,
            measured_from_s=window.measured_from_s,
            ended_s=window.ended_s,
            counters=self.stretches.counts(),
            send_lag_s=self.lags,
        )
        return ReplayRecord(
            measurement=measurement,
            plan=self.plan,
            origin_s=self.origin_ns / 1e9,
            drain_share=window.drain_share,
            flags={**window.flags, **self._flags(turns, measured), **self.flags},
            turns=() if self.kept is None else self.kept,
        )

    def _flags(self, turns: Turns, measured: Turns) -> dict[str, str]:
        flags: dict[str, str] = {}
        if self.plan.turns is not None and len(turns) < self.plan.turns:
            flags["unsent"] = f"{self.plan.turns - len(turns)} of {self.plan.turns} planned turns were never sent."
        statuses = zip(turns.words("status"), np.bincount(turns.codes("status")), strict=True)
        failures = [f"{number} {status}" for status, number in sorted(statuses) if status != "completed"]
        if failures:
            flags["failures"] = f"Of {len(turns)} turns {', '.join(failures)}."
        if self.lags and not self.system.clock.virtual and self.system.can.max_in_flight is None:
            ttfts = measured["ttft_ms"][~np.isnan(measured["ttft_ms"])]
            late_ms = nearest_rank(self.lags, 0.99) * 1e3
            limit_ms = max(LATE_SEND_MS, LATE_SEND_SHARE * nearest_rank(ttfts, 0.5) if len(ttfts) else 0.0)
            if late_ms > limit_ms:
                flags["late_sends"] = (
                    f"One request in a hundred was sent {late_ms:.1f} ms or more after it was due; up to {limit_ms:.1f} ms "
                    "would not matter."
                )
        completed = measured.completed
        known = sum(np.nan_to_num(completed[tier]) for tier in HITS)
        if held := int(((known > 0) & (known >= completed["prompt_tokens"] - 1)).sum()):
            flags["held_whole"] = (
                f"{held} measured prompts were cached but for their last token: their times to first token are those of "
                "decoding one token."
            )
        exhausted = turns.where(out_of_memory(turns))
        if len(exhausted):
            error = exhausted.word("error", 0)
            flags["oom"] = f"{len(exhausted)} turns did not get the memory they needed; the first: {error}"
        return flags

    def _warm_s(self, turns: Turns) -> float:
        """When the last warm-up turn ended. Where each conversation warms its own cache they go on to the end, and those
        before the first measured turn count."""
        ends = turns["finished_s"][turns.that("phase", "warmup".__eq__)]
        if self.plan.cache_state == "primed" and self.arrived:
            ends = ends[ends <= self._since(min(self.arrived.values()))]
        return float(ends.max(initial=0.0))

    def _since(self, ns: int) -> float:
        return (ns - self.origin_ns) / 1e9

    def _expect(self, sessions: Iterable[str]) -> None:
        """Tell the system when these conversations return, where that is scheduled by now."""
        for session in sessions:
            due = self.due.get(session)
            if self.expects is not None and due:
                self.expects.expect(session, due[0] / 1e9)

    def _tell_ended(self, turn: TurnRecord) -> None:
        """Tell the system that the turn was the last of its conversation, if it was."""
        session = turn.session
        if not self.due.get(session):
            self.due.pop(session, None)
            if self.ends is not None and not self.asked[session] and self.ends.is_over(turn):
                self.said.forget(session)
                self.said_s.pop(session, None)
                if self.forgets is not None:
                    self.forgets.ended(session)

    def _push(self, arrivals: Iterable[Arrival]) -> None:
        """Schedule them."""
        for arrival in arrivals:
            request, ns = arrival.request, self.origin_ns + round(arrival.at_s * 1e9)
            assert request.id not in self.ordinals, f"request {request.id} was scheduled twice"
            self.ordinals[request.id] = next(self.scheduled)
            heapq.heappush(self.heap, (ns, ARRIVE, next(self.sequence), arrival))
            heapq.heappush(self.due.setdefault(request.session, []), ns)
            if self.ahead is not None:
                self.ahead.announce(ns, request)
                if arrival.deadline_s is not None:
                    self.ahead.announce(self._deadline_ns(arrival.deadline_s), request)
            if is_measured(request.phase):
                self.arrived[request.session] = min(ns, self.arrived.get(request.session, ns))
            self.pending += 1

    def _deadline_ns(self, deadline_s: float) -> int:
        return self.origin_ns + round(deadline_s * 1e9)

    def _next_ns(self) -> int | None:
        """When the loop has to act next; deadlines of requests that are over are swept away."""
        while self.heap and not isinstance(item := self.heap[0][3], Arrival):
            if item in self.in_flight or item in self.held:
                break
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else None

    def _do_due(self, now: int) -> None:
        while self.heap and self.heap[0][0] <= now + SLACK_NS:
            ns, _, _, item = heapq.heappop(self.heap)
            if not isinstance(item, Arrival):
                self._time_out(item)
                continue
            self.pending -= 1
            due = self.due[item.request.session]
            heapq.heappop(due)
            later = due[0] / 1e9 if due else None
            request = item.request
            request.intended_s, request.next_use_s = ns / 1e9, later
            self.held[request.id] = item
            self.lines[request.session].append((next(self.sequence), request.id))
            if len(self.lines[request.session]) == 1:
                self._may_be_sent(request.session)
            self.asked[request.session] += 1
            if item.deadline_s is not None:
                deadline = self._deadline_ns(item.deadline_s)
                heapq.heappush(self.heap, (deadline, CANCEL, next(self.sequence), item.request.id))
            self._send()
        self._send()

    def _send(self) -> None:
        limit = self.system.can.max_in_flight
        while limit is None or len(self.in_flight) < limit:
            while self.ready and self.ready[0][1] not in self.held:
                heapq.heappop(self.ready)
            if not self.ready:
                return
            held = self.held.pop(heapq.heappop(self.ready)[1])
            request = held.due(self.said.of(held.request.session))
            self.under_way.add(request.session)
            due_s = max(request.intended_s, self.said_s.get(request.session, 0.0))
            now = self.system.clock.now_s()
            self.lags.append(max(0.0, now - due_s))
            self.in_flight[request.id] = _Sent(request, now)
            self.stretches.sending(request)
            self.system.submit(request)

    def _may_be_sent(self, session: str) -> None:
        """The conversation's first held turn is next, if none of it is in flight. First come, first sent."""
        line = self.lines[session]
        while line and line[0][1] not in self.held:
            line.popleft()
        if not line:
            del self.lines[session]
        elif session not in self.under_way:
            heapq.heappush(self.ready, line[0])

    def _time_out(self, request_id: int) -> None:
        if request_id in self.held:
            request = self.held.pop(request_id).request
            first = self.lines[request.session][0][1] == request_id
            self._end_here(request)
            if first:
                self._may_be_sent(request.session)
        elif request_id in self.in_flight:
            if self.system.can.cancels:
                self.system.cancel(request_id, "timeout")
            else:
                self.in_flight[request_id].overdue = True

    def _end_here(self, request: Request) -> None:
        """End a request that the system never had as a timeout."""
        self._withdraw([request])
        self._finish(request, TurnRecord.never_sent(request, self.system.clock.now_s()))

    def _withdraw(self, requests: Iterable[Request]) -> None:
        """They were announced, and are never sent."""
        if self.ahead is not None:
            for request in requests:
                self.ahead.withdraw(request.id)

    def _cut_off(self) -> None:
        """Stop the replay for want of time: nothing more is sent, and what is in flight ends as a timeout."""
        self.cut_off = True
        elapsed = self._since(self.system.clock.now_ns())
        self.flags["cut_off"] = f"The replay was cut off after {elapsed:.1f} s; turns in flight then are timeouts."
        self.heap.clear()
        self.due.clear()
        self.pending = 0
        for request_id in [*self.held, *self.in_flight]:
            self._time_out(request_id)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind != "finished":
                self.in_flight[event.request_id].tokens += event.tokens
                self.output_tokens += event.tokens
                continue
            turn = event.turn
            assert turn is not None
            assert event.request_id in self.in_flight, f"request {event.request_id} finished twice, or was never sent"
            sent = self.in_flight.pop(event.request_id)
            request = sent.request
            turn.sent(sent.at_s)
            if sent.overdue:
                turn.overdue()
            self.output_tokens += turn.output_tokens - sent.tokens
            self.under_way.discard(request.session)
            self.said.note(request, turn)
            self.said_s[request.session] = turn.finished_s or 0.0
            self._may_be_sent(request.session)
            self._finish(request, turn)
        if events and self.progress is not None:
            self.progress(self.finished, self.output_tokens)

    def _finish(self, request: Request, turn: TurnRecord) -> None:
        self.stretches.finished(request)
        self.asked[request.session] -= 1
        if not self.asked[request.session]:
            del self.asked[request.session]
        assert (turn.session, turn.turn) == (request.session, request.turn)
        turn.planned(request, self.ordinals.pop(request.id))
        turn.shift(self.origin_ns / 1e9)
        self.finished += 1
        self.batch.append(turn)
        if not self.cut_off:
            following = list(self.workload.on_finished(turn))
            self._push(following)
            if self.out_of_work_s is None and is_measured(turn.phase):
                done = self.users.out_of_work(turn, following) if self.users is not None else not following
                self.out_of_work_s = turn.finished_s if done else None
            again = [arrival.request.session for arrival in following if arrival.request.turn > 1]
            self._expect(dict.fromkeys([turn.session, *again]))
            self._tell_ended(turn)
        if len(self.batch) >= self.batch_size:
            self.flush()
