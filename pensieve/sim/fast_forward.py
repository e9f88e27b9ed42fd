"""Plans that stand for several iterations, for a worker that computes nothing: the simulator need not be asked for each."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import repeat

from pensieve.core.plan import Repeats, Row
from pensieve.core.request import Event, Forced, TokenArray
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import Scheduler, Step
from pensieve.core.session import tokens_in


class FastForward:
    """Says of each plan of a scheduler for how many iterations it would make the same one again, and applies those."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

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
                if row is not rows[-1][1] or row.positions < share or not settings.is_unified:
                    return 1
                left = _further_prefills(active, row)
            else:
                if latest > active.arrival:
                    return 1  # a prefill that ends now is the last row, and will have its place among the decodes
                left, latest = _further_tokens(active), active.arrival
                lengths.append(len(active.session.tokens))
            further = min(further, left)
        prefills = len(rows) - len(lengths)
        if scheduler.filling_matters:
            size = scheduler.cache.chunk_tokens
            further = min(further, *((-length - 1) % size for length in lengths), further)
        if not further or (not prefills and len(rows) < len(scheduler.running)):
            return 1
        blocks = scheduler.blocks_until_change([active for active, _ in rows[len(lengths) :]])
        if self._blocks_for(lengths, further) > blocks:
            further = max(0, bisect_right(range(further), blocks, key=partial(self._blocks_for, lengths)) - 1)
        return 1 + further if blocks >= 0 else 1

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
        return emitted, _earlier_events(decodes, repeats, emitted, counted) if emitted else []

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


def _earlier_events(
    decodes: list[ActiveRequest], repeats: Repeats, emitted: list[TokenArray[int]], counted: bool
) -> list[Event]:
    """The tokens of all further iterations but the last. counted: only how many they are."""
    ids = [active.request.id for active in decodes]
    times_s = [ended_ns / 1e9 for ended_ns in repeats.ended_ns[:-1]]
    if counted:
        return [Event("token", one, times_s[-1], tokens=len(times_s)) for one in ids] if times_s else []
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
