"""Which blocks of a copy are neighbours in both tiers, and so move together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.core.plan import Move


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`blocks` consecutive blocks from `src` on, copied to as many from `dst` on."""

    src: int
    dst: int
    blocks: int


def merge_moves(moves: Sequence[Move]) -> list[BlockRun]:
    """Join blocks that are adjacent in source and target alike. Moves of one direction may be done in any order."""
    pairs = sorted(pair for move in moves for pair in zip(move.src, move.dst, strict=True))
    runs: list[BlockRun] = []
    for src, dst in pairs:
        last = runs[-1] if runs else None
        if last is not None and src == last.src + last.blocks and dst == last.dst + last.blocks:
            runs[-1] = BlockRun(last.src, last.dst, last.blocks + 1)
        else:
            runs.append(BlockRun(src, dst, 1))
    return runs
