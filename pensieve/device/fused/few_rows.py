"""Products of few rows in C: they take as long as the weights take to read, in float32 or in int8."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from pensieve.compiler import load_library

FEW_ROWS = {torch.float32: 4, torch.int8: 8}
"""Up to so many rows are multiplied in C, by the type of the weights; more are a product with the packed float32 weights, or
torch's own. In float32 that product takes about as long from 5 rows on, since C reads the weights once for 4; with int8, a
quarter of the bytes, C takes less of the time up to 8 and beyond."""

_SOURCE = Path(__file__).with_name("few_rows.c")


class FewRows:
    """x [rows, in] float32 times weights [out, in] in float32 or int8. A row's result depends on no other row."""

    def __init__(self, weights: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """scales [out]: what int8 numbers are multiplied by. The tensors are kept, not copied. parallel: can it use torch's
        threads? Raises EngineMissing without a C compiler."""
        assert weights.is_contiguous() and weights.device.type == "cpu"
        assert all(part is None or (part.dtype, len(part)) == (torch.float32, len(weights)) for part in (scales, bias))
        assert scales is None or scales.is_contiguous()
        self._weights, self._scales = weights, scales
        self.most_rows = FEW_ROWS[weights.dtype]
        self._bias = None if bias is None else bias.contiguous()
        kind = str(weights.dtype).removeprefix("torch.").upper()
        library = load_library(_SOURCE, (f"WEIGHT_{kind}",))
        self._function = library.functions.linear_few
        self._function.restype = None
        self._function.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 3, ctypes.c_int]
        self.parallel = library.threads
        self._out, self._in = weights.shape
        self._pointers = [None if part is None else part.data_ptr() for part in (weights, scales, self._bias)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == self._in, (x.dtype, x.shape)
        x = x.contiguous()
        rows = len(x)
        y = torch.empty(rows, self._out, dtype=torch.float32)
        threads = torch.get_num_threads() if self.parallel else 1
        self._function(x.data_ptr(), *self._pointers, y.data_ptr(), rows, self._in, self._out, threads)
        return y
