"""Projections joined at load, and packed for a CPU's vector units where memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from pensieve.worker.torch.fused.int8 import FEW_ROWS, Int8Product, int8_of

# Packed products take 4 to 6 rows in less time than 1 or 2, so that batches are padded to this many rows.
LEAST_ROWS = 4
_PACKING_HINT = 64  # rows; every hint above 1 gives the same layout, which serves all batches
_SPARE_SHARE = 4  # weights are packed where their second copy takes at most this fraction of free memory


def packable(module: Any) -> bool:
    """May this model's weights be packed: a type that oneDNN multiplies on this CPU, and room for a second copy?

    The first stays with the transformers module, the reference that self-check and tests compare with.
    """
    weights = list(module.parameters())
    if any(w.device.type != "cpu" for w in weights):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if not all(_multiplies(dtype) for dtype in {w.dtype for w in weights}):
        return False
    return sum(w.nbytes for w in weights) * _SPARE_SHARE <= psutil.virtual_memory().available


def _multiplies(dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return True
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return asked is not None and hasattr(torch.ops.mkldnn, asked) and bool(getattr(torch.ops.mkldnn, asked)())


class Linear:
    """x [rows, in] to [rows, out], with the weights of several modules that read the same x stacked along out.

    Packed: a copy in oneDNN's blocked layout, at half the time of a plain product for 4 to 16 rows. Otherwise one joined
    tensor, which the modules' own parameters become views of, so that no weight exists twice. Few rows are multiplied with
    the int8 weights where there are any.
    """

    def __init__(self, modules: Sequence[Any], pack: bool) -> None:
        with torch.no_grad():
            weights = [_out_by_in(module) for module in modules]
            biases = [module.bias for module in modules if module.bias is not None]
            assert len(biases) in (0, len(modules)), "some of the joined projections have a bias, and some have none"
            self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None
            rounded = [found for module in modules if (found := int8_of(module)) is not None]
            self._int8 = Int8Product(rounded, self._bias) if len(rounded) == len(modules) else None
            if pack:
                self._packed = True
                self._weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights).contiguous(), _PACKING_HINT)
                return
            self._packed = False
            self._weight = weights[0]
            if len(modules) > 1:
                self._weight = torch.cat(weights)
                for module, rows in zip(modules, self._weight.split([len(w) for w in weights]), strict=True):
                    module.weight = torch.nn.Parameter(rows, requires_grad=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._int8 is not None and len(x) <= FEW_ROWS:
            return self._int8(x)
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


def _out_by_in(module: Any) -> torch.Tensor:
    """[out, in]; GPT-2's Conv1D keeps its weight the other way round."""
    weight: torch.Tensor = module.weight.detach()
    return weight.t() if type(module).__name__ == "Conv1D" else weight
