"""Weights in int8, one scale an output: kept beside the float32 weights that they stand for, and multiplied in C.

The module's own weights become what the int8 ones stand for. So a quantised model is a float32 model of rounded weights:
every path through it is compared, token for token, with transformers' generate on those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pensieve.device.fused.few_rows import FewRows

_LARGEST = 127


@dataclass(frozen=True)
class Int8Weights:
    """numbers [out, in] int8; scales [out] float32. A weight is its number times the scale of its output."""

    numbers: torch.Tensor
    scales: torch.Tensor

    kind = "int8"

    @property
    def restored(self) -> torch.Tensor:
        return self.numbers.float() * self.scales[:, None]

    def product(self, modules: Sequence[Any], bias: torch.Tensor | None) -> FewRows:
        """The modules' own int8 weights become views of the joined ones, so that no number exists twice."""
        parts, whole = [module.weight.rounded for module in modules], self
        if len(parts) > 1:
            whole = Int8Weights(torch.cat([one.numbers for one in parts]), torch.cat([one.scales for one in parts]))
            lengths = [len(one.scales) for one in parts]
            for module, *own in zip(modules, whole.numbers.split(lengths), whole.scales.split(lengths), strict=True):
                module.weight.rounded = Int8Weights(*own)
        return FewRows(whole.numbers, whole.scales, bias)


def rounded(weight: torch.Tensor) -> Int8Weights:
    """[out, in] to the nearest numbers of which the largest of each output is 127; an output of zeros has the scale 0."""
    scales = weight.abs().amax(dim=1) / _LARGEST
    numbers = (weight / scales.where(scales > 0, 1)[:, None]).round().to(torch.int8)
    return Int8Weights(numbers.contiguous(), scales)


def quantise(module: Any) -> None:
    """Round the weights of every projection and of the head, in place; an embedding tied to the head is rounded with it."""
    with torch.no_grad():
        for part in module.modules():
            turned = type(part).__name__ == "Conv1D"  # GPT-2's keeps its weight the other way round
            if not (turned or isinstance(part, torch.nn.Linear)) or getattr(part.weight, "rounded", None) is not None:
                continue
            weights = rounded(part.weight.t() if turned else part.weight)
            part.weight.copy_(weights.restored.t() if turned else weights.restored)
            part.weight.rounded = weights
