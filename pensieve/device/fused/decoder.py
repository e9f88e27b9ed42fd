"""The loop over the layers of a fused model, and what all families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.device.attention import Iteration, attend
from pensieve.device.fused.few_rows import FEW_ROWS
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
    """One forward under way. cos, sin: [rows, 1, head_dim] or None."""

    iteration: Iteration
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    def attend(self, how: Attention, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[rows, heads * head_dim] for queries [rows, heads, head_dim]."""
        return attend(self.iteration, how.layer, queries, keys, values, how.scores).reshape(len(queries), -1)


class Layer(Protocol):
    def __call__(self, hidden: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        """hidden [rows, hidden] to the same shape, or to rows `wanted` only, which the last layer is asked for.

        May write to `hidden`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A Forward of few, large operations. begin: token ids and positions [rows] to hidden states, cos and sin.

    With packed weights a decoded row's bits are the same alone and in every batch of up to 4 rows, which are
    multiplied in C; and the same in larger batches, which are packed, however many of their rows are sampled (tested with
    5 to 12). Between the two they differ by rounding.
    """

    begin: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    layers: Sequence[Layer]
    finish: Callable[[torch.Tensor], torch.Tensor]
    packed: bool

    @property
    def name(self) -> str:
        return "fused, packed weights, few rows in C" if self.packed else "fused"

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        tokens, outputs = len(iteration.batch.token_ids), len(wanted)
        if self.packed and tokens > FEW_ROWS and outputs:  # few sampled rows of many are products of packed weights too
            wanted = F.pad(wanted, (0, max(0, FEW_ROWS + 1 - outputs)))
        hidden, cos, sin = self.begin(iteration.batch.token_ids, iteration.batch.positions)
        step = Step(iteration, cos, sin)
        # Where not all rows are sampled, the last layer's output projection and MLP are for those alone.
        some = wanted if len(wanted) < tokens else None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, step, some if index == last else None)
        if some is None and outputs != tokens:
            hidden = hidden[wanted]
        return self.finish(hidden)[:outputs]
