"""Projections joined at load, and packed for a CPU's vector units where memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from pensieve.device.fused.few_rows import FEW_ROWS, FewRows
from pensieve.device.pages import return_file_pages
from pensieve.errors import EngineMissing

# Packed products take 4 to 6 rows in less time than 1 or 2, so that batches are padded to this many rows where they are
# not multiplied in C.
LEAST_ROWS = 4
_PACKING_HINT = 64  # rows; every hint above 1 gives the same layout, which serves all batches
_SPARE_SHARE = 4  # weights are packed where their second copy takes at most this fraction of the memory that is left


def packable(module: Any, memory_bytes: int | None = None) -> bool:
    """May this model's weights be packed: a type that oneDNN multiplies on this CPU, and room for a second copy?

    The first stays with the transformers module, the reference that self-check and tests compare with. memory_bytes: of the
    weights, with their second copy; what the process holds beside them is not asked for, so that the same model in the same
    memory is always packed, or never. None: what the machine has free.
    """
    weights = list(module.parameters())
    if any(w.device.type != "cpu" for w in weights):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if not all(_multiplies(dtype) for dtype in {w.dtype for w in weights}):
        return False
    needed = sum(w.nbytes for w in weights)
    free = psutil.virtual_memory().available if memory_bytes is None else memory_bytes - needed
    return needed * _SPARE_SHARE <= free


def _multiplies(dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return True
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return asked is not None and hasattr(torch.ops.mkldnn, asked) and bool(getattr(torch.ops.mkldnn, asked)())


class Linear:
    """x [rows, in] to [rows, out], with the weights of several modules that read the same x stacked along out.

    The joined weights are one tensor, which the modules' own parameters become views of, so that no weight exists twice;
    pages of the file that they were read from are returned.
    pack: a copy in oneDNN's blocked layout too, at half the time of a plain product for 4 to 16 rows; and few rows are
    multiplied in C where the weights are float32 or bfloat16 and a compiler is there.
    few_rows: the type of the weights that few rows are multiplied with in C; None where they are not.
    """

    few_rows: str | None = None

    def __init__(self, modules: Sequence[Any], pack: bool) -> None:
        with torch.no_grad():
            biases = [module.bias for module in modules if module.bias is not None]
            assert len(biases) in (0, len(modules)), "some of the joined projections have a bias, and some have none"
            self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None
            self._packed, self._few = pack, None
            self._weight = _joined(modules, contiguous=pack)
            if pack:
                if self._weight.dtype in FEW_ROWS:
                    self._few = _product(self._weight, self._bias)
                    self.few_rows = None if self._few is None else str(self._weight.dtype).removeprefix("torch.")
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACKING_HINT)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._few is not None and len(x) <= self._few.most_rows:
            return self._few(x)
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


def _product(weights: torch.Tensor, bias: torch.Tensor | None) -> FewRows | None:
    """None without a compiler, or where what it made runs on one of torch's several threads: packed products of padded rows
    are next best."""
    try:
        product = FewRows(weights, bias)
    except EngineMissing:
        return None
    return product if product.parallel or torch.get_num_threads() == 1 else None


def _joined(modules: Sequence[Any], contiguous: bool) -> torch.Tensor:
    """[out, in]; the modules' parameters become views of it, since the module may be built from again. contiguous: also that
    of a single Conv1D."""
    weights = [_out_by_in(module) for module in modules]
    if len(modules) == 1 and (weights[0].is_contiguous() or not contiguous):
        return weights[0]
    joined, before = torch.cat([weight.contiguous() for weight in weights]), [module.weight for module in modules]
    for module, rows in zip(modules, joined.split([len(w) for w in weights]), strict=True):
        module.weight = torch.nn.Parameter(rows.t() if _is_conv1d(module) else rows, requires_grad=False)
    return_file_pages(before)
    return joined


def _out_by_in(module: Any) -> torch.Tensor:
    """[out, in]; GPT-2's Conv1D keeps its weight the other way round."""
    weight: torch.Tensor = module.weight.detach()
    return weight.t() if _is_conv1d(module) else weight


def _is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D"
