"""How much of a trace's prompts a cache of blocks would find again: the figure that traces are published with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.lab.workload.recording import Blocks, Recording


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
