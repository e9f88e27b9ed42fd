"""One iteration's rows, flattened into the tensors that a forward takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.core.plan import Row, Sample
from pensieve.device.sampler import Draws, draws_of, numbers_of

Integers = NDArray[np.int64]

_UNSEEN = 0  # in place of a token that the host does not know
NO_BLOCK = -1  # an entry of a block table that no plan has set


class BlockTables:
    """Per slot, the GPU block of each chunk of the conversation that runs there: one table that lives on, a row a slot, so
    that an iteration's entries are looked up together."""

    def __init__(self) -> None:
        self._table = np.full((1, 16), NO_BLOCK, dtype=np.int64)

    def overwrite(self, slot: int, first_chunk: int, blocks: Sequence[int]) -> None:
        """Set entries [first_chunk, first_chunk + len(blocks)); entries of an earlier use of the slot may lie beyond."""
        slots, chunks = self._table.shape
        stop = first_chunk + len(blocks)
        if slot >= slots or stop > chunks:
            shape = (slots if slot < slots else 2 * slot + 1, chunks if stop <= chunks else 2 * stop)
            larger = np.full(shape, NO_BLOCK, dtype=np.int64)
            larger[:slots, :chunks] = self._table
            self._table = larger
        self._table[slot, first_chunk:stop] = blocks

    def at(self, slots: Integers, chunks: Integers) -> Integers:
        """The block of one chunk of each slot."""
        return self._table[slots, chunks]

    def joined(self, slots: Integers, chunks: Integers) -> Integers:
        """The blocks of chunks [0, chunks[i]) of slots[i], one slot's after the other's."""
        within = np.arange(int(chunks.max(initial=0))) < chunks[:, None]
        return self._table[slots, : within.shape[1]][within]


