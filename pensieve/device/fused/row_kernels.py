"""RMS norm and rotation in C for float32 on a CPU, where torch's own take nine and three passes over memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from pensieve.compiler import load_library

_SOURCE = Path(__file__).with_name("row_kernels.c")
_PARALLEL_NUMBERS = 65536  # fewer are done before threads have been woken


class RowKernels:
    """parallel: can it use torch's threads? Raises EngineMissing without a C compiler."""

    def __init__(self) -> None:
        library = load_library(_SOURCE, ())
        self.parallel = library.threads
        self._norm, self._rotate = library.functions.rms_norm, library.functions.rotate
        self._norm.restype = self._rotate.restype = None
        sizes = ctypes.c_int64
        self._norm.argtypes = [*[ctypes.c_void_p] * 3, sizes, sizes, ctypes.c_float, ctypes.c_int]
        self._rotate.argtypes = [*[ctypes.c_void_p] * 3, *[sizes] * 4, ctypes.c_int]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [rows, size], weight [size]."""
        rows, size = x.shape
        assert x.dtype == weight.dtype == torch.float32, (x.dtype, weight.dtype)
        assert weight.shape == (size,) and weight.is_contiguous(), (x.shape, weight.shape)
        x = x.contiguous()
        y = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, size, eps, self._threads(x))
        return y

    def rotate(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """The first `heads` of x [rows, all heads, head_dim], in place; cos, sin [rows, 1, head_dim], sin negative in its
        first half."""
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        rows, each, size = x.shape
        assert x.dtype == cos.dtype == sin.dtype == torch.float32, (x.dtype, cos.dtype, sin.dtype)
        assert cos.shape == sin.shape == (rows, 1, size) and heads <= each, (x.shape, cos.shape, sin.shape)
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._rotate(*pointers, rows, each * size, heads, size, self._threads(x))

    def _threads(self, x: torch.Tensor) -> int:
        return torch.get_num_threads() if self.parallel and x.numel() >= _PARALLEL_NUMBERS else 1
