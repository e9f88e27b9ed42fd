"""How much of a trace's prompts a cache of blocks would find again: the figure that traces are published with."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.lab.workload.chance import exponential, shuffled
from pensieve.lab.workload.recording import Blocks, Call, Recording


@dataclass(frozen=True, slots=True)
class Reuse:
    """Counts over all prompts. unique_blocks: different ones, whatever the capacity."""

    blocks: int
    tokens: int
    unique_blocks: int
    hit_blocks: int
    hit_tokens: int

    @property
    def block_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def block_reuse(
    requests: Iterable[tuple[Sequence[int], int]], block_tokens: int, capacity_tokens: float | None = None
) -> Reuse:
    """Look up each request's blocks, one after another, in a cache with least-recently-used replacement.

    requests: (block hashes, prompt tokens) in order of arrival; the last block may be partly filled. capacity_tokens:
    what the cache holds, rounded down to blocks; None: everything.
    """
    if capacity_tokens is None:
        return _unbounded(requests, block_tokens)
    room = int(capacity_tokens // block_tokens)
    cache: OrderedDict[int, None] = OrderedDict()
    seen: set[int] = set()
    blocks = tokens = hit_blocks = hit_tokens = 0
    for hashes, prompt_tokens in requests:
        for index, block in enumerate(hashes):
            filled = max(0, min(block_tokens, prompt_tokens - index * block_tokens))
            blocks += 1
            tokens += filled
            if block in cache:
                hit_blocks += 1
                hit_tokens += filled
                cache.move_to_end(block)
                continue
            seen.add(block)
            cache[block] = None
            if len(cache) > room:
                cache.popitem(last=False)
    return Reuse(blocks, tokens, len(seen), hit_blocks, hit_tokens)


def _unbounded(requests: Iterable[tuple[Sequence[int], int]], block_tokens: int) -> Reuse:
    """What was ever seen hits. Whole prompts at once: a trace may have ten million blocks."""
    seen: set[int] = set()
    blocks = tokens = missed_tokens = 0
    for hashes, prompt_tokens in requests:
        filled = max(0, min(prompt_tokens, len(hashes) * block_tokens))
        fresh = set(hashes) - seen
        seen |= fresh
        blocks += len(hashes)
        tokens += filled
        full = filled // block_tokens
        missed_tokens += len(fresh) * block_tokens
        for place in range(full, len(hashes)):  # partly filled, or not at all: the last one at most, in a trace
            if hashes[place] in fresh and hashes.index(hashes[place]) == place:
                missed_tokens -= block_tokens - max(0, filled - place * block_tokens)
    return Reuse(blocks, tokens, len(seen), blocks - len(seen), tokens - missed_tokens)


def furthest_reuse(requests: Iterable[tuple[Sequence[int], int]], block_tokens: int, capacity_tokens: float) -> Reuse:
    """As `block_reuse`, in a cache that knows the future: whenever there is no room, the block goes that is needed last
    (Belady 1966), the one just used included, so that what is not needed soon enough is not kept at all."""
    asked = list(requests)
    accesses = [block for hashes, _ in asked for block in hashes]
    never = len(accesses)
    following = [never] * never
    later: dict[int, int] = {}
    for place in range(never - 1, -1, -1):
        following[place] = later.get(accesses[place], never)
        later[accesses[place]] = place
    room = int(capacity_tokens // block_tokens)
    held: dict[int, int] = {}  # the next use of each block in the cache
    furthest: list[tuple[int, int]] = []
    place = tokens = hit_blocks = hit_tokens = 0
    for hashes, prompt_tokens in asked:
        for index, block in enumerate(hashes):
            filled = max(0, min(block_tokens, prompt_tokens - index * block_tokens))
            tokens += filled
            if held.pop(block, None) is not None:
                hit_blocks += 1
                hit_tokens += filled
            if following[place] < never:
                held[block] = following[place]
                heapq.heappush(furthest, (-following[place], block))
            while len(held) > room:
                next_use, last = heapq.heappop(furthest)
                if held.get(last) == -next_use:
                    del held[last]
            place += 1
    return Reuse(never, tokens, len(later), hit_blocks, hit_tokens)


def told_reuse(
    requests: Sequence[tuple[Sequence[int], int]],
    soon: Sequence[bool],
    block_tokens: int,
    capacity_tokens: float,
    at_s: Sequence[float] | None = None,
    within_s: float = math.inf,
) -> Reuse:
    """As `block_reuse`, in a cache that is told with each request whether its conversation is soon back: blocks of those that
    are not go first, least recently used among themselves, then those of the others.

    soon: of each request. at_s: when each was sent, in order; `within_s` later its blocks count no longer as soon used again,
    and go by when they were last used.
    """
    room = int(capacity_tokens // block_tokens)
    first: OrderedDict[int, float] = OrderedDict()  # block -> when it was used
    last: OrderedDict[int, float] = OrderedDict()
    seen: set[int] = set()
    blocks = tokens = hit_blocks = hit_tokens = 0
    sent_s = [0.0] * len(requests) if at_s is None else at_s
    for (hashes, prompt_tokens), back, now_s in zip(requests, soon, sent_s, strict=True):
        for index, block in enumerate(hashes):
            filled = max(0, min(block_tokens, prompt_tokens - index * block_tokens))
            blocks += 1
            tokens += filled
            if block in first or block in last:
                hit_blocks += 1
                hit_tokens += filled
                first.pop(block, None)
                last.pop(block, None)
            seen.add(block)
            (last if back else first)[block] = now_s
            if len(first) + len(last) > room:
                used_s, told_s = (next(iter(tier.values()), math.inf) for tier in (first, last))
                lapsed = told_s < min(used_s, now_s - within_s)
                (last if lapsed or not first else first).popitem(last=False)
    return Reuse(blocks, tokens, len(seen), hit_blocks, hit_tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """A recorded call at the time when it is sent. session: the number of its conversation, by when they begin."""

    at_s: float
    session: int
    call: Call


def started(recording: Recording, over_s: float, sessions: int, seed: int) -> list[Asked]:
    """Of a recording whose conversations have clocks of their own so many, drawn by the seed, which begin as a Poisson
    process over so many seconds and keep their recorded times; what comes after is left out. In the order of their times.
    Conversations that others began are left out."""
    people = [one for one in recording.conversations if one.begun is None]
    found: list[Asked] = []
    began_s = 0.0
    for place, index in enumerate(shuffled(len(people), seed, "conversations")[:sessions]):
        began_s += exponential(over_s / sessions, seed, "arrival", place)
        for call in people[index].calls:
            assert call.at_s is not None
            if began_s + call.at_s > over_s:
                break
            found.append(Asked(began_s + call.at_s, place, call))
    return sorted(found, key=lambda one: (one.at_s, one.session))


def back_within(asked: Sequence[Asked], within_s: float) -> list[bool]:
    """Of each call, whether the next one of its conversation comes within so many seconds."""
    following: dict[int, float] = {}
    found = []
    for one in reversed(asked):
        found.append(following.get(one.session, math.inf) - one.at_s <= within_s)
        following[one.session] = one.at_s
    return found[::-1]


def started_over(
    recording: Recording, over_s: float, sessions: int, seed: int, blocks_in_one: int = 1
) -> tuple[list[tuple[Sequence[int], int]], int]:
    """What `recorded_blocks` gives, of the calls that `started` gives.

    blocks_in_one: so many recorded blocks that follow each other are one here; what is left behind the last whole one is
    left out.
    """
    names: dict[tuple[int, ...], int] = {}
    found: list[list[int]] = []
    size = 1
    for one in started(recording, over_s, sessions, seed):
        assert isinstance(one.call.content, Blocks)
        hashes, size = one.call.content.hashes, one.call.content.block_tokens * blocks_in_one
        starts = range(0, len(hashes) - blocks_in_one + 1, blocks_in_one)
        wide = [tuple(hashes[start : start + blocks_in_one]) for start in starts]
        found.append([names.setdefault(block, len(names)) for block in wide])
    return [(blocks, len(blocks) * size) for blocks in found], size


def recorded_blocks(recording: Recording) -> tuple[list[tuple[Sequence[int], int]], int]:
    """The (block hashes, prompt tokens) of a recording in order of arrival, and the tokens of a block.

    Calls without block hashes are left out; a recording without any gives ([], 1).
    """
    found = [
        (call.at_s or 0.0, call.order, call.content)
        for conversation in recording.conversations
        for call in conversation.calls
        if isinstance(call.content, Blocks)
    ]
    found.sort(key=lambda one: one[:2])
    size = found[0][2].block_tokens if found else 1
    return [(blocks.hashes, blocks.tokens) for _, _, blocks in found], size
