"""Attention in torch's own operations, a span at a time: any device, any architecture, and what no compiler is needed for."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.device.batch import Batch, Span
from pensieve.device.kernels.base import Plan, Scores


@dataclass(frozen=True, slots=True)
class _Piece:
    """A span, and where its keys lie: [keys], or a slice where they are consecutive. mask [queries, keys]; None where the
    span begins at position 0, or is one query, which sees them all."""

    span: Span
    places: torch.Tensor | slice
    mask: torch.Tensor | None


class ReferencePlan(Plan):
    """One iteration's spans. Index tensors and masks are made once, and shared by all layers."""

    def __init__(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> None:
        """pool: [layers, tokens, 2, kv_heads, head_dim]."""
        self._batch = batch
        self._device, self._dtype = pool.device, pool.dtype
        self._chunk_tokens = chunk_tokens
        self._pieces: dict[tuple[int | None, bool], list[_Piece]] = {}  # by window and softcap: layers alternate

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        of = scores.window, scores.softcap is not None
        if of not in self._pieces:
            self._pieces[of] = [self._piece(span, *of) for span in self._batch.spans]
        # Spans are in the order of their queries, and leave none out.
        return torch.cat([_attend(piece, pool, queries, scores) for piece in self._pieces[of]])

    def _piece(self, span: Span, window: int | None, capped: bool) -> _Piece:
        """A capped layer always gets masks: torch's causal kernels have no cap."""
        low, mask = 0 if window is None else max(0, span.start - window + 1), None
        if span.queries > 1 and (span.start > 0 or capped or (window or span.stop) < span.stop):
            position = torch.arange(span.start, span.stop, device=self._device)[:, None]
            key = torch.arange(low, span.stop, device=self._device)
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        chunks, offsets = np.divmod(np.arange(low, span.stop), self._chunk_tokens)
        places = span.blocks[chunks] * self._chunk_tokens + offsets
        if (np.diff(places) == 1).all():
            return _Piece(span, slice(int(places[0]), int(places[-1]) + 1), mask)
        return _Piece(span, torch.from_numpy(places).to(self._device), mask)


class ReferenceBackend:
    """Always there."""

    name = "reference"

    @property
    def version(self) -> str:
        return str(torch.__version__)

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> ReferencePlan:
        return ReferencePlan(batch, pool, chunk_tokens)


def _attend(piece: _Piece, pool: torch.Tensor, queries: torch.Tensor, scores: Scores) -> torch.Tensor:
    """[queries, heads, head_dim] of one span."""
    first, count, kv_heads = piece.span.first, piece.span.queries, pool.shape[2]
    if isinstance(piece.places, slice):
        kv = pool[piece.places]
    else:
        kv = pool.view(len(pool), -1).index_select(0, piece.places).view(-1, *pool.shape[1:])
    # KV heads take the batch dimension. The queries of a head's group share its keys: folded into one product where each has
    # one query, else by a stride of zero.
    q = (
        queries[first : first + count].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    )  # [kv_heads, group, count, head_dim]
    group = q.shape[1]
    k, v = (x.transpose(0, 1)[:, None] for x in kv.unbind(1))  # [kv_heads, 1, keys, head_dim]
    if count == 1:
        q = q.transpose(1, 2)
    else:
        k, v = (x.expand(-1, group, -1, -1) for x in (k, v))
    found = _kernel(q, k, v, piece.mask, count > 1 and piece.mask is None, scores)
    return found.view(kv_heads, group, count, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scores_of: Scores
) -> torch.Tensor:
    """q, k, v: [batch, heads, length, head_dim]; mask broadcasts to [batch, heads, queries, keys]."""
    scaling, _, softcap = scores_of
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
