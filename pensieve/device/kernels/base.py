"""The protocol of an attention backend: a plan once an iteration, then one call a layer."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from pensieve.device.batch import Batch


class Scores(NamedTuple):
    """How a layer scores keys. scaling: None for head_dim ** -0.5. window: positions that a query sees, itself included; None
    for all. softcap: scores become softcap * tanh(score / softcap)."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None


class Plan(Protocol):
    """How one iteration attends; made once, used by every layer."""

    def write(self, pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values [tokens, kv_heads, head_dim] to these places of a layer's pool [tokens, 2, kv_heads, head_dim]."""
        pool[:, 0].index_copy_(0, places, keys)
        pool[:, 1].index_copy_(0, places, values)

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] of one layer, whose keys and values are already in its pool.

        pool [tokens, 2, kv_heads, head_dim]; queries [tokens, heads, head_dim]; keys, values [tokens, kv_heads, head_dim]
        of the batch itself.
        """
        ...


class AttentionBackend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Of the library that computes."""
        ...

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> Plan:
        """pool: [layers, tokens, 2, kv_heads, head_dim]. What the kernels must know of the batch goes to the device here."""
        ...


class StandingPlan(Plan, Protocol):
    """A plan whose tensors stay where they are, so that a captured graph reads what `update` last wrote."""

    def update(self, batch: Batch) -> None:
        """Describe another batch of at most `rows` single positions. Copies on the current stream; never in a capture."""
        ...


@runtime_checkable
class CapturingBackend(Protocol):
    """One whose launches may be recorded in a CUDA graph."""

    def standing(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> StandingPlan:
        """rows: capacity in single positions; max_blocks: in blocks a row.

        Attend with it once outside a capture first: a work list is made for each window that a layer uses. Queries that
        no span covers get zeros.
        """
        ...
