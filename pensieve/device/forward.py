"""A forward over one batch: what a worker and the self-check call, whichever code performs it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pensieve.device.attention import Iteration, attending


class Forward(Protocol):
    """`name` says what runs, for records: "transformers", "fused", "fused, packed weights"."""

    @property
    def name(self) -> str: ...

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [len(wanted), vocab] at these places of the iteration's batch, ascending; fills its pool."""
        ...


class TransformersForward:
    """transformers' own modules, attending through the paged plug: what any architecture runs on."""

    name = "transformers"

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        with attending(iteration):
            output = self._module(
                input_ids=iteration.batch.token_ids[None],
                position_ids=iteration.batch.positions[None],
                use_cache=False,
                logits_to_keep=wanted,
            )
        logits: torch.Tensor = output.logits[0]
        return logits
