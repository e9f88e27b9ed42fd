"""One iteration's rows, flattened into the tensors that a forward takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.plan import Row, Sample

NO_BLOCK = -1  # an entry of a block table that no plan has set


class BlockTables:
    """Per slot, the GPU block of each chunk of the conversation that runs there."""

    def __init__(self) -> None:
        self._tables: dict[int, NDArray[np.int64]] = {}

    def overwrite(self, slot: int, first_chunk: int, blocks: Sequence[int]) -> None:
        """Set entries [first_chunk, first_chunk + len(blocks)); entries of an earlier use of the slot may lie beyond."""
        table = self._tables.get(slot)
        stop = first_chunk + len(blocks)
        if table is None or len(table) < stop:
            longer = np.full(max(16, 2 * stop), NO_BLOCK, dtype=np.int64)
            if table is not None:
                longer[: len(table)] = table
            self._tables[slot] = table = longer
        table[first_chunk:stop] = blocks

    def blocks(self, slot: int, chunks: int) -> NDArray[np.int64]:
        """The blocks of chunks [0, chunks), a view."""
        return self._tables[slot][:chunks]


@dataclass(frozen=True, slots=True)
class Span:
    """One attention row: queries [first, first + stop - start) of the batch are positions [start, stop).

    blocks: those of chunks [0, ceil(stop / chunk_tokens)). A hole below a sliding window may hold NO_BLOCK.
    """

    first: int
    start: int
    stop: int
    blocks: NDArray[np.int64]

    @property
    def queries(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """A forward over all rows of a plan. Spans of one query come first, longest context first, then the others.

    token_ids, positions, write_slots: [tokens]; write_slots says where each K and V goes. logits_at: indices into the
    batch, one a sampled row, in the order of `sampled`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    spans: tuple[Span, ...]
    logits_at: torch.Tensor
    sampled: tuple[tuple[int, Sample], ...]


def build_batch(
    rows: Sequence[Row], tables: BlockTables, last_token: Mapping[int, int], chunk_tokens: int, device: torch.device
) -> Batch:
    """Flatten `rows` (at least one). Reads the tables and last tokens, changes nothing."""
    pieces: list[tuple[int, int, int, Sequence[int], Sample | None]] = []  # slot, start, stop, ids, sample
    for row in rows:
        ids: Sequence[int] = (last_token[row.slot],) if row.tokens is None else row.tokens
        assert len(ids) == row.positions, f"row of slot {row.slot}: {len(ids)} tokens for {row.positions} positions"
        offset = 0
        for start, stop in row.runs:
            ends_row = offset + stop - start == row.positions
            pieces.append(
                (row.slot, start, stop, ids[offset : offset + stop - start], row.sample if ends_row else None)
            )
            offset += stop - start
    # Decode queries lie together, with contexts of like length adjacent, so that attention takes them in few groups.
    pieces.sort(key=lambda piece: (1, 0) if piece[2] - piece[1] > 1 else (0, -piece[2]))

    total = sum(stop - start for _, start, stop, _, _ in pieces)
    token_ids, positions, write_slots = (np.empty(total, dtype=np.int64) for _ in range(3))
    spans: list[Span] = []
    sampled: list[tuple[int, Sample]] = []
    logits_at: list[int] = []
    first = 0
    for slot, start, stop, ids, sample in pieces:
        end = first + stop - start
        blocks = tables.blocks(slot, -(-stop // chunk_tokens))
        here = np.arange(start, stop, dtype=np.int64)
        token_ids[first:end], positions[first:end] = ids, here
        owners = blocks[here // chunk_tokens]
        assert (owners >= 0).all(), f"slot {slot} computes positions of a chunk that has no block"
        write_slots[first:end] = owners * chunk_tokens + here % chunk_tokens
        spans.append(Span(first, start, stop, blocks))
        if sample is not None:
            sampled.append((slot, sample))
            logits_at.append(end - 1)
        first = end

    def tensor(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        write_slots=tensor(write_slots),
        spans=tuple(spans),
        logits_at=tensor(np.array(logits_at, dtype=np.int64)),
        sampled=tuple(sampled),
    )
