"""An engine on a virtual clock: it runs in the thread of whoever polls, and a plan of it may stand for several iterations."""

from __future__ import annotations

import heapq
import math
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from pensieve.core.cache.blocks import BlockPool
from pensieve.core.facts import NOBODY_NOW, SILENT, Iterations
from pensieve.core.machine import CostModel
from pensieve.core.plan import GPU, NO_DECODES, Decodes, Row, StartReport, StepResult, Tier
from pensieve.core.request import Event, Forced, Request, TokenArray
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import Scheduler, Step, unified
from pensieve.core.session import tokens_in
from pensieve.errors import WorkerError
from pensieve.serve.record import Listener
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, EngineSystem
from pensieve.sim.worker import SimulatedWorker, VirtualClock, drawn_tokens, simulated_cost
from pensieve.specs import ModelSpec


class InlineSystem(EngineSystem):
    """`poll`, `ask` and `drive` run the engine, in the thread that calls them. Several threads may use it: each call has the
    engine to itself, so that one made during a poll takes effect when that poll returns. Whoever asks runs the engine until
    some request has finished, and lets the others have it before going on: so those who ask at once are served together.
    """

    def __init__(self, **parts: Any) -> None:
        """parts: as EngineSystem takes them, with a VirtualClock."""
        super().__init__(**parts)
        self._forward = forward_for(self._worker.computes, self._worker.depth, self._model)
        self._pool = None if self._worker.computes or self._hardware.fragment_s else ScatteredPool
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()  # what was begun and released while the engine was busy
        self._untold: list[Event] = []  # happened while somebody asked, for the next poll
        self._ended: str | None = None  # why nobody can ask any more
        self._counts_windows = False
        self._told_ends = 0  # requests whose end the events have said that were taken from the engine

    def submit(self, request: Request) -> None:
        with self._lock:
            self.engine.submit(request)

    def begin(self, request: Request, listener: Listener) -> None:
        self._listeners[request.id] = listener
        self._inbox.append(lambda: self.engine.submit(request))
        if self._ended is not None:  # after it told the other listeners, or before: nobody else will tell this one
            self._listeners.fail(WorkerError(self._ended))

    def drive(self, awaited: Future[Any]) -> None:
        while not awaited.done():
            with self._lock:
                if self._ended is not None and not awaited.done():
                    raise WorkerError(self._ended)
                if not awaited.done():
                    self._serve_listeners()

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        self._inbox.append(lambda: self.engine.forget(session, tenant, left))

    def cancel(self, request_id: int, status: str) -> None:
        with self._lock:
            self._empty_inbox()
            self.engine.cancel(request_id, status)

    def expect(self, session: str, next_use_s: float | None) -> None:
        """When the schedule will ask this conversation again; only an offline policy reads it."""
        with self._lock:
            self.engine.sessions.expect(session, next_use_s)

    def ended(self, session: str) -> None:
        """Let go of a conversation that nobody will ask again: it is forgotten once nothing of it is in the cache."""
        with self._lock:
            self.engine.sessions.ended(session)

    def count_windows(self) -> None:
        """Tell whoever polls of most tokens only how many they are, from now on (Event.tokens)."""
        self._counts_windows = True

    def forget(self, session: str | None) -> None:
        with self._lock:
            self._empty_inbox()
            self.engine.forget(session)

    def poll(self, until_s: float | None) -> list[Event]:
        with self._lock:
            events, self._untold = self._untold, []
            if not any(event.turn is not None for event in events):
                ran = self._run(None if until_s is None else round(until_s * 1e9))
                events += self._listeners.tell(ran) if self._listeners else ran
            return events

    def extrapolated(self) -> dict[str, Any]:
        """Terms of the cost model that were asked for more than was measured, by whoever asked: how often and how far."""
        return self._worker.cost.extrapolated() if isinstance(self._worker, SimulatedWorker) else {}

    def close(self) -> None:
        with self._lock:
            self._end(ENGINE_CLOSED)
            self._worker.close()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _prices(self, report: StartReport) -> CostModel:
        return simulated_cost(self._model, self._hardware, self.chunk_tokens)

    def _begin(self) -> None:
        """Do nothing: the engine runs when it is polled."""

    def _serve_listeners(self) -> None:
        """Run the engine until some request has finished. A crash ends all requests."""
        try:
            self._untold += self._listeners.tell(self._run(None))
        except BaseException as crash:  # the engine may have stopped half way through a step, whatever it was
            sentence = f"The engine stopped: {crash}"
            self._end(sentence)
            if isinstance(crash, Exception):
                raise WorkerError(sentence) from crash
            raise

    def _empty_inbox(self) -> None:
        """Hand to the engine what was begun and released since the last call."""
        while self._inbox:
            self._inbox.popleft()()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._inbox.clear()
        self._listeners.fail(WorkerError(self._ended))

    def _run(self, until_ns: int | None) -> list[Event]:
        self._empty_inbox()
        engine, clock = self.engine, self.clock
        assert isinstance(clock, VirtualClock)
        events = engine.take_events()
        engine.counts_windows = self._counts_windows and not self._listeners
        while engine.ended_requests == self._told_ends:
            if until_ns is not None and clock.now_ns() >= until_ns:
                break
            if until_ns is None and not engine.busy:
                break
            events += engine.step(until_ns)
            if not engine.progressed:
                # Nothing to compute and no copy ends by then.
                assert until_ns is not None, "requests wait, and nothing runs that could let them in"
                expiry_ns = engine.sessions.next_expiry_ns
                clock.advance_to(until_ns if expiry_ns is None else min(until_ns, expiry_ns))
        self._told_ends = engine.ended_requests
        return events


