"""Attention over non-contiguous blocks, plugged into transformers (section 4.4).

transformers calls `paged_attention` once a layer with the queries, keys and values of the whole batch. What it must know
besides (where K and V go, which blocks each row attends to) is the `Iteration` of the forward under way: held here, not
passed through keyword arguments, which some models drop or refuse. The fused path calls `attend` itself.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from pensieve.device.batch import Batch
from pensieve.device.kernels.base import AttentionBackend, Plan, Scores
from pensieve.device.kernels.reference import ReferenceBackend
from pensieve.errors import UnsupportedModel

IMPLEMENTATION = "pensieve_paged"
REFERENCE: AttentionBackend = ReferenceBackend()


class Iteration:
    """What the attention of one forward needs: the batch, the pool, and the backend's plan, shared by all layers.

    pool: [layers, tokens, 2, kv_heads, head_dim]. wait_for_layer: called before a layer's K and V are touched. plan: a
    standing one, as a captured graph needs; otherwise `backend` makes one for this batch.
    `layers` records which layers attended, in order: the self-check counts them.
    """

    def __init__(
        self,
        batch: Batch,
        pool: torch.Tensor,
        chunk_tokens: int,
        wait_for_layer: Callable[[int], None] | None = None,
        backend: AttentionBackend = REFERENCE,
        plan: Plan | None = None,
    ) -> None:
        self.batch = batch
        self.pool = pool
        self.layers: list[int] = []
        self.wait_for_layer = wait_for_layer
        self.plan = plan or backend.plan(batch, pool, chunk_tokens)


_current: ContextVar[Iteration] = ContextVar("pensieve_iteration")


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the batch's K and V to the pool, then attend.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim], rotary applied. Returns
    ([1, tokens, heads, head_dim], None). Raises UnsupportedModel for attention sinks and position biases.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"The model's attention uses {name}, which the paged attention does not have.")
    assert attention_mask is None, "no mask function is registered for this implementation"
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = int(module.layer_idx)
    return attend(_current.get(), layer, queries, keys, values, Scores(scaling, sliding_window, softcap))[None], None


def attend(
    iteration: Iteration, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Write keys and values [tokens, kv_heads, head_dim] to the layer's pool, then attend to it.

    Returns [tokens, heads, head_dim], the shape of `queries`.
    """
    iteration.layers.append(layer)
    if iteration.wait_for_layer is not None:
        iteration.wait_for_layer(layer)
    pool = iteration.pool[layer]
    iteration.plan.write(pool, iteration.batch.write_places, keys, values)
    return iteration.plan.attend(pool, queries, keys, values, scores)


def register() -> None:
    """Make the implementation known to transformers; a second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)


class Forward(Protocol):
    """`name` says what runs, for records: "transformers", "fused", "fused, packed weights"."""

    @property
    def name(self) -> str: ...

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [len(wanted), vocab] at these places of the iteration's batch, ascending; fills its pool."""
        ...


class TransformersForward:
    """transformers' own modules, attending through the paged plug: what any architecture runs on.

    products: linear modules, and what multiplies in place of each while this forward runs; alone they stay as they are.
    """

    def __init__(
        self, module: Any, products: Sequence[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = ()
    ) -> None:
        self._module, self._products = module, products
        self.name = "transformers, packed weights, few rows in C" if products else "transformers"

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        under_way = _current.set(iteration)  # in this thread
        for linear, product in self._products:
            linear.__dict__["forward"] = product  # before the method of its class
        try:
            output = self._module(
                input_ids=iteration.batch.token_ids[None],
                position_ids=iteration.batch.positions[None],
                use_cache=False,
                logits_to_keep=wanted,
            )
        finally:
            _current.reset(under_way)
            for linear, _ in self._products:
                del linear.__dict__["forward"]
        logits: torch.Tensor = output.logits[0]
        return logits
