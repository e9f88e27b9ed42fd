"""Projections joined at load, and packed for a CPU's vector units where memory allows.

On a CPU a safetensors file is not read into memory but mapped: a tensor is a part of the file, whose pages come when they
are first read and count as this process's own. The mapping ends with the last tensor in it. So weights that were copied into
another layout would stay beside their copies for as long as one norm of the same file is in use: their pages are returned.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from pensieve.device.fused.few_rows import FEW_ROWS, FewRows, serves

_PACKING_HINT = 64  # rows; every hint above 1 gives the same layout, which serves all batches
_SPARE_SHARE = 4  # weights are packed where their second copy takes at most this fraction of the memory that is left


def packable(module: Any, memory_bytes: int | None = None) -> bool:
    """May this model's weights be packed: of one type that oneDNN multiplies on this CPU, and C where rows are few; and room
    for a second copy?

    The first stays with the transformers module, the reference that self-check and tests compare with. memory_bytes: of the
    weights, with their second copy; what the process holds beside them is not asked for, so that the same model in the same
    memory is always packed, or never. None: what the machine has free.
    """
    weights = list(module.parameters())
    if any(w.device.type != "cpu" for w in weights):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    (dtype, *others) = {w.dtype for w in weights}
    if others or not serves(dtype) or (dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    needed = sum(w.nbytes for w in weights)
    free = psutil.virtual_memory().available if memory_bytes is None else memory_bytes - needed
    return needed * _SPARE_SHARE <= free


class Linear:
    """x [rows, in] to [rows, out], with the weights of several modules that read the same x stacked along out.

    The joined weights are one tensor, which the modules' own parameters become views of, so that no weight exists twice;
    pages of the file that they were read from are returned.
    pack: a copy in oneDNN's blocked layout too, at half the time of a plain product for 5 to 16 rows; fewer are multiplied
    in C.
    """

    def __init__(self, modules: Sequence[Any], pack: bool) -> None:
        with torch.no_grad():
            biases = [module.bias for module in modules if module.bias is not None]
            assert len(biases) in (0, len(modules)), "some of the joined projections have a bias, and some have none"
            self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None
            self._weight = _joined(modules, contiguous=pack)
            self._few = FewRows(self._weight, self._bias) if pack else None
            if pack:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACKING_HINT)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._few is None:
            return F.linear(x, self._weight, self._bias)
        if len(x) <= FEW_ROWS:
            return self._few(x)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


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


def return_file_pages(copied: Iterable[torch.Tensor]) -> int:
    """Return to the system the whole pages of tensors that nobody will write to or has to find changed: if one is read after
    all, it is as the file has it. Returns the bytes; none where the system does not tell what is mapped, as Linux does.
    Tensors that are no part of a file keep theirs."""
    returned, files = 0, list[tuple[int, int]]()
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
                if inode != "0":
                    start, _, stop = addresses.partition("-")
                    files.append((int(start, 16), int(stop, 16)))
    for tensor in copied:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        begins, page = tensor.data_ptr(), mmap.PAGESIZE
        first, last = -(-begins // page) * page, (begins + tensor.nbytes) // page * page  # pages that are its alone
        if first < last and any(start <= first and last <= stop for start, stop in files):
            how = ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)
            returned += 0 if ctypes.CDLL(None).madvise(*how) else last - first
    return returned