@dataclass(slots=True)
class _Member:
    """Of the set of decodes. offset: tokens of its session less iterations of the set, since both grow together. told, ends:
    the iterations with which it got tokens last, and gets its last one."""

    offset: int
    told: int
    ends: int


class FastForward:
    """Decodes as members of one set with a common count of iterations, and plans that stand for several iterations.

    A request joins with its first token, if it is known how many it will get, and has no rows from then on. What it gets
    follows from the iterations since, and is told when it leaves: at its end, or where it does not simply go on. Blocks are
    taken when they are needed: a member needs one every chunk_tokens iterations. Where nobody counts windows
    (Engine.counts_windows), each token is told when it is there. A cache that learns of each position computed, or asks each
    decode for a block, has members for the length of a plan only.
    """

    def __init__(self, scheduler: Scheduler, model: ModelSpec) -> None:
        self._scheduler, self._size, self._vocab = scheduler, scheduler.cache.chunk_tokens, model.vocab
        room = scheduler.room
        # Every iteration computes all decodes, and prefills as far as it then has positions left.
        composition = scheduler.settings.composition  # Hydra makes a partial of it
        self._is_unified = getattr(composition, "func", composition) is unified
        alone = room.shares or room.stores or room.frees or model.windowed_layers
        self._stays = self._is_unified and not alone
        self.members: dict[ActiveRequest, _Member] = {}
        self._ends: list[tuple[int, int, ActiveRequest]] = []  # a heap: when each has its last token; some have left
        # By iteration, of each chunk_tokens, in which they need a block.
        self._asking: list[list[ActiveRequest]] = [[] for _ in range(self._size)]
        self._done = 0
        self._log = Iterations(array("d"), array("d"), array("d"))  # of the last ones
        self._log_full = _LOG
        self.events: list[Event] = []
        self.decodes = NO_DECODES
        self._lag = False  # some member may have been told of less than another one

    # -- plans --------------------------------------------------------------------------------------------------------

    def stand(self, running: Sequence[ActiveRequest], now_s: float) -> Sequence[ActiveRequest]:
        members = self.members
        others: list[ActiveRequest] = []
        goes_on = len(members) <= self._scheduler.settings.max_batch_tokens
        for active in running:
            if active in members:
                last = active
            else:
                others.append(active)
                goes_on = goes_on and not (active.work_tokens == 1 and active.decoding)
        if not goes_on or not self._take_blocks(0, now_s):
            self.leave(list(members))
            self.decodes = NO_DECODES
            return running
        self._scheduler.facts.room_for(last.session, now_s)
        count, done = len(members), self._done - 1
        offsets = [member.offset for member in members.values()]
        self.decodes = Decodes(count, sum(offsets) + count * done, max(0, max(offsets) + done))
        return others

    def iterations(self, rows: list[tuple[ActiveRequest, Row]]) -> int:
        """As long as each would be composed as this one is, and nothing would be admitted or copied. Decodes go on by one
        position, and a prefill that fills up the iteration by as many as it has now. When a copy ends, only the worker knows:
        it stops then."""
        scheduler, settings, standing = self._scheduler, self._scheduler.settings, len(self.members)
        if not rows and not standing:
            return 1
        further = settings.max_batch_tokens
        if standing:
            further = min(further, self._next_end() - self._done - 1)
        lengths: list[int] = []
        for active, row in rows:
            if row.sample is None:
                share = settings.max_batch_tokens - standing - len(lengths)
                if row is not rows[-1][1] or row.positions < share or not self._is_unified:
                    return 1
                left = _further_prefills(active, row)
            else:
                left = _further_tokens(active)
                lengths.append(len(active.session.tokens))
            further = min(further, left)
        prefills = len(rows) - len(lengths)
        if scheduler.room.stores_replies or (scheduler.room.shares and scheduler.next_head is not None):
            size = self._size
            further = min(further, *((-length - 1) % size for length in lengths), further)
        if not further or (not prefills and standing + len(rows) < len(scheduler.running)):
            return 1
        blocks = self._blocks_until_change([active for active, _ in rows[len(lengths) :]])
        if self._blocks_for(lengths, further) > blocks:
            further = max(0, bisect_right(range(further), blocks, key=partial(self._blocks_for, lengths)) - 1)
        return 1 + further if blocks >= 0 else 1

    def _blocks_until_change(self, prefills: Sequence[ActiveRequest]) -> float:
        """How many GPU blocks decodes may take until a plan would admit or copy something, while these prefills go on; below
        0 where the next one may in any case. A deferred head is admitted no sooner, unless what is prefilled meanwhile may
        shorten its prompt (shares), or the work under way decides (admit_beyond_budget)."""
        scheduler, lacking = self._scheduler, 0
        room, copying, head = scheduler.room, scheduler.copying, scheduler.next_head
        if scheduler.loading:
            return -1
        if room.frees or (room.stores and room.storing(bool(prefills))):
            return -1
        if head is not None:
            if (
                (room.shares and prefills)
                or not scheduler.settings.admit_beyond_budget
                or head.arrival not in scheduler.deferred
            ):
                return -1
            lacking = scheduler.lacking(head, head.kept())
            if lacking <= 0 or copying.changes_places(head.session):
                return -1
        if not room.grows:
            return math.inf
        blocks = room.available
        if not room.can_swap_out:
            return blocks
        ahead = copying.begins_below([active.session for active in prefills])
        wanted = max(ahead, blocks + lacking if lacking else 0)
        return min(blocks, blocks + room.outgoing - wanted)

    def _blocks_for(self, lengths: list[int], further: int) -> int:
        """Blocks that the members and requests whose positions fill blocks up to these lengths take for `further` positions
        more each."""
        size, asking, following = self._size, self._asking, self._done + 1
        rounds, rest = divmod(further, size)
        members = sum([len(asking[at % size]) for at in range(following, following + rest)]) if self.members else 0
        for length in lengths:
            members += (length + further - 1) // size - (length - 1) // size
        return rounds * len(self.members) + members

    # -- what plans did -----------------------------------------------------------------------------------------------

    def repeated(self, step: Step, result: StepResult, now_s: float, counted: bool) -> Iterator[ActiveRequest]:
        """The cache learns what the further iterations computed, and each request takes every block at the time at which it
        needed it."""
        if self._stays or result.repeats:
            self._join(step.rows[: step.sampled])
        if (repeats := result.repeats) is None:
            return
        scheduler, times = self._scheduler, len(repeats.ended_ns)
        ended_s = repeats.ended_ns / 1e9
        prefills = step.rows[step.sampled :]
        scheduler.facts.repeated(step.plan, repeats, [active.request.id for active, _ in prefills] if prefills else ())
        scheduler.counters.steps += times
        scheduler.counters.batched_tokens += times * len(self.members)
        asking, size = self._asking, self._size
        for iteration in range(self._done, self._done + times) if self.members else ():
            if asking[iteration % size]:  # a plan is repeated for as long as there are blocks
                further = iteration - self._done
                self._take_blocks(further, float(ended_s[further - 1]) if further else now_s)
        asked_last = max(self.members, key=_BY_ARRIVAL, default=scheduler.next_head)
        if asked_last is not None:  # if only for what it had, or for what it did not get
            scheduler.facts.room_for(asked_last.session, float(ended_s[-2]) if times > 1 else now_s)
        for active, runs in prefills:
            more = active.take(times * tokens_in(runs))
            scheduler.counters.batched_tokens += tokens_in(more)
            scheduler.cache.advance(active.session, more)
        if self.members:
            columns = ended_s, repeats.compute_ns / 1e6, np.zeros(times)
            yield from self._go_through(Iterations(*[array("d", column.tobytes()) for column in columns]), counted)
            if not self._stays:
                self.leave(list(self.members))

    def _join(self, sampled: Sequence[tuple[ActiveRequest, Any]]) -> None:
        """Make members of those that go on, if it is known of all of them how many tokens they will get."""
        for active, _ in sampled:
            if active.eos or active.stop is not None:
                return
        for active, _ in sampled:
            if active.closed:
                continue
            offset, ends = (
                len(active.session.tokens) - self._done,
                self._done + active.max_new_tokens - active.generated,
            )
            self.members[active] = _Member(offset, self._done, ends)
            self._asking[(1 - offset) % self._size].append(active)
            heapq.heappush(self._ends, (ends, active.arrival, active))

    def leave(self, going: Iterable[ActiveRequest]) -> None:
        self._tell(going)
        for active in going:
            member = self.members.pop(active)
            self._asking[(1 - member.offset) % self._size].remove(active)
        log = self._log
        if len(log.ended_s) > self._log_full:
            wanted = self._done - min([member.told for member in self.members.values()], default=self._done)
            for column in log:
                del column[: len(column) - wanted]
            self._log_full = 2 * wanted + _LOG

    def _take_blocks(self, further: int, now_s: float) -> bool:
        """Those that members need for the next iteration but `further`. Returns whether they were there."""
        scheduler, iteration = self._scheduler, self._done + further
        for active in sorted(self._asking[iteration % self._size], key=_BY_ARRIVAL):
            length = self.members[active].offset + iteration
            if length > active.reserved and not scheduler.take_block(active, length, now_s):
                return False
        return True

    def performed(self, result: StepResult, now_s: float, counted: bool) -> Iterator[ActiveRequest]:
        took = now_s, result.compute_ns / 1e6, result.stall_ns / 1e6
        return self._go_through(Iterations(*[array("d", (one,)) for one in took]), counted)

    def _go_through(self, took: Iterations, counted: bool) -> Iterator[ActiveRequest]:
        if self._lag and not counted:
            self._tell(self.members)
        self._lag = counted
        log, count = self._log, len(took.ended_s)
        for column, more in zip(log, took, strict=True):
            column.extend(more)
        self._done += count
        if counted:
            while self.members and self._next_end() == self._done:
                yield heapq.heappop(self._ends)[2]
            return
        members = sorted(self.members, key=_BY_ARRIVAL)
        tokens = [self._given(active, self.members[active]) for active in members]
        events = self.events
        for at_s, each in zip(log.ended_s[-count:-1], zip(*tokens, strict=True), strict=False):
            events += [Event("token", one.request.id, at_s, token) for one, token in zip(members, each, strict=True)]
        for active, own in zip(members, tokens, strict=True):
            events.append(Event("token", active.request.id, log.ended_s[-1], own[-1]))
            if active.generated >= active.max_new_tokens:
                yield active

    def _next_end(self) -> int:
        """The iteration that gives the next member its last token."""
        ends = self._ends
        while True:
            end, _, active = ends[0]
            member = self.members.get(active)
            if member is not None and member.ends == end:
                return end
            heapq.heappop(ends)

    def _tell(self, members: Iterable[ActiveRequest]) -> None:
        """Give them their tokens, in one event each."""
        for active in members:
            member = self.members[active]
            if member.told < self._done:
                tokens = self._given(active, member)
                at_s = self._log.ended_s[-1]
                self.events.append(Event("token", active.request.id, at_s, tokens[-1], tokens=len(tokens)))

    def _given(self, active: ActiveRequest, member: _Member) -> TokenArray[int]:
        """Give a member its tokens of the iterations since it was told of some; returns them."""
        count, length = self._done - member.told, len(active.session.tokens)
        output, log = active.request.output, self._log
        if isinstance(output, Forced):
            tokens = output.tokens[active.generated : active.generated + count]
        else:
            tokens = drawn_tokens(active.noise_key, length, count, self._vocab)
        active.go_on(tokens)
        self._scheduler.cache.advance(active.session, ((length - 1, length - 1 + count),))
        iterations = Iterations(log.ended_s[-count:], log.compute_ms[-count:], log.stall_ms[-count:])
        self._scheduler.facts.decoded(active.request, tokens, iterations)
        member.told = self._done
        return tokens


