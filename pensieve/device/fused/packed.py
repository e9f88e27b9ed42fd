"""Products with weights that are packed for a CPU's vector units, or in C where rows are few; and what else C does faster
than torch: RMS norm, rotation and the gate of an MLP, where torch takes nine, three and two passes over memory."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from pensieve.compiler import Library, load_library
from pensieve.errors import EngineMissing

FEW_ROWS = 4
"""Up to so many rows are multiplied in C; more are a product with the packed weights, which takes about as long from 5 rows
on, since C reads the weights once for 4."""
TYPES = (torch.float32, torch.bfloat16)
"""Of weights that C multiplies."""

_SOURCE = Path(__file__).with_name("rows.c")
_PACKING_HINT = 64  # rows; every hint above 1 gives the same layout, which serves all batches
_SPARE_SHARE = 4  # weights are packed where their second copy takes at most this fraction of the memory that is left
_PARALLEL_NUMBERS = 65536  # fewer are done before threads have been woken


def _compiled(dtype: torch.dtype) -> Library:
    """What rows.c has for this type; the last argument of each function is how many threads it may use."""
    library = load_library(_SOURCE, (str(dtype).removeprefix("torch.").upper(),))
    address, size = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, list[Any]] = {
        "linear_few": [address] * 4 + [size] * 3,
        "rms_norm": [address] * 3 + [size] * 2 + [ctypes.c_float],
        "rotate": [address] * 3 + [size] * 4,
        "gate": [address] * 2 + [size] * 2,
    }
    for name, arguments in signatures.items():
        function = getattr(library.functions, name)
        function.restype, function.argtypes = None, [*arguments, ctypes.c_int]
    return library


def serves(dtype: torch.dtype) -> bool:
    """Can C compute with weights of this type here, in as many threads as torch has? Not without a compiler."""
    try:
        return dtype in TYPES and (_compiled(dtype).threads or torch.get_num_threads() == 1)
    except EngineMissing:
        return False


def packable(module: Any, memory_bytes: int | None = None) -> bool:
    """May this model's weights be packed: of one type that oneDNN multiplies on this CPU, and C where rows are few; and room
    for a second copy?

    The first stays with the transformers module, the reference that self-check and tests compare with. memory_bytes: of the
    weights, with their second copy; what the process holds beside them is not asked for, so that the same model in the same
    memory is always packed, or never. None: what the machine has free.
    """
    weights = list(module.parameters())
    if any(w.device.type != "cpu" for w in weights) or getattr(module, "is_quantized", False):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    (dtype, *others) = {w.dtype for w in weights}
    if others or not serves(dtype) or (dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    needed = sum(w.nbytes for w in weights)
    free = psutil.virtual_memory().available if memory_bytes is None else memory_bytes - needed
    return needed * _SPARE_SHARE <= free


class FewRows:
    """At most FEW_ROWS x [rows, in] times weights [out, in] of the same type. Sums are float32. A row's result depends on no
    other row."""

    def __init__(self, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The tensors are kept, not copied. Raises EngineMissing without a compiler."""
        assert weights.is_contiguous() and weights.device.type == "cpu"
        assert bias is None or (bias.dtype, len(bias)) == (weights.dtype, len(weights))
        self._weights, self._bias = weights, None if bias is None else bias.float().contiguous()
        library = _compiled(weights.dtype)
        self._function, self._parallel = library.functions.linear_few, library.threads
        self._pointers = [weights.data_ptr(), None if self._bias is None else self._bias.data_ptr()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        (outside, inside), dtype, rows = self._weights.shape, self._weights.dtype, len(x)
        assert x.dtype == dtype and x.shape == (rows, inside) and rows <= FEW_ROWS, (x.dtype, x.shape)
        x = x.float().contiguous()
        y = torch.empty(rows, outside, dtype=torch.float32)
        threads = torch.get_num_threads() if self._parallel else 1
        self._function(x.data_ptr(), *self._pointers, y.data_ptr(), rows, inside, outside, threads)
        return y.to(dtype)


class Linear:
    """x [rows, in] to [rows, out], with the weights of several modules that read the same x stacked along out.

    The joined weights are one tensor, which the modules' own parameters become views of, so that no weight exists twice.
    (Pages of a mapped file that they were read from are clean: the system takes them back when memory is short.)
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
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACKING_HINT)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._few is None:
            return F.linear(x, self._weight, self._bias)
        if len(x) <= FEW_ROWS:
            return self._few(x)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def _joined(modules: Sequence[Any], contiguous: bool) -> torch.Tensor:
    """[out, in]; the modules' parameters become views of it, since the module may be built from again. contiguous: also that
    of a single Conv1D, which keeps its weight the other way round."""
    turned = [_is_conv1d(module) for module in modules]
    weights = [
        module.weight.detach().t() if t else module.weight.detach() for module, t in zip(modules, turned, strict=True)
    ]
    if len(modules) == 1 and (weights[0].is_contiguous() or not contiguous):
        return weights[0]
    joined = torch.cat([weight.contiguous() for weight in weights])
    parts = joined.split([len(weight) for weight in weights])
    for module, rows, t in zip(modules, parts, turned, strict=True):
        module.weight = torch.nn.Parameter(rows.t() if t else rows, requires_grad=False)
    return joined


def _is_conv1d(module: Any) -> bool:
    """GPT-2's."""
    return type(module).__name__ == "Conv1D"


def packed_products(module: Any) -> list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]]:
    """The linear modules of a packable model, and what multiplies in place of each."""

    def product(each: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        linear = Linear([each], pack=True)
        return lambda x: linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    linears = [each for each in module.modules() if type(each) is torch.nn.Linear or _is_conv1d(each)]
    return [(each, product(each)) for each in linears]


class RowKernels:
    """What C does to each row by itself. Raises EngineMissing without a C compiler."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: float32 or bfloat16, of everything but a norm's weight, which is float32."""
        library = _compiled(dtype)
        self._functions, self._parallel, self._dtype = library.functions, library.threads, dtype

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [rows, size], weight [size]."""
        rows, size = x.shape
        assert (x.dtype, weight.dtype) == (self._dtype, torch.float32), (x.dtype, weight.dtype)
        assert weight.shape == (size,) and weight.is_contiguous(), (x.shape, weight.shape)
        x = x.contiguous()
        y = torch.empty_like(x)
        pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
        self._functions.rms_norm(*pointers, rows, size, eps, self._threads(x))
        return y

    def rotate(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """The first `heads` of x [rows, all heads, head_dim], in place; cos, sin [rows, 1, head_dim], sin negative in its
        first half."""
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        rows, each, size = x.shape
        assert x.dtype == cos.dtype == sin.dtype == self._dtype, (x.dtype, cos.dtype, sin.dtype)
        assert cos.shape == sin.shape == (rows, 1, size) and heads <= each, (x.shape, cos.shape, sin.shape)
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._functions.rotate(*pointers, rows, each * size, heads, size, self._threads(x))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of each row of x [rows, 2 * size]."""
        rows, size = len(x), x.shape[1] // 2
        assert x.dtype == self._dtype and x.is_contiguous() and x.shape == (rows, 2 * size), (x.dtype, x.shape)
        y = x.new_empty(rows, size)
        self._functions.gate(x.data_ptr(), y.data_ptr(), rows, size, self._threads(x))
        return y

    def _threads(self, x: torch.Tensor) -> int:
        return torch.get_num_threads() if self._parallel and x.numel() >= _PARALLEL_NUMBERS else 1
