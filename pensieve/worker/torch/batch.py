"""One iteration's rows, flattened into the tensors that a forward takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.plan import Row, Sample
from pensieve.worker.torch.sampler import Draws, draws_of, numbers_of

_UNSEEN: Sequence[int] = [0]  # in place of a token that the host does not know
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
    batch, one a sampled row, in the order of `sampled`; sampled_slots, draws: of the same rows, on the device.
    unseen: places in token_ids, and the slots whose last sampled token belongs there; None where every token is known.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    spans: tuple[Span, ...]
    logits_at: torch.Tensor
    sampled: tuple[tuple[int, Sample], ...]
    sampled_slots: torch.Tensor | None = None
    draws: Draws | None = None
    unseen: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def all_single(self) -> bool:
        """Whether every row is one position; the last span tells, since the longer ones come last."""
        return self.spans[-1].queries == 1


def build_batch(
    rows: Sequence[Row], tables: BlockTables, last_token: Mapping[int, int], chunk_tokens: int, device: torch.device
) -> Batch:
    """Flatten `rows` (at least one). Reads the tables and last tokens, changes nothing.

    last_token: what slots sampled last, as far as the host knows; a row without tokens of any other slot is `unseen`.
    """
    pieces: list[tuple[int, int, int, Sequence[int], Sample | None]] = []  # slot, start, stop, ids, sample
    for row in rows:
        ids: Sequence[int] = row.tokens or ((last_token[row.slot],) if row.slot in last_token else _UNSEEN)
        assert len(ids) == row.positions, f"row of slot {row.slot}: {len(ids)} tokens for {row.positions} positions"
        offset = 0
        for start, stop in row.runs:
            ends_row = offset + stop - start == row.positions
            part = ids[offset : offset + stop - start] if len(row.runs) > 1 else ids
            pieces.append((row.slot, start, stop, part, row.sample if ends_row else None))
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

    arrays = [token_ids, positions, write_slots, _integers(logits_at), _integers([slot for slot, _ in sampled])]
    unseen = [(span.first, piece[0]) for span, piece in zip(spans, pieces, strict=True) if piece[3] is _UNSEEN]
    if unseen:
        arrays += [_integers(part) for part in zip(*unseen, strict=True)]
    limited, drawn = False, any(sample.temperature > 0 for _, sample in sampled)
    if drawn:
        numbers, limited = numbers_of([sample for _, sample in sampled])
        arrays += numbers
    tensors = _upload(arrays, device)
    return Batch(
        token_ids=tensors[0],
        positions=tensors[1],
        write_slots=tensors[2],
        spans=tuple(spans),
        logits_at=tensors[3],
        sampled=tuple(sampled),
        sampled_slots=tensors[4],
        draws=draws_of(tensors[-5:], limited) if drawn else None,
        unseen=(tensors[5], tensors[6]) if unseen else None,
    )


def _integers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """All in one copy, which nobody waits for: pinned memory is kept until it is done. Each begins at 16 bytes, so that a
    kernel is compiled once and not for each alignment."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)])
    whole = torch.empty(int(starts[-1]), dtype=torch.int64, pin_memory=True)
    filled = whole.numpy()
    for start, array in zip(starts[:-1], arrays, strict=True):
        filled[start : start + len(array)] = array
    there = whole.to(device, non_blocking=True)
    return [there[start : start + len(array)] for start, array in zip(starts[:-1].tolist(), arrays, strict=True)]
