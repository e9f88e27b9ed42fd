"""A tensor on the device: a wrapper that says cuda:0 around a CPU tensor, which holds the values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from .clocks import Cells, Memory
from .machine import CUDA, Touched, machine


class DeviceTensor(torch.Tensor):
    """inner: the values. memory: its allocation, shared with its views."""

    inner: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
            layout=inner.layout,
            requires_grad=False,
        )

    def __init__(self, inner: torch.Tensor, memory: Memory) -> None:
        self.inner, self.memory = inner, memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .operations import perform

        return perform(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({self.inner})"

    @property
    def touched(self) -> Touched:
        return self.memory, cells_of(self.inner, self.memory)

    def rows(self, rows: Any) -> Touched:
        """Those of the first dimension."""
        return self.memory, rows_of(self.inner, self.memory, rows)


def cells_of(inner: torch.Tensor, memory: Memory) -> Cells:
    return memory.cells(inner.data_ptr(), inner.shape, inner.stride(), inner.element_size())


def rows_of(inner: torch.Tensor, memory: Memory, rows: Any) -> Cells:
    """Cells of some of a tensor's rows, from the cells of its first one: all lie alike."""
    rows = np.unique(np.asarray(rows, dtype=np.int64))
    if not memory.grain or not len(rows):
        return cells_of(inner[:0] if not len(rows) else inner, memory)
    stride, begins = inner.stride(0) * inner.element_size(), inner.data_ptr() - memory.base
    if stride % memory.grain:
        return np.unique(np.concatenate([cells_of(inner[row], memory) for row in rows.tolist()]))
    first = cells_of(inner[0], memory) - begins // memory.grain
    return np.unique((begins // memory.grain + rows * (stride // memory.grain))[:, None] + first)


def values(x: Any) -> Any:
    """The same structure of lists, tuples and dicts with what is behind each tensor of the device."""
    if isinstance(x, DeviceTensor):
        return x.inner
    if isinstance(x, list | tuple):
        return type(x)([values(part) for part in x]) if type(x) in (list, tuple) else x
    return {name: values(part) for name, part in x.items()} if isinstance(x, dict) else x


def tensors_in(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [tensor for part in x for tensor in tensors_in(part)] if isinstance(x, list | tuple) else []


def on_device(inner: torch.Tensor, relatives: Iterable[DeviceTensor] = ()) -> DeviceTensor:
    """A wrapper: a view of a relative that has the same storage, or a new allocation."""
    address = inner.untyped_storage().data_ptr()
    for relative in relatives:
        if relative.inner.untyped_storage().data_ptr() == address:
            return DeviceTensor(inner, relative.memory)
    return DeviceTensor(inner, machine().allocate(inner))


def on_inner(run: Callable[[], Any]) -> Any:
    """Perform `run` on the values alone, with no mode of the stand-in in between."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return run()
