"""torch's calls that never become operations, or that a build for CPUs answers for CPUs only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .machine import CUDA, machine
from .tensors import DeviceTensor, on_device, on_inner, tensors_in, values

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
_READS_OF_THE_HOST = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item)


class Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            return _make(func, args, kwargs)
        first = args[0] if args else None
        if func is torch.Tensor.to:  # C++ would ask the guard for the number of a device without one
            args, kwargs = tuple(map(_numbered, args)), {name: _numbered(x) for name, x in kwargs.items()}
        if func is torch.Tensor.cuda:
            return first.to(CUDA)
        if func is torch.Tensor.is_pinned:
            return not isinstance(first, DeviceTensor) and machine().pinned_memory(first) is not None
        if func is torch.Tensor.pin_memory:
            return _pin(first)
        if isinstance(first, DeviceTensor):
            special = _OF_THE_DEVICE.get(func)
            if special is not None:
                return special(func, args, kwargs)
        elif isinstance(first, torch.Tensor) and func in _READS_OF_THE_HOST:
            machine().touch(first, False, func.__name__)
        return func(*args, **kwargs)


def _make(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    device = kwargs.pop("device", None)
    made: torch.Tensor = func(*args, **kwargs)
    return made.to(CUDA) if device is not None and torch.device(device).type == "cuda" else made


def _numbered(x: Any) -> Any:
    plain = x == "cuda" if isinstance(x, str) else isinstance(x, torch.device) and x.type == "cuda" and x.index is None
    return CUDA if plain else x


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DeviceTensor):
        raise RuntimeError("cannot pin 'torch.cuda' tensors; only dense CPU tensors can be pinned")
    return tensor if machine().pinned_memory(tensor) is not None else machine().pin(tensor.clone())


def _data_ptr(func: Any, args: Any, kwargs: Any) -> int:
    return int(args[0].inner.data_ptr())


def _storage(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].inner.untyped_storage()


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    machine().launch("copy from the device", [tensor.touched], [])
    machine().waited(".tolist()")
    return on_inner(tensor.inner.tolist)


def _numpy(func: Any, args: Any, kwargs: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host first.")


def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """A list as an index: torch makes the tensor on the device by itself, in C++."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(part, list | np.ndarray) for part in index):
        index = tuple(
            torch.tensor(part, dtype=torch.int64).to(CUDA) if isinstance(part, list | np.ndarray) else part
            for part in index
        )
        return func(args[0], index, *args[2:], **kwargs)
    return func(*args, **kwargs)


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Which kernel serves is asked of the device in C++."""
    tensors = tensors_in([args, kwargs])
    if not all(isinstance(x, DeviceTensor) for x in tensors):
        raise RuntimeError("scaled_dot_product_attention: expected all tensors to be on the same device")
    inner_args, inner_kwargs = values(args), values(kwargs)

    def call() -> Any:
        return func(*inner_args, **inner_kwargs)

    made = on_inner(call)
    wrapped, device = on_device(made), machine()
    reads, writes = [x.touched for x in tensors], [wrapped.touched]  # type: ignore[attr-defined]
    device.launch("scaled_dot_product_attention", reads, writes, used=True)
    if device.capture is not None:
        device.capture.record("scaled_dot_product_attention", lambda: made.copy_(call()), reads, writes)
    return wrapped


_OF_THE_DEVICE: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.untyped_storage: _storage,
    torch.Tensor.tolist: _tolist,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.__setitem__: _indexed,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
