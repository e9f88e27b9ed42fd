"""What C does faster than torch on a CPU: products of few rows, which take as long as the weights take to read, in float32
or bfloat16; RMS norm, rotation and the gate of an MLP, where torch's own take nine, three and two passes over memory."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from pensieve.compiler import Library, load_library
from pensieve.errors import EngineMissing

FEW_ROWS = 4
"""Up to so many rows are multiplied in C; more are a product with the packed weights, which takes about as long from 5 rows
on, since C reads the weights once for 4."""
TYPES = (torch.float32, torch.bfloat16)
"""Of weights that C multiplies."""

_SOURCE = Path(__file__).with_name("rows.c")


def _compiled(dtype: torch.dtype) -> Library:
    return load_library(_SOURCE, (str(dtype).removeprefix("torch.").upper(),))


def _function(library: Library, name: str, addresses: int, sizes: int, *others: Any) -> Any:
    """Of these arguments, and at last how many threads; it returns nothing."""
    found = getattr(library.functions, name)
    found.restype = None
    found.argtypes = [*[ctypes.c_void_p] * addresses, *[ctypes.c_int64] * sizes, *others, ctypes.c_int]
    return found


def serves(dtype: torch.dtype) -> bool:
    """Can C compute with weights of this type here, in as many threads as torch has? Not without a compiler."""
    try:
        return dtype in TYPES and (_compiled(dtype).threads or torch.get_num_threads() == 1)
    except EngineMissing:
        return False


class FewRows:
    """x [rows, in] times weights [out, in] of the same type. Sums are float32. A row's result depends on no other row."""

    def __init__(self, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The tensors are kept, not copied. Raises EngineMissing without a compiler."""
        assert weights.is_contiguous() and weights.device.type == "cpu"
        assert bias is None or (bias.dtype, len(bias)) == (weights.dtype, len(weights))
        self._weights, self._type = weights, weights.dtype
        self._bias = None if bias is None else bias.float().contiguous()
        library = _compiled(weights.dtype)
        self._function, self._parallel = _function(library, "linear_few", 4, 3), library.threads
        self._out, self._in = weights.shape
        self._pointers = [weights.data_ptr(), None if self._bias is None else self._bias.data_ptr()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._type and x.dim() == 2 and x.shape[1] == self._in, (x.dtype, x.shape)
        x = x.float().contiguous()
        rows = len(x)
        y = torch.empty(rows, self._out, dtype=torch.float32)
        threads = torch.get_num_threads() if self._parallel else 1
        self._function(x.data_ptr(), *self._pointers, y.data_ptr(), rows, self._in, self._out, threads)
        return y.to(self._type)


_PARALLEL_NUMBERS = 65536  # fewer are done before threads have been woken


class RowKernels:
    """What C does to each row by itself. Raises EngineMissing without a C compiler."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: float32 or bfloat16, of everything but a norm's weight, which is float32."""
        library = _compiled(dtype)
        self._parallel, self._dtype = library.threads, dtype
        self._norm = _function(library, "rms_norm", 3, 2, ctypes.c_float)
        self._rotate, self._gate = _function(library, "rotate", 3, 4), _function(library, "gate", 2, 2)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [rows, size], weight [size]."""
        rows, size = x.shape
        assert (x.dtype, weight.dtype) == (self._dtype, torch.float32), (x.dtype, weight.dtype)
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
        assert x.dtype == cos.dtype == sin.dtype == self._dtype, (x.dtype, cos.dtype, sin.dtype)
        assert cos.shape == sin.shape == (rows, 1, size) and heads <= each, (x.shape, cos.shape, sin.shape)
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._rotate(*pointers, rows, each * size, heads, size, self._threads(x))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of each row of x [rows, 2 * size]."""
        rows, size = len(x), x.shape[1] // 2
        assert x.dtype == self._dtype and x.is_contiguous() and x.shape == (rows, 2 * size), (x.dtype, x.shape)
        y = x.new_empty(rows, size)
        self._gate(x.data_ptr(), y.data_ptr(), rows, size, self._threads(x))
        return y

    def _threads(self, x: torch.Tensor) -> int:
        return torch.get_num_threads() if self._parallel and x.numel() >= _PARALLEL_NUMBERS else 1