def forward_for(computes: bool, depth: int, model: ModelSpec) -> Callable[[Scheduler], FastForward] | None:
    """What a worker needs that computes tokens or not, and has so many plans in flight."""
    return None if computes or depth > 1 else partial(FastForward, model=model)


_LOG = 4096  # iterations that the log may have beyond twice those that some member was not told of
_BY_ARRIVAL = attrgetter("arrival")


def _further_tokens(active: ActiveRequest) -> int:
    """How many more tokens it will sample after those awaited; 0 where that is not known in advance."""
    if active.eos or active.stop is not None:
        return 0
    return active.max_new_tokens - active.generated - active.awaited


def _further_prefills(active: ActiveRequest, row: Row) -> int:
    """How many further rows of as many positions follow this one and leave some of its work."""
    work = active.work
    if len(row.runs) > 1 or not work or work[0][0] != row.runs[0][1]:
        return 0
    start, stop = work[0]
    return (stop - start - 1) // row.positions


class ScatteredPool(BlockPool):
    """Free blocks as a stack, the one freed last on top: where a piece of a copy costs nothing and no kernel reads a block,
    it matters to nobody which blocks a session has."""

    def __init__(self, blocks: int, tier: Tier = GPU) -> None:
        self.tier, self.blocks, self.facts = tier, blocks, SILENT
        self._stack = array("i", range(blocks - 1, -1, -1))
        self.free = blocks

    def allocate(self, count: int, holder: int = NOBODY_NOW) -> TokenArray[int]:
        assert count <= self.free, f"{count} blocks asked, {self.free} free"
        self.free -= count
        taken = self._stack[self.free :]
        del self._stack[self.free :]
        self.facts.held(self.tier, taken, holder)
        return taken

    def allocate_after(self, block: int | None, count: int, holder: int = NOBODY_NOW) -> TokenArray[int]:
        return self.allocate(count, holder)

    def release(self, blocks: Sequence[int]) -> None:
        self.facts.freed(self.tier, blocks)
        self._stack.extend(blocks)
        self.free += len(blocks)

    def free_blocks(self) -> set[int]:
        return set(self._stack)
