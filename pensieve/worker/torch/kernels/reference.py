"""Attention in torch's own operations: any device, any architecture; what a CPU serves with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.worker.torch.batch import Batch, Span

_SOFTCAP_QUERIES = 256  # a softcap forbids the fused kernel; this many queries at a time bound the matrix of scores
_PADDING_TOKENS = 64  # rows of one decode group differ by at most this, or by a quarter
_ALONE_TOKENS = 64  # on a CPU a decode row over at least this many positions attends by itself, without padding
_RUN_TOKENS = 256  # and where its runs of blocks are this long on average, they are read where they lie


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


@dataclass(frozen=True, slots=True)
class _Direct:
    """A span of one query that attends by itself. runs: its places; softmax has no order, so theirs is free.

    in_place: attend run by run and join the results; otherwise the runs are copied together first.
    """

    first: int
    runs: tuple[slice, ...]
    in_place: bool


_Work = _Fresh | _Append | _Decode | _Direct


class ReferencePlan:
    """One iteration's spans as pieces of work. Index tensors and masks are made once, and shared by all layers."""

    def __init__(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> None:
        """pool: [layers, tokens, 2, kv_heads, head_dim]."""
        self._batch = batch
        self._device, self._dtype = pool.device, pool.dtype
        self._chunk_tokens = chunk_tokens
        self._work: dict[tuple[int | None, bool], list[_Work]] = {}  # by window and softcap: layers alternate

    def write(self, pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        write(pool, places, keys, values)

    def attend(
        self,
        pool: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        work = self.work(window, softcap is not None)
        if len(work) == 1:
            return _attend(work[0], pool, queries, keys, values, scaling, softcap)
        # The pieces are in the order of their queries, and leave none out.
        return torch.cat([_attend(piece, pool, queries, keys, values, scaling, softcap) for piece in work])

    def work(self, window: int | None, capped: bool) -> list[_Work]:
        """The spans as pieces of work for layers with this window; a capped layer always gets masks."""
        key = (window, capped)
        if key not in self._work:
            self._work[key] = list(self._prepare(window, capped))
        return self._work[key]

    def _prepare(self, window: int | None, capped: bool) -> Iterator[_Work]:
        spans = self._batch.spans
        singles = next((i for i, span in enumerate(spans) if span.queries > 1), len(spans))
        alone = {id(span): self._direct(span, window, capped) for span in spans[:singles]}
        for together, group in groupby(spans[:singles], lambda span: alone[id(span)] is None):
            if together:
                yield from (self._decode(members, window) for members in _groups(list(group), window))
            else:
                yield from (piece for span in group if (piece := alone[id(span)]) is not None)
        for span in spans[singles:]:
            if span.start == 0 and not capped and (window is None or span.stop <= window):
                yield _Fresh(span.first, span.queries)
            else:
                yield self._append(span, window)

    def _direct(self, span: Span, window: int | None, capped: bool) -> _Direct | None:
        """None on a GPU, where one kernel takes all rows, and for short contexts, which are cheap to pad."""
        low = lowest_key(span, window)
        length = span.stop - low
        if self._device.type != "cpu" or length < _ALONE_TOKENS:
            return None
        runs = self._runs(span, low)
        return _Direct(span.first, runs, len(runs) == 1 or (length >= len(runs) * _RUN_TOKENS and not capped))

    def _append(self, span: Span, window: int | None) -> _Append:
        low = lowest_key(span, window)
        mask = torch.full((span.queries, span.stop - low), float("-inf"), dtype=self._dtype, device=self._device)
        if window is None:
            mask.triu_(span.start - low + 1)  # later than the query
        else:
            mask = mask.triu(span.start - low + 1) + mask.tril(span.start - low - window)  # or out of the window
        return _Append(span.first, span.queries, self._places(span, low), mask)

    def _decode(self, group: Sequence[Span], window: int | None) -> _Decode:
        lows = [lowest_key(span, window) for span in group]
        lengths = [span.stop - low for span, low in zip(group, lows, strict=True)]
        width = max(lengths)
        if len(group) == 1:
            return _Decode(group[0].first, 1, width, self._places(group[0], lows[0]), None)
        chunk, device = self._chunk_tokens, self._device
        tables = np.zeros((len(group), max(len(span.blocks) for span in group)), dtype=np.int64)
        for index, span in enumerate(group):
            tables[index, : len(span.blocks)] = span.blocks
        low = torch.tensor(lows, device=device)[:, None]
        column = torch.arange(width, device=device)[None, :]
        beyond = column >= torch.tensor(lengths, device=device)[:, None]
        # Padding repeats the row's first key, so that nothing is read that no one has written.
        position = low + column.masked_fill(beyond, 0)
        places = torch.from_numpy(tables).to(device).gather(1, position // chunk) * chunk + position % chunk
        mask = None
        if min(lengths) < width:
            mask = torch.zeros(len(group), 1, 1, width, dtype=self._dtype, device=device)
            mask.masked_fill_(beyond[:, None, None, :], float("-inf"))
        return _Decode(group[0].first, len(group), width, places.view(-1), mask)

    def _places(self, span: Span, low: int) -> torch.Tensor | slice:
        """Places of positions [low, span.stop): a slice where their blocks are consecutive."""
        runs = self._runs(span, low)
        if len(runs) == 1:
            return runs[0]
        return torch.from_numpy(np.concatenate([np.arange(run.start, run.stop) for run in runs])).to(self._device)

    def _runs(self, span: Span, low: int) -> tuple[slice, ...]:
        """Places of positions [low, span.stop), a slice for each stretch of consecutive blocks."""
        chunk = self._chunk_tokens
        blocks = span.blocks[low // chunk :]
        cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
        runs = []
        for first, last in pairwise(cuts):
            start = int(blocks[first]) * chunk
            begin = start + (low % chunk if first == 0 else 0)
            end = start + (last - first) * chunk
            if last == len(blocks):
                end -= -span.stop % chunk
            runs.append(slice(begin, end))
        return tuple(runs)


class ReferenceBackend:
    """Always there."""

    name = "reference"
    captures = False

    @property
    def version(self) -> str:
        return str(torch.__version__)

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> ReferencePlan:
        return ReferencePlan(batch, pool, chunk_tokens)


def write(pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """keys, values [tokens, kv_heads, head_dim] to places [tokens] of a layer's pool [its tokens, 2, kv_heads, head_dim]."""
    pool[:, 0].index_copy_(0, places, keys)
    pool[:, 1].index_copy_(0, places, values)


def lowest_key(span: Span, window: int | None) -> int:
    """The first position that any query of the span attends to."""
    return 0 if window is None else max(0, span.start - window + 1)


def _groups(spans: Sequence[Span], window: int | None) -> Iterator[list[Span]]:
    """Cut spans, sorted by falling context, where padding to the first one's would waste too much."""
    lengths = [span.stop - lowest_key(span, window) for span in spans]
    cuts = [0]
    for index, length in enumerate(lengths):
        longest = lengths[cuts[-1]]
        if longest - length > max(_PADDING_TOKENS, longest // 4):
            cuts.append(index)
    for start, stop in pairwise([*cuts, len(spans)]):
        if stop > start:
            yield list(spans[start:stop])


_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _attend(
    piece: _Work,
    pool: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """[queries, heads, head_dim] of one piece of work."""
    if isinstance(piece, _Direct):
        folded = queries[piece.first].view(1, pool.shape[2], -1, pool.shape[3])  # [1, kv_heads, group, head_dim]
        return _run_by_run(folded, pool, piece, scaling, softcap).view(1, -1, pool.shape[3])
    if isinstance(piece, _Decode):
        q = queries[piece.first : piece.first + piece.rows]
        kv = _read(pool, piece.places).view(piece.rows, piece.width, *pool.shape[1:])
        # The queries of a KV head's group are folded into the query dimension: no key is repeated.
        folded = q.unflatten(1, (pool.shape[2], -1))  # [rows, kv_heads, group, head_dim]
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [rows, kv_heads, width, head_dim]
        return _kernel(folded, k, v, piece.mask, False, scaling, softcap).flatten(1, 2)
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
    return _kernel(q, k, v, mask, mask is None, scaling, softcap).permute(2, 0, 1, 3).flatten(1, 2)


def _run_by_run(
    query: torch.Tensor, pool: torch.Tensor, piece: _Direct, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """[1, kv_heads, group, head_dim] over runs of a layer's pool, joined by their log-sum-exps.

    The kernel walks one head after the other, in steps of a whole token that no prefetcher follows. So the keys and
    values are brought into the cache from end to end first: by summing a run that lies in one piece, which takes a third
    off a row's time, or by copying small ones together, a row at a time (all rows in one gather take three times as long).
    """
    if piece.in_place:
        runs = [pool[run] for run in piece.runs]
        assert all(run.is_contiguous() for run in runs), "K and V of a token, and successive tokens, lie side by side"
    else:
        runs = [torch.cat([pool[run] for run in piece.runs])]
    outputs, weights = [], []
    for kv in runs:
        length, _, kv_heads, head_dim = kv.shape
        shape, stride, start = (1, kv_heads, length, head_dim), (0, head_dim, kv.stride(0), 1), kv.storage_offset()
        k, v = (kv.as_strided(shape, stride, offset) for offset in (start, start + kv.stride(1)))
        if piece.in_place:
            kv.sum()
        if softcap is not None:
            return _kernel(query, k, v, None, False, scaling, softcap).reshape(query.shape)
        output, weight = _flash_on_cpu(query, k, v, scale=scaling)
        outputs.append(output)
        weights.append(weight)
    if len(runs) == 1:
        return outputs[0].reshape(query.shape)
    shares = torch.softmax(torch.stack(weights), dim=0)  # [runs, 1, kv_heads, group]
    return (torch.stack(outputs) * shares[..., None]).sum(dim=0)


def _read(pool: torch.Tensor, places: torch.Tensor | slice) -> torch.Tensor:
    """[tokens, 2, kv_heads, head_dim]: a view for a slice, one gather otherwise."""
    if isinstance(places, slice):
        return pool[places]
    return pool.view(len(pool), -1).index_select(0, places).view(-1, *pool.shape[1:])


def _kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """q, k, v: [batch, heads, length, head_dim]; mask broadcasts to [batch, heads, queries, keys]."""
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
