"""Attention in torch's own operations: any device, any architecture; what a CPU serves with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.device.batch import Batch, Integers, Span, Spans
from pensieve.device.kernels.base import Plan, Scores

_SOFTCAP_QUERIES = 256  # a softcap forbids the fused kernel; this many queries at a time bound the matrix of scores
_PADDING_TOKENS = 64  # rows of one decode group differ by at most this, or by a quarter
_ALONE_TOKENS = (
    64  # on a CPU a decode row over at least this many positions attends by itself: one gather of all is slower
)


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A span from position 0: its keys are the batch's own, causal without a mask, and the pool is not read."""

    first: int
    queries: int


@dataclass(frozen=True, slots=True)
class _Append:
    """A span over earlier positions. places: [kv_len], or a slice of consecutive ones; mask [queries, kv_len]."""

    first: int
    queries: int
    places: torch.Tensor | slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Decode:
    """Spans of one query. places: [rows * width], or a slice (one row); mask [rows, 1, 1, width] if padded."""

    first: int
    rows: int
    width: int
    places: torch.Tensor | slice
    mask: torch.Tensor | None


_Work = _Fresh | _Append | _Decode


class ReferencePlan(Plan):
    """One iteration's spans as pieces of work. Index tensors and masks are made once, and shared by all layers."""

    def __init__(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> None:
        """pool: [layers, tokens, 2, kv_heads, head_dim]."""
        self._batch = batch
        self._device, self._dtype = pool.device, pool.dtype
        self._chunk_tokens = chunk_tokens
        self._work: dict[tuple[int | None, bool], list[_Work]] = {}  # by window and softcap: layers alternate

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        work = self.work(scores.window, scores.softcap is not None)
        if len(work) == 1:
            return _attend(work[0], pool, queries, keys, values, scores)
        # The pieces are in the order of their queries, and leave none out.
        return torch.cat([_attend(piece, pool, queries, keys, values, scores) for piece in work])

    def work(self, window: int | None, capped: bool) -> list[_Work]:
        """The spans as pieces of work for layers with this window; a capped layer always gets masks."""
        key = (window, capped)
        if key not in self._work:
            self._work[key] = list(self._prepare(window, capped))
        return self._work[key]

    def _prepare(self, window: int | None, capped: bool) -> Iterator[_Work]:
        spans = self._batch.spans
        lengths = (spans.stop - spans.lows(window))[: spans.singles].tolist()
        for begin, end in _groups(lengths, self._device.type == "cpu"):
            yield self._decode(spans.cut(begin, end), window)
        for span in spans.cut(spans.singles, len(spans)):
            if span.start == 0 and not capped and (window is None or span.stop <= window):
                yield _Fresh(span.first, span.queries)
            else:
                yield self._append(span, window)

    def _append(self, span: Span, window: int | None) -> _Append:
        low = 0 if window is None else max(0, span.start - window + 1)
        mask = torch.full((span.queries, span.stop - low), float("-inf"), dtype=self._dtype, device=self._device)
        if window is None:
            mask.triu_(span.start - low + 1)  # later than the query
        else:
            mask = mask.triu(span.start - low + 1) + mask.tril(span.start - low - window)  # or out of the window
        return _Append(span.first, span.queries, self._places(span.blocks, low, span.stop), mask)

    def _decode(self, group: Spans, window: int | None) -> _Decode:
        lows, first, rows = group.lows(window), int(group.first[0]), len(group)
        lengths = group.stop - lows
        width = int(lengths.max())
        if rows == 1:
            return _Decode(first, 1, width, self._places(group.blocks, int(lows[0]), int(group.stop[0])), None)
        beyond = np.arange(width) >= lengths[:, None]
        # Padding repeats the row's first key, so that nothing is read that no one has written.
        chunks, offsets = np.divmod(lows[:, None] + np.where(beyond, 0, np.arange(width)), self._chunk_tokens)
        places = group.blocks[group.tables[:, None] + chunks] * self._chunk_tokens + offsets
        mask = None
        if beyond.any():
            mask = torch.zeros(rows, 1, 1, width, dtype=self._dtype, device=self._device)
            mask.masked_fill_(torch.from_numpy(beyond).to(self._device)[:, None, None], float("-inf"))
        return _Decode(first, rows, width, torch.from_numpy(places.reshape(-1)).to(self._device), mask)

    def _places(self, blocks: Integers, low: int, stop: int) -> torch.Tensor | slice:
        """Of positions [low, stop), blocks being those of chunks from 0 on: a slice where they are consecutive."""
        chunk = self._chunk_tokens
        if (np.diff(blocks[low // chunk :]) == 1).all():
            start = int(blocks[low // chunk]) * chunk + low % chunk
            return slice(start, start + stop - low)
        chunks, offsets = np.divmod(np.arange(low, stop), chunk)
        return torch.from_numpy(blocks[chunks] * chunk + offsets).to(self._device)


class ReferenceBackend:
    """Always there."""

    name = "reference"

    @property
    def version(self) -> str:
        return str(torch.__version__)

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> ReferencePlan:
        return ReferencePlan(batch, pool, chunk_tokens)


def _groups(lengths: Sequence[int], on_cpu: bool) -> Iterator[tuple[int, int]]:
    """Cut rows of these lengths, which fall, where padding to a group's first one would waste too much."""
    cuts = [0]
    for index, length in enumerate(lengths):
        longest = lengths[cuts[-1]]
        alone = on_cpu and longest >= _ALONE_TOKENS
        if index and (alone or longest - length > max(_PADDING_TOKENS, longest // 4)):
            cuts.append(index)
    return (bounds for bounds in pairwise([*cuts, len(lengths)]) if bounds[1] > bounds[0])


def _attend(
    piece: _Work, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """[queries, heads, head_dim] of one piece of work."""
    if isinstance(piece, _Decode):
        q = queries[piece.first : piece.first + piece.rows]
        kv = _read(pool, piece.places).view(piece.rows, piece.width, *pool.shape[1:])
        # The queries of a KV head's group are folded into the query dimension: no key is repeated.
        folded = q.unflatten(1, (pool.shape[2], -1))  # [rows, kv_heads, group, head_dim]
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [rows, kv_heads, width, head_dim]
        return _kernel(folded, k, v, piece.mask, False, scores).flatten(1, 2)
    here = slice(piece.first, piece.first + piece.queries)
    mask: torch.Tensor | None = None
    if isinstance(piece, _Fresh):
        k, v = keys[here], values[here]
    else:
        kv = _read(pool, piece.places)
        k, v, mask = kv[:, 0], kv[:, 1], piece.mask
    # KV heads take the batch dimension, so that a group shares its keys by a stride of zero.
    q = queries[here].unflatten(1, (pool.shape[2], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
    k, v = (x.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return _kernel(q, k, v, mask, mask is None, scores).permute(2, 0, 1, 3).flatten(1, 2)


def _read(pool: torch.Tensor, places: torch.Tensor | slice) -> torch.Tensor:
    """[tokens, 2, kv_heads, head_dim]: a view for a slice, one gather otherwise."""
    if isinstance(places, slice):
        return pool[places]
    return pool.view(len(pool), -1).index_select(0, places).view(-1, *pool.shape[1:])


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scores_of: Scores
) -> torch.Tensor:
    """q, k, v: [batch, heads, length, head_dim]; mask broadcasts to [batch, heads, queries, keys]."""
    scaling, _, softcap = scores_of
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling)
    assert not causal, "a capped layer gets masks"
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    pieces = []
    for start in range(0, q.shape[2], _SOFTCAP_QUERIES):
        stop = start + _SOFTCAP_QUERIES
        scores = torch.tanh(q[:, :, start:stop] @ k.transpose(2, 3) * (scale / softcap)) * softcap
        if mask is not None:
            scores = scores + (mask if mask.shape[-2] == 1 else mask[..., start:stop, :])
        pieces.append(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v)
    return torch.cat(pieces, dim=2)
