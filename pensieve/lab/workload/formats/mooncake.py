"""Mooncake's release for FAST 2025: JSON lines with a timestamp in ms, two lengths, and a hash for each 512 tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.core.request import TokenArray
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, hash_list, number, whole
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Recording, hashes_of
from pensieve.units import ceil_div

BLOCK_TOKENS = 512
RULE = (
    "A request continues the earlier one that it shares most leading blocks with, the latest of several. Those blocks "
    "must reach beyond the prefix that more than half of all requests share ({shared} blocks); otherwise the request opens "
    "a conversation. Every request carries its whole prompt. Equal block hashes give equal tokens. Later prompts hold the "
    "trace's blocks, not our replies."
)


@dataclass(frozen=True, slots=True)
class _Line:
    ms: float
    input_length: int
    output_length: int
    hashes: TokenArray[int]


def read(reader: Reader) -> Recording:
    lines = sorted(reader.json_lines(_line), key=lambda line: line.ms)
    first = lines[0].ms if lines else 0.0
    groups, shared = continuations([line.hashes for line in lines])
    conversations = tuple(
        Conversation(f"mooncake-{group[0]}", tuple(_call(lines[index], first, index) for index in group))
        for group in groups
    )
    return reader.recording(
        format="mooncake",
        conversations=conversations,
        rule=RULE.format(shared=shared),
        facts={"shared_prefix_blocks": shared},
    )


def continuations(requests: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Groups of indices, a conversation each, in order of their first request; and the blocks that everybody shares.

    requests: block hashes, in order of arrival, a hash standing for its block and all before it.
    """
    shared = shared_prefix(requests)
    groups: list[list[int]] = []
    holder: dict[int, int] = {}  # the group whose request held a block last
    for index, hashes in enumerate(requests):
        known = next((holder[one] for one in reversed(hashes[shared:]) if one in holder), None)
        if known is None:
            known = len(groups)
            groups.append([])
        groups[known].append(index)
        holder.update(dict.fromkeys(hashes[shared:], known))
    return groups, shared


def shared_prefix(requests: Sequence[Sequence[int]]) -> int:
    """How many leading blocks more than half of the requests have in common."""
    left, depth = [hashes for hashes in requests if hashes], 0
    while left:
        common, holders = Counter(hashes[depth] for hashes in left if len(hashes) > depth).most_common(1)[0]
        if 2 * holders <= len(requests):
            break
        depth += 1
        left = [hashes for hashes in left if len(hashes) > depth and hashes[depth - 1] == common]
    return depth


def _line(row: Row) -> _Line:
    tokens, hashes = whole(row, "input_length", 1), hash_list(row, "hash_ids")
    if len(hashes) != ceil_div(tokens, BLOCK_TOKENS):
        raise Malformed(
            f"input_length={tokens} makes {ceil_div(tokens, BLOCK_TOKENS)} blocks, and hash_ids has {len(hashes)}"
        )
    return _Line(number(row, "timestamp"), tokens, whole(row, "output_length"), hashes_of(hashes))


def _call(line: _Line, first_ms: float, order: int) -> Call:
    content = Blocks(line.hashes, BLOCK_TOKENS, line.input_length)
    return Call(content, line.output_length, (line.ms - first_ms) / 1e3, continues=False, order=order)
