"""torch's own paged attention (torch.nn.attention.varlen), where this torch has it: FlashAttention, on CUDA only."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from pensieve.device.batch import Batch
from pensieve.device.kernels.base import Plan, Scores
from pensieve.device.transfers.pinned import sent
from pensieve.errors import EngineMissing, PensieveError, UnsupportedModel

_NEEDED = ("block_table", "seqused_k", "enable_gqa", "window_size", "scale")


class VarlenPlan(Plan):
    """Spans are sequences of their own that may share blocks; each is causal, aligned at its end."""

    def __init__(self, function: Any, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> None:
        self._function = function
        self._chunk_tokens = chunk_tokens
        spans, device = batch.spans, pool.device
        # Entries beyond a span's blocks are never read, but must be blocks that exist.
        tables = np.zeros((len(spans), int(spans.chunks.max())), dtype=np.int32)
        tables[np.arange(tables.shape[1]) < spans.chunks[:, None]] = np.maximum(spans.blocks, 0)
        firsts = np.concatenate([[0], np.cumsum(spans.queries)]).astype(np.int32)
        stops = spans.stop.astype(np.int32)
        self._tables, self._firsts, self._stops = (sent(x, device) for x in (tables, firsts, stops))
        self._most_queries = int(spans.queries.max())
        self._most_keys = int(stops.max())

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Raises UnsupportedModel for a softcap."""
        scaling, window, softcap = scores
        if softcap is not None:
            raise UnsupportedModel(
                "The model caps its attention scores, which attention_backend=varlen cannot; use triton or reference."
            )
        paged = pool.unflatten(0, (-1, self._chunk_tokens))  # [blocks, chunk_tokens, 2, kv_heads, head_dim]
        result: torch.Tensor = self._function(
            queries.contiguous(),
            paged[:, :, 0],
            paged[:, :, 1],
            self._firsts,
            None,
            self._most_queries,
            self._most_keys,
            scale=scaling,
            # torch counts the keys before the query, without its own.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=queries.shape[1] != pool.shape[2],
            seqused_k=self._stops,
            block_table=self._tables,
        )
        return result


class VarlenBackend:
    """For 16 bits on CUDA (see backends). Raises EngineMissing where this torch lacks it, or its kernel refuses blocks
    of this size."""

    name = "varlen"
    captures = False

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int) -> None:
        self._function = _function()
        query = torch.zeros(1, 1, head_dim, device=device, dtype=dtype)
        page = torch.zeros(1, chunk_tokens, 2, 1, head_dim, device=device, dtype=dtype)
        first, stop, table = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [1], [[0]]))
        try:
            self._function(
                query, page[:, :, 0], page[:, :, 1], first, None, 1, 1,
                window_size=(-1, 0), seqused_k=stop, block_table=table,
            )  # fmt: skip
        except PensieveError:
            raise
        except Exception as error:  # whatever its kernel says of this device, head size or block size
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EngineMissing(
                f"torch {torch.__version__}'s varlen_attn refuses blocks of {chunk_tokens} tokens with heads of {head_dim} "
                f"here ({line}); use attention_backend=triton or reference."
            ) from error

    @property
    def version(self) -> str:
        """With the FlashAttention that was activated in its place, if one was."""
        current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        return f"torch {torch.__version__}" + (f", {current}" if current else "")

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> VarlenPlan:
        return VarlenPlan(self._function, batch, pool, chunk_tokens)


def _function() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn

        missing = [name for name in _NEEDED if name not in inspect.signature(varlen_attn).parameters]
    except ImportError:
        missing = ["varlen_attn"]
    if missing:
        raise EngineMissing(
            f"torch {torch.__version__} has no varlen attention with {', '.join(missing)}; use attention_backend=triton, or "
            "a newer torch."
        )
    return varlen_attn
