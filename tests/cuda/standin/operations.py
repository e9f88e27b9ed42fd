"""torch's operations on tensors of the device: performed on the values, told to the machine, recorded in a capture; and calls
that never become operations, or that a build for CPUs answers for CPUs only."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .machine import CUDA, Touched, installed, machine
from .tensors import DeviceTensor, cells_of, on_device, on_inner, tensors_in, values

_ops = torch.ops.aten
CPU = torch.device("cpu")
_SIZES_DEPEND_ON_VALUES = {
    _ops._local_scalar_dense.default, _ops.nonzero.default, _ops.equal.default, _ops.masked_select.default,
    _ops.is_nonzero.default, _ops._unique2.default, _ops.unique_dim.default, _ops.unique_consecutive.default,
    _ops.repeat_interleave.Tensor, _ops.bincount.default,
}  # fmt: skip
_TO_THE_HOST = {_ops._local_scalar_dense.default, _ops.equal.default, _ops.is_nonzero.default}
_VIEWS = {
    _ops.detach.default, _ops.alias.default, _ops.lift_fresh.default, _ops.view.default, _ops._unsafe_view.default,
}  # fmt: skip
_NOTHING_WRITTEN = {
    _ops.empty.memory_format, _ops.empty_strided.default, _ops.new_empty.default, _ops.empty_like.default,
    _ops.new_empty_strided.default,
}  # fmt: skip
_INDEXED = {_ops.index.Tensor, _ops.index_put_.default, _ops.index_put.default, _ops._index_put_impl_.default}
_BY_ROW = {_ops.index_select.default, _ops.index_copy_.default}
_SIZED = {
    _ops.empty.memory_format: 0, _ops.zeros.default: 0, _ops.ones.default: 0, _ops.full.default: 0,
    _ops.empty_strided.default: 0, _ops.new_empty.default: 1, _ops.new_zeros.default: 1, _ops.new_full.default: 1,
}  # fmt: skip


class Dispatch(TorchDispatchMode):
    """What makes a tensor on the device has none among its arguments: a mode sees it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


