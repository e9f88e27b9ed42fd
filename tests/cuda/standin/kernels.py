"""This project's Triton kernels in torch's arithmetic, with the accesses of the real ones, and the driver's batched copy."""

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .clocks import Memory
from .machine import Touched, installed, machine
from .tensors import DeviceTensor, cells_of, on_inner, rows_of


class Kernel:
    """In place of a @triton.jit function: launched over a grid, recorded in a capture."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **sizes: Any) -> None:
            device = machine()
            for x in args:
                if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor) and device.pinned_memory(x) is None:
                    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            given = [_Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
            self._run(*given, **sizes)
            if device.capture is not None:
                touched = [x.touched for x in args if isinstance(x, DeviceTensor)]
                device.capture.record("kernel", lambda: self._run(*given, **sizes), touched, [], tells_itself=True)

        return launch


class _Pointer:
    """A tensor as a kernel sees it: its values, and memory to tell of. A capture keeps no more of it than the address, but
    for these values, which the replay needs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = tensor.inner if isinstance(tensor, DeviceTensor) else tensor
        memory = tensor.memory if isinstance(tensor, DeviceTensor) else machine().pinned_memory(tensor)
        assert memory is not None
        self._memory = weakref.ref(memory)

    @property
    def memory(self) -> Memory:
        memory = self._memory()
        return Memory(0, 0) if memory is None else memory  # freed: found by the replay

    @property
    def touched(self) -> Touched:
        return self.memory, cells_of(self.inner, self.memory)

    def rows(self, rows: Any) -> Touched:
        return self.memory, rows_of(self.inner, self.memory, rows)


def _attend(
    q: Any, k: Any, v: Any, out: Any, partial: Any, weight: Any, items: Any, tables: Any, in_scale: float,
    out_scale: float, *_: Any, GROUP: int, SOFTCAP: bool, WINDOW: int, CHUNK: int, **__: Any,
) -> None:  # fmt: skip
    """The work list's own items decide what is read; splits of a tile are computed whole, by the first of them."""

    def compute() -> Any:
        touched = []
        for kind, first, count, start, at, split, *_ in items.inner.tolist():
            if not kind or split:
                continue
            stop = start + count
            low = max(0, start - WINDOW + 1) if WINDOW else 0
            if stop <= low:
                out.inner[first : first + count] = 0
                continue
            positions = torch.arange(low, stop)
            places = tables.inner[at + positions // CHUNK].long() * CHUNK + positions % CHUNK
            touched.append(places.numpy())
            keys, values = k.inner[places].double(), v.inner[places].double()
            queries = q.inner[first : first + count].double().unflatten(1, (-1, GROUP))
            scores = torch.einsum("qkgd,nkd->kgqn", queries, keys) * in_scale
            if SOFTCAP:
                scores = (1.0 - 2.0 / (torch.exp2(scores) + 1.0)) * out_scale
            here = torch.arange(start, stop)[:, None]
            hidden = positions[None] > here
            if WINDOW:
                hidden = hidden | (positions[None] <= here - WINDOW)
            share = torch.softmax(scores.masked_fill(hidden, float("-inf")) * math.log(2), -1)
            mixed = torch.einsum("kgqn,nkd->qkgd", share, values).flatten(1, 2)
            out.inner[first : first + count] = mixed.to(out.inner.dtype)
        return np.unique(np.concatenate(touched)) if touched else np.zeros(0, dtype=np.int64)

    rows = on_inner(compute)
    reads = [q.touched, items.touched, tables.touched, k.rows(rows), v.rows(rows)]
    machine().launch("attention", reads, [out.touched, partial.touched, weight.touched], used=True)


def _join(out: Any, partial: Any, weight: Any, joins: Any, **_: Any) -> None:
    machine().launch("join", [partial.touched, weight.touched, joins.touched], [out.touched], used=True)


def _write(keys: Any, values: Any, pool: Any, places: Any, *_: Any, **__: Any) -> None:
    def store() -> Any:
        pool.inner[places.inner, 0] = keys.inner
        pool.inner[places.inner, 1] = values.inner
        return places.inner.numpy().copy()

    rows = on_inner(store)
    machine().launch("write of K and V", [keys.touched, values.touched, places.touched], [pool.rows(rows)], used=True)


def batch_call(targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
    """cuMemcpyBatchAsync on the stream that is current."""
    lists = [(ctypes.c_uint64 * count).from_address(x) for x in (targets, sources, sizes)]
    for target, source, size in zip(*lists, strict=True):
        machine().launch_copy("copy of a batch", machine().at(source, size), machine().at(target, size))
        ctypes.memmove(target, source, size)
    return 0


ATTEND, JOIN, WRITE = (Kernel(run) for run in (_attend, _join, _write))


class Cudart:
    """torch.cuda.cudart()"""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        machine().register(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if installed:
            machine().unregister(address)
        return 0
