"""The loop over the layers of a fused model, and what all families share: projections joined at load, and packed for a CPU's
vector units where memory allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import torch
import torch.nn.functional as F

from pensieve.device.attention import Iteration, attend
from pensieve.device.fused.few_rows import FEW_ROWS, FewRows, serves
from pensieve.device.kernels.base import Scores

_PACKING_HINT = 64  # rows; every hint above 1 gives the same layout, which serves all batches
_SPARE_SHARE = 4  # weights are packed where their second copy takes at most this fraction of the memory that is left


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, in one kernel (transformers' gelu_new takes eight)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class Attention:
    """How one layer attends."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Step:
    """One forward under way. cos, sin: [rows, 1, head_dim] or None."""

    iteration: Iteration
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    def attend(self, how: Attention, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[rows, heads * head_dim] for queries [rows, heads, head_dim]."""
        return attend(self.iteration, how.layer, queries, keys, values, how.scores).reshape(len(queries), -1)


class Layer(Protocol):
    def __call__(self, hidden: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        """hidden [rows, hidden] to the same shape, or to rows `wanted` only, which the last layer is asked for.

        May write to `hidden`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A Forward of few, large operations. begin: token ids and positions [rows] to hidden states, cos and sin.

    With packed weights a decoded row's bits are the same alone and in every batch of up to 4 rows, which are
    multiplied in C; and the same in larger batches, which are packed, however many of their rows are sampled (tested with
    5 to 12). Between the two they differ by rounding.
    """

    begin: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    layers: Sequence[Layer]
    finish: Callable[[torch.Tensor], torch.Tensor]
    packed: bool

    @property
    def name(self) -> str:
        return "fused, packed weights, few rows in C" if self.packed else "fused"

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        tokens, outputs = len(iteration.batch.token_ids), len(wanted)
        if self.packed and tokens > FEW_ROWS and outputs:  # few sampled rows of many are products of packed weights too
            wanted = F.pad(wanted, (0, max(0, FEW_ROWS + 1 - outputs)))
        hidden, cos, sin = self.begin(iteration.batch.token_ids, iteration.batch.positions)
        step = Step(iteration, cos, sin)
        # Where not all rows are sampled, the last layer's output projection and MLP are for those alone.
        some = wanted if len(wanted) < tokens else None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, step, some if index == last else None)
        if some is None and outputs != tokens:
            hidden = hidden[wanted]
        return self.finish(hidden)[:outputs]


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
    joined = torch.cat([weight.contiguous() for weight in weights])
    for module, rows in zip(modules, joined.split([len(w) for w in weights]), strict=True):
        module.weight = torch.nn.Parameter(rows.t() if _is_conv1d(module) else rows, requires_grad=False)
    return joined


def _out_by_in(module: Any) -> torch.Tensor:
    """[out, in]; GPT-2's Conv1D keeps its weight the other way round."""
    weight: torch.Tensor = module.weight.detach()
    return weight.t() if _is_conv1d(module) else weight


def _is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D"
