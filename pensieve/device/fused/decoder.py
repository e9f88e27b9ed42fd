"""The loop over the layers of a fused model, and what all families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.device.attention import Iteration, attend
from pensieve.device.fused.few_rows import FEW_ROWS
from pensieve.device.fused.linear import LEAST_ROWS
from pensieve.device.kernels.base import Scores


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, in one kernel (transformers' gelu_new takes eight)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class Attention:
    """How one layer attends."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Step:
    """One forward under way. tokens: rows that are real, the rest is padding. cos, sin: [rows, 1, head_dim] or None."""

    iteration: Iteration
    tokens: int
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    def attend(self, how: Attention, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[rows, heads * head_dim] for queries [rows, heads, head_dim]; padding gets zeros and touches no pool."""
        rows, real = len(queries), self.tokens
        if rows != real:
            queries, keys, values = queries[:real], keys[:real], values[:real]
        result = attend(self.iteration, how.layer, queries, keys, values, how.scores)
        result = result.reshape(real, -1)
        return F.pad(result, (0, 0, 0, rows - real)) if rows != real else result


class Layer(Protocol):
    def __call__(self, hidden: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        """hidden [rows, hidden] to the same shape, or to rows `wanted` only, which the last layer is asked for.

        May write to `hidden`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A Forward of few, large operations. begin: token ids and positions [rows] to hidden states, cos and sin. few_rows: see
    Linear.

    With packed weights a decoded row's bits are the same alone and in every batch of up to 4 rows, which are
    multiplied in C; and the same in larger batches, which are packed, however many of their rows are sampled (tested with
    5 to 12). Between the two they differ by rounding.
    """

    begin: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    layers: Sequence[Layer]
    finish: Callable[[torch.Tensor], torch.Tensor]
    packed: bool
    few_rows: str | None

    @property
    def name(self) -> str:
        return "fused" + ", packed weights" * self.packed + ", few rows in C" * (self.few_rows is not None)

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        batch = iteration.batch
        ids, positions, tokens, outputs = batch.token_ids, batch.positions, len(batch.token_ids), len(wanted)
        if least := self._least_rows(tokens, outputs):
            ids, positions, wanted = (_padded(x, least) for x in (ids, positions, wanted))
        hidden, cos, sin = self.begin(ids, positions)
        step = Step(iteration, tokens, cos, sin)
        # Where not all rows are sampled, the last layer's output projection and MLP are for those alone.
        some = wanted if len(wanted) < len(ids) else None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, step, some if index == last else None)
        if some is None and outputs != tokens:
            hidden = hidden[wanted]
        return self.finish(hidden)[:outputs]

    def _least_rows(self, tokens: int, outputs: int) -> int:
        """What a batch and its sampled rows are padded to; 0: they are not."""
        if not self.packed:
            return 0
        if self.few_rows is None:
            return LEAST_ROWS
        most = FEW_ROWS[getattr(torch, str(self.few_rows))]
        return most + 1 if tokens > most and outputs else 0


def _padded(indices: torch.Tensor, least: int) -> torch.Tensor:
    """At least so many entries: zeros are a token, a position and a row that always exist."""
    return F.pad(indices, (0, least - len(indices))) if len(indices) < least else indices