@dataclass(frozen=True, slots=True)
class Span:
    """One attention row: queries [first, first + stop - start) of the batch are positions [start, stop).

    blocks: those of chunks [0, ceil(stop / chunk_tokens)). A hole below a sliding window may hold NO_BLOCK.
    """

    first: int
    start: int
    stop: int
    blocks: Integers

    @property
    def queries(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans as contiguous arrays [spans], since a plan takes them together. Spans of one query come first. chunks: how many
    blocks each has; `blocks`: those of one span after the other's. Iterating makes a Span of each."""

    first: Integers
    start: Integers
    stop: Integers
    chunks: Integers
    blocks: Integers

    @property
    def queries(self) -> Integers:
        return self.stop - self.start

    @property
    def singles(self) -> int:
        """How many are of one query."""
        return int((self.queries == 1).sum())

    @property
    def tables(self) -> Integers:
        """Where the blocks of each begin."""
        return np.cumsum(self.chunks) - self.chunks

    def lows(self, window: int | None) -> Integers:
        """The first position that any query of each attends to."""
        return np.zeros_like(self.start) if window is None else np.maximum(0, self.start - window + 1)

    def cut(self, begin: int, end: int) -> Spans:
        """Spans [begin, end)."""
        some, bounds = slice(begin, end), [0, *np.cumsum(self.chunks).tolist()]
        of = slice(bounds[begin], bounds[end])
        return Spans(self.first[some], self.start[some], self.stop[some], self.chunks[some], self.blocks[of])

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[Span]:
        bounds = zip(self.first.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        tables = zip(self.tables.tolist(), self.chunks.tolist(), strict=True)
        for bound, (table, chunks) in zip(bounds, tables, strict=True):
            yield Span(*bound, self.blocks[table : table + chunks])


@dataclass(frozen=True, slots=True)
class Batch:
    """A forward over all rows of a plan. Spans of one query come first, longest context first, then the others.

    token_ids, positions, write_places: [tokens]; the last says where in the pool each K and V goes (block * chunk_tokens +
    offset). logits_at: indices into the batch, one a sampled row, in the order of `sampled`; sampled_slots, draws: of the
    same rows, on the device.
    unseen: places in token_ids, and the slots whose last sampled token belongs there; None where every token is known.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_places: torch.Tensor
    spans: Spans
    logits_at: torch.Tensor
    sampled: tuple[tuple[int, Sample], ...]
    sampled_slots: torch.Tensor | None = None
    draws: Draws | None = None
    unseen: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def all_single(self) -> bool:
        """Whether every row is one position."""
        return self.spans.singles == len(self.spans)


def build_batch(rows: Sequence[Row], tables: BlockTables, chunk_tokens: int, device: torch.device) -> Batch:
    """Flatten `rows` (at least one). Reads the tables, changes nothing."""
    # Decode queries lie together, with contexts of like length adjacent, so that attention takes them in few groups.
    single, several = _pieces(rows)
    single.sort(key=lambda piece: -piece[0])
    starts, slots = _integers([piece[0] for piece in single]), _integers([piece[1] for piece in single])
    ids = _integers([_UNSEEN if piece[2] is None else piece[2] for piece in single])
    unseen = [at for at, piece in enumerate(single) if piece[2] is None]
    sampled = [(piece[1], piece[3]) for piece in single if piece[3] is not None]
    logits_at = [at for at, piece in enumerate(single) if piece[3] is not None]
    tokens, positions, holders = [ids], [starts], [slots]
    first, bounds = len(single), []
    for start, slot, part, sample in several:
        tokens.append(_integers(part))
        positions.append(np.arange(start, start + len(part), dtype=np.int64))
        holders.append(np.full(len(part), slot, dtype=np.int64))
        bounds.append((first, start, start + len(part), slot))
        first += len(part)
        if sample is not None:
            sampled.append((slot, sample))
            logits_at.append(first - 1)
    ones = np.stack([np.arange(len(single)), starts, starts + 1, slots], axis=1)
    firsts, begins, stops, of = np.ascontiguousarray(
        np.concatenate([ones, np.array(bounds, dtype=np.int64).reshape(-1, 4)]).T
    )
    where, holder = np.concatenate(positions), np.concatenate(holders)
    chunks, offsets = np.divmod(where, chunk_tokens)
    counts = -(-stops // chunk_tokens)
    blocks = tables.at(holder, chunks)
    assert (blocks >= 0).all(), f"slot {int(holder[blocks < 0][0])} computes positions of a chunk that has no block"
    spans = Spans(firsts, begins, stops, counts, tables.joined(of, counts))
    arrays = [np.concatenate(tokens), where, blocks * chunk_tokens + offsets, _integers(logits_at)]
    arrays.append(_integers([slot for slot, _ in sampled]))
    if unseen:
        arrays += [_integers(unseen), slots[unseen]]
    limited, drawn = False, any(sample.temperature > 0 for _, sample in sampled)
    if drawn:
        numbers, limited = numbers_of([sample for _, sample in sampled])
        arrays += numbers
    tensors = _upload(arrays, device)
    return Batch(
        token_ids=tensors[0],
        positions=tensors[1],
        write_places=tensors[2],
        spans=spans,
        logits_at=tensors[3],
        sampled=tuple(sampled),
        sampled_slots=tensors[4],
        draws=draws_of(tensors[-5:], limited) if drawn else None,
        unseen=(tensors[5], tensors[6]) if unseen else None,
    )


_One = tuple[int, int, int | None, Sample | None]  # position, slot, token where the host knows it, sample
_Several = tuple[int, int, Sequence[int], Sample | None]  # first position, slot, tokens, sample


def _pieces(rows: Sequence[Row]) -> tuple[list[_One], list[_Several]]:
    """The runs of all rows: those of one position, and the longer ones."""
    single: list[_One] = []
    several: list[_Several] = []
    for row in rows:
        slot, ids = row.slot, row.tokens
        if ids is None:  # the host does not know the token that the slot sampled last
            single.append((row.runs[0][0], slot, None, row.sample))
            continue
        assert len(ids) == row.positions, f"row of slot {slot}: {len(ids)} tokens for {row.positions} positions"
        offset = 0
        for start, stop in row.runs:
            part = ids[offset : offset + stop - start]
            offset += stop - start
            sample = row.sample if offset == len(ids) else None
            if len(part) == 1:
                single.append((start, slot, part[0], sample))
            else:
                several.append((start, slot, part, sample))
    return single, several


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)


def _upload(arrays: Sequence[Integers], device: torch.device) -> list[torch.Tensor]:
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
