"""An engine on a virtual clock: it runs in the thread of whoever polls, and a plan of it may stand for several iterations."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import repeat
from typing import Any

from pensieve.core.cache.blocks import BlockPool
from pensieve.core.facts import NOBODY_NOW, SILENT
from pensieve.core.machine import CostModel
from pensieve.core.plan import GPU, Repeats, Row, StartReport, Tier
from pensieve.core.request import Event, Forced, Request, TokenArray
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import Scheduler, Step, unified
from pensieve.core.session import tokens_in
from pensieve.errors import WorkerError
from pensieve.serve.record import Listener
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, EngineSystem
from pensieve.sim.cost import simulated_cost
from pensieve.sim.worker import SimulatedWorker, VirtualClock


class InlineSystem(EngineSystem):
    """`poll`, `ask` and `drive` run the engine, in the thread that calls them. Several threads may use it: each call has the
    engine to itself, so that one made during a poll takes effect when that poll returns. Whoever asks runs the engine until
    some request has finished, and lets the others have it before going on: so those who ask at once are served together.
    """

    def __init__(self, **parts: Any) -> None:
        """parts: as EngineSystem takes them, with a VirtualClock."""
        super().__init__(**parts)
        self._forward = forward_for(self._worker.computes, self._worker.depth)
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


class FastForward:
    """Says of each plan of a scheduler for how many iterations it would make the same one again, and applies those."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Every iteration computes all decodes, and prefills as far as it then has positions left.
        composition = scheduler.settings.composition  # Hydra makes a partial of it
        self._is_unified = getattr(composition, "func", composition) is unified

    def iterations(self, rows: list[tuple[ActiveRequest, Row]]) -> int:
        """As long as each would be composed as this one is, and nothing would be admitted or copied. Decodes go on by one
        position, and a prefill that fills up the iteration by as many as it has now. When a copy ends, only the worker knows:
        it stops then."""
        scheduler, settings = self._scheduler, self._scheduler.settings
        if not rows:
            return 1
        further, latest = settings.max_batch_tokens, rows[0][0].arrival
        lengths: list[int] = []
        for active, row in rows:
            if row.sample is None:
                share = settings.max_batch_tokens - len(lengths)
                if row is not rows[-1][1] or row.positions < share or not self._is_unified:
                    return 1
                left = _further_prefills(active, row)
            else:
                if latest > active.arrival:
                    return 1  # a prefill that ends now is the last row, and will have its place among the decodes
                left, latest = _further_tokens(active), active.arrival
                lengths.append(len(active.session.tokens))
            further = min(further, left)
        prefills = len(rows) - len(lengths)
        if scheduler.room.stores_replies or (scheduler.room.shares and scheduler.next_head is not None):
            size = scheduler.cache.chunk_tokens
            further = min(further, *((-length - 1) % size for length in lengths), further)
        if not further or (not prefills and len(rows) < len(scheduler.running)):
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
        """Blocks that requests whose positions fill blocks up to these lengths take for `further` positions more each."""
        size = self._scheduler.cache.chunk_tokens
        return sum((length + further - 1) // size - (length - 1) // size for length in lengths)

    def apply(
        self, step: Step, repeats: Repeats, now_s: float, counted: bool
    ) -> tuple[list[TokenArray[int]], list[Event]]:
        decodes = [active for active, _ in step.rows[: step.sampled]]
        emitted = [_append(active, repeats) for active in decodes]
        self._scheduler.facts.repeated(step.plan, repeats, [active.request.id for active, _ in step.rows], emitted)
        self._take_blocks(step, [now_s, *(ended_ns / 1e9 for ended_ns in repeats.ended_ns[:-1])])
        return emitted, [] if counted or not emitted else _earlier_events(decodes, repeats, emitted)

    def _take_blocks(self, step: Step, planned_s: list[float]) -> None:
        """planned_s: when each further iteration would have been planned. The cache learns what they computed, and each
        request takes every block at the time at which it needed it."""
        scheduler, cache, facts = self._scheduler, self._scheduler.cache, self._scheduler.facts
        times, size = len(planned_s), cache.chunk_tokens
        scheduler.counters.steps += times
        decodes = [active for active, _ in step.rows[: step.sampled]]
        prefills = [(active, tokens_in(runs)) for active, runs in step.rows[step.sampled :]]
        scheduler.counters.batched_tokens += times * (len(decodes) + sum(count for _, count in prefills))
        starts = [len(active.session.tokens) - times - 1 for active in decodes]
        for further, row in sorted(
            (further, row) for row, start in enumerate(starts) for further in range(-start % size, times, size)
        ):
            scheduler.take_block(decodes[row], starts[row] + further + 1, planned_s[further])
        asked_last = (
            decodes[-1] if decodes else scheduler.next_head
        )  # if only for what it had, or for what it did not get
        if asked_last is not None:
            facts.room_for(asked_last.session, planned_s[-1])
        for active, start in zip(decodes, starts, strict=True):
            cache.advance(active.session, ((start, start + times),))
        for active, count in prefills:
            cache.advance(active.session, active.take(times * count))


def forward_for(computes: bool, depth: int) -> type[FastForward] | None:
    """What a worker needs that computes tokens or not, and has so many plans in flight."""
    return None if computes or depth > 1 else FastForward


def _earlier_events(decodes: list[ActiveRequest], repeats: Repeats, emitted: list[TokenArray[int]]) -> list[Event]:
    """The tokens of all further iterations but the last."""
    ids = [active.request.id for active in decodes]
    times_s = [ended_ns / 1e9 for ended_ns in repeats.ended_ns[:-1]]
    return [
        Event("token", *each)
        for at_s, tokens in zip(times_s, zip(*emitted, strict=True), strict=False)
        for each in zip(ids, repeat(at_s), tokens)
    ]


def _append(active: ActiveRequest, repeats: Repeats) -> TokenArray[int]:
    """Append the tokens of further iterations, each sampled at the position of the one before. Returns those appended: the
    given ones, where the output is forced."""
    assert active.slot is not None
    sampled, output = repeats.tokens[active.slot], active.request.output
    if isinstance(output, Forced):
        sampled = output.tokens[active.generated : active.generated + len(sampled)]
    active.session.extend(sampled)
    active.generated += len(sampled)
    return sampled


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
        self._stack = list(range(blocks - 1, -1, -1))
        self.free = blocks

    def allocate(self, count: int, holder: int = NOBODY_NOW) -> list[int]:
        assert count <= self.free, f"{count} blocks asked, {self.free} free"
        self.free -= count
        taken = self._stack[self.free :]
        del self._stack[self.free :]
        self.facts.held(self.tier, taken, holder)
        return taken

    def allocate_after(self, block: int | None, count: int, holder: int = NOBODY_NOW) -> list[int]:
        return self.allocate(count, holder)

    def release(self, blocks: Sequence[int]) -> None:
        self.facts.freed(self.tier, blocks)
        self._stack += blocks
        self.free += len(blocks)

    def free_blocks(self) -> set[int]:
        return set(self._stack)