def perform(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not installed:  # a tensor that outlived its device
        return func(*values(args), **values(kwargs))
    tensors = tensors_in([args, kwargs])
    ours = [x for x in tensors if isinstance(x, DeviceTensor)]
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    to_device = device is not None and device.type == "cuda"
    if ours and func is _ops.copy_.default:
        return copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    if (ours or to_device) and func is _ops._to_copy.default:
        return _converted(args[0], device, kwargs)
    if not ours and not to_device:
        return _of_the_host(func, args, kwargs, tensors)
    return _of_the_device(func, args, kwargs, tensors, ours, device)


# -- copies ---------------------------------------------------------------------------------------------------------------


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    device = machine()
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        device.launch_copy("copy on the device", source.touched, target.touched)
    elif isinstance(target, DeviceTensor):
        _inward(target, source, non_blocking)
    elif isinstance(source, DeviceTensor):
        _outward(target, source, non_blocking)
    to, of = values(target), values(source)
    on_inner(lambda: to.copy_(of))
    if device.capture is not None:
        reads = [source.touched] if isinstance(source, DeviceTensor) else []
        writes = [target.touched] if isinstance(target, DeviceTensor) else []
        device.capture.record("copy", lambda: to.copy_(of), reads, writes)
    return target


def _inward(target: DeviceTensor, source: torch.Tensor, non_blocking: bool) -> None:
    device = machine()
    device.refuse_in_capture("a copy from the host, whose memory a replay would read again")
    if source.numel() == 0:
        return
    pinned = device.pinned_memory(source)
    if pinned is None:
        if non_blocking and source.dim():
            device.found("pageable", "a copy to the device that was not to wait, from memory that is not pinned")
        device.launch("copy to the device", [], [target.touched])
        device.waited(f"a copy of {source.numel()} elements from pageable memory")
        return
    device.launch_copy("copy to the device", (pinned, cells_of(source, pinned)), target.touched)
    if not non_blocking:
        device.waited("a copy to the device without non_blocking")


def _outward(target: torch.Tensor, source: DeviceTensor, non_blocking: bool) -> None:
    device = machine()
    pinned = device.pinned_memory(target)
    if pinned is None:
        if non_blocking:
            device.found("pageable", "a copy from the device that was not to wait, into memory that is not pinned")
        device.launch("copy from the device", [source.touched], [])
        device.waited("a copy from the device into pageable memory")
        return
    device.launch_copy("copy from the device", source.touched, (pinned, cells_of(target, pinned)))
    if not non_blocking:
        device.waited("a copy from the device without non_blocking")


def _converted(source: torch.Tensor, device: torch.device | None, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Tensor.to: another device, another type, or both."""
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    inner = values(source)
    made = on_inner(lambda: _ops._to_copy.default(inner, **rest))
    here = isinstance(source, DeviceTensor)
    if (device is None and here) or (device is not None and device.type == "cuda"):
        there = on_device(made)
        if not here:
            return copy(there, source, bool(kwargs.get("non_blocking")))  # type: ignore[return-value]
        _tell("conversion", [source.touched], [there.touched], lambda: made.copy_(inner))  # type: ignore[attr-defined]
        return there
    if here:
        machine().launch("copy from the device", [source.touched], [])  # type: ignore[attr-defined]
        machine().waited("a copy to the host (.cpu() or .to)")
    return made


# -- the host ---------------------------------------------------------------------------------------------------------------


def _of_the_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    device = machine()
    if device.any_pinned and tensors and not _gives_view(func):
        written = {id(t) for t in _written(func, args, kwargs)}
        for tensor in tensors:
            device.touch(tensor, id(tensor) in written, str(func))
    if kwargs.get("pin_memory"):
        return device.pin(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


# -- the device -------------------------------------------------------------------------------------------------------------


def _of_the_device(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    ours: Sequence[DeviceTensor],
    device: torch.device | None,
) -> Any:
    _refuse_mixture(func, tensors, ours)
    if func in _SIZES_DEPEND_ON_VALUES and ours:
        machine().launch(str(func), [t.touched for t in ours], [])
        machine().waited(str(func))
    if func in _INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        machine().waited("a mask as an index")
    if func in _SIZED:
        dtype = kwargs.get("dtype") or (ours[0].dtype if ours else torch.float32)
        machine().refuse_beyond(math.prod(args[_SIZED[func]]) * dtype.itemsize)
    changed = {} if device is None else {"device": CPU}
    changed |= {"pin_memory": False} if kwargs.get("pin_memory") else {}
    inner_args, inner_kwargs = values(args), values({**kwargs, **changed})
    result = func(*inner_args, **inner_kwargs)
    if func in _TO_THE_HOST or (device is not None and device.type == "cpu"):
        return result
    wrapped = _wrapped(result, {id(t.inner): t for t in ours}, ours)
    if _gives_view(func) or func in _NOTHING_WRITTEN:
        return wrapped
    written = _written(func, args, kwargs)
    made = [t for t in tensors_in(wrapped) if isinstance(t, DeviceTensor) and all(t is not w for w in written)]
    reads = [_part(func, args, t) for t in ours if all(t is not w for w in written)]
    writes = [_part(func, args, t) for t in (*written, *made)]

    def again() -> None:
        """Into the same memory: what an operation returned once, others of the graph read."""
        new = func(*inner_args, **inner_kwargs)
        if not written:
            for old, now in zip(tensors_in(result), tensors_in(new), strict=True):
                old.copy_(now)

    _tell(str(func), reads, writes, again)
    return wrapped


def _tell(text: str, reads: Sequence[Touched], writes: Sequence[Touched], again: Callable[[], object]) -> None:
    device = machine()
    device.launch(text, reads, writes, used=True)
    if device.capture is not None:
        device.capture.record(text, again, reads, writes)


def _wrapped(x: Any, same: Mapping[int, DeviceTensor], ours: Sequence[DeviceTensor]) -> Any:
    if isinstance(x, list | tuple):
        return type(x)([_wrapped(part, same, ours) for part in x])
    if not isinstance(x, torch.Tensor) or isinstance(x, DeviceTensor):
        return x
    return same[id(x)] if id(x) in same else on_device(x, ours)


def _refuse_mixture(func: Any, tensors: Sequence[torch.Tensor], ours: Sequence[DeviceTensor]) -> None:
    """Raises RuntimeError as CUDA does; a CPU scalar may take part, and an index is copied over."""
    strangers = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim()]
    if not ours or not strangers or func is _ops.is_pinned.default:
        return
    if func not in _INDEXED:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {func}")
    machine().waited("an index on the host, which is copied from pageable memory")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operation changes in place."""
    values_of = (kwargs.get(name, args[at] if at < len(args) else None) for at, name in _changed_arguments(func))
    return [tensor for value in values_of for tensor in tensors_in(value)]


@cache
def _changed_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    changed = (x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)
    return tuple((at, x.name) for at, (x, yes) in enumerate(zip(func._schema.arguments, changed, strict=True)) if yes)


@cache
def _gives_view(func: Any) -> bool:
    returns = func._schema.returns
    return func in _VIEWS or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _part(func: Any, args: Sequence[Any], tensor: DeviceTensor) -> Touched:
    """Of a pool only the rows that are selected: the others may be under copy."""
    if tensor is args[0] and tensor.memory.grain:
        if func in _BY_ROW and args[1] == 0:
            return tensor.rows(values(args[2]))
        if func in _INDEXED and len(args[1]) and args[1][0] is not None:
            return tensor.rows(values(args[1][0]))
    return tensor.touched


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
    return tensor if machine().pinned_memory(tensor) is not None else machine().pin(tensor.clone())


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    machine().launch("copy from the device", [tensor.touched], [])
    machine().waited(".tolist()")
    return on_inner(tensor.inner.tolist)


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Which kernel serves is asked of the device in C++."""
    tensors = tensors_in([args, kwargs])
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
    torch.Tensor.data_ptr: lambda func, args, kwargs: args[0].inner.data_ptr(),
    torch.Tensor.untyped_storage: lambda func, args, kwargs: args[0].inner.untyped_storage(),
    torch.Tensor.tolist: _tolist,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
