"""The link of a GPU: two lanes made of CUDA streams, marks made of events, and the ways to copy runs of blocks by its copy
engines, of which one serves here.

Copy engines leave all multiprocessors to the compute. Where blocks are scattered, what counts is how long the host takes to
hand the copies over: 8,192 of them take 25 ms one by one, and 0.5 ms as one call of the driver a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import local
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import BlockRun, Copier, Haul, Mark, gpu_of
from pensieve.errors import EngineMissing


class CudaLink:
    """Two streams, whose copies copy engines perform beside the compute. copier: by default a call a run, which every driver
    has; choose_copier tells what serves here."""

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self._device = device
        self.inward = _CudaLane(device, copier or CallCopier())
        self.outward = _CudaLane(device, copier or CallCopier())
        self._waits: list[tuple[Any, Any]] = []  # events on the compute stream before and after each wait

    def computed(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self._device).record_event())

    def hold_compute(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        if mark.reached():
            return
        compute = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(mark.event)
        after.record(compute)
        self._waits.append((before, after))

    def stalled_ns(self) -> int:
        stalled_ms, still = 0.0, []
        for before, after in self._waits:
            with suppress(RuntimeError):  # a device in error answers no query; its waits are forgotten
                if after.query():
                    stalled_ms += before.elapsed_time(after)
                else:
                    still.append((before, after))
        self._waits = still
        return int(stalled_ms * 1e6)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self.inward.stream.synchronize()
        self.outward.stream.synchronize()

    def close(self) -> None:
        self.synchronize()


class _CudaLane:
    def __init__(self, device: torch.device, copier: Copier) -> None:
        self.stream = torch.cuda.Stream(device)
        self.copier = copier

    def enqueue(self, haul: Haul, after: Sequence[Mark]) -> list[Mark]:
        marks: list[Mark] = []
        with torch.cuda.stream(self.stream):
            for mark in after:
                assert isinstance(mark, CudaMark)
                self.stream.wait_event(mark.event)
            copy = self.copier.prepare(haul) if haul.runs else _copy_nothing
            for layer in range(haul.layers):
                copy(layer)
                marks.append(CudaMark(self.stream.record_event()))
        return marks


def _copy_nothing(layer: int) -> None:
    """Do nothing for a layer of a haul without runs."""


class CudaMark:
    """An event. It has no error of its own: a failed copy puts the whole device in error, and the next query raises it."""

    error = None

    def __init__(self, event: Any) -> None:
        self.event = event

    def reached(self) -> bool:
        return bool(self.event.query())


class CallCopier:
    """One `copy_` a run and layer; torch makes it one cudaMemcpyAsync, since both sides are contiguous.

    Not one strided copy for all layers: between CPU and GPU torch first gathers in RAM what is not contiguous. The views
    of a run are made for all layers at once, and torch loops over the calls of a layer: both save time of the host.
    """

    name = "a call a run"

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        source, target = haul.source.flatten(2), haul.target.flatten(2)
        sources = list(zip(*(source.narrow(1, run.src, run.blocks).unbind(0) for run in haul.runs), strict=True))
        targets = list(zip(*(target.narrow(1, run.dst, run.blocks).unbind(0) for run in haul.runs), strict=True))

        def copy(layer: int) -> None:
            torch._foreach_copy_(targets[layer], sources[layer], non_blocking=True)

        return copy


class BatchCopier:
    """One driver call a layer.

    call: stands in for the driver's, in tests. Raises EngineMissing where the driver has no batched copy.
    """

    name = "a call a layer"

    def __init__(self, call: Any = None) -> None:
        self._call = find_batch_call() if call is None else call
        self._attributes = Attributes(source_order=STREAM_ORDER, flags=PREFER_OVERLAP)
        self._first, self._refused = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._used = local()

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        stream = torch.cuda.current_stream(gpu_of(haul.source, haul.target))
        if not hasattr(self._used, "device"):
            stream.query()  # the driver, unlike the runtime, works only in threads that have used the device before
            self._used.device = True
        runs = np.array([(run.src, run.dst, run.blocks) for run in haul.runs], dtype=np.uint64)
        sizes = runs[:, 2] * np.uint64(haul.layer_block_bytes)
        sources = _addresses(haul.source, runs[:, 0])
        targets = _addresses(haul.target, runs[:, 1])

        def copy(layer: int) -> None:
            begins, ends = sources[layer], targets[layer]
            refused = self._call(
                ends.ctypes.data,
                begins.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                self._attributes,
                self._first,
                1,
                self._refused,
                stream.cuda_stream,
            )
            if refused:
                raise RuntimeError(
                    f"CUDA error {refused} in copy {self._refused.value} of {len(sizes)} between the tiers"
                )

        return copy


def _addresses(pool: torch.Tensor, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[layers, blocks]: where each block begins."""
    layer_bytes, block_bytes = (np.uint64(stride * pool.itemsize) for stride in pool.stride()[:2])
    layers = np.arange(pool.shape[0], dtype=np.uint64) * layer_bytes
    return np.uint64(pool.data_ptr()) + layers[:, None] + (blocks * block_bytes)[None, :]


def choose_copier(tensors: KvTensors) -> tuple[Copier, str]:
    """The driver's batched copy where it is there and brings every byte both ways, else a call a run; the choice in words.

    Only on a GPU, and before the pools hold anything: blocks are written to, and zeroed again.
    """
    try:
        copier = BatchCopier()
        for source, target in ((tensors.cpu, tensors.gpu), (tensors.gpu, tensors.cpu)):
            _check(copier, source, target)
    except (EngineMissing, RuntimeError) as reason:
        return CallCopier(), f"{CallCopier.name}; {str(reason).strip().splitlines()[0].rstrip('.')}"
    return copier, copier.name


def _check(copier: Copier, source: torch.Tensor, target: torch.Tensor) -> None:
    """Raises RuntimeError where a byte does not arrive, or another block changes. Leaves zeros."""
    blocks = min(source.shape[1], target.shape[1], 20)
    runs = [BlockRun(0, blocks - 1, 1), *([BlockRun(1, 0, blocks // 2)] if blocks > 3 else [])]
    layers = sorted({0, source.shape[0] - 1})
    size = source[0, 0].numel() * source.itemsize
    noise = torch.randint(0, 256, (blocks, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros_like(noise)
    for run in runs:
        expected[run.dst : run.dst + run.blocks] = noise[run.src : run.src + run.blocks]
    device = gpu_of(source, target)
    try:
        for layer in layers:
            source[layer, :blocks].copy_(noise.view(source.dtype).view(source[layer, :blocks].shape))
        _synchronize(device)  # the streams used here do not wait for each other
        with torch.cuda.stream(None if device is None else torch.cuda.Stream(device)):  # no batch on the default one
            copy = copier.prepare(Haul(runs, source, target))
            for layer in layers:
                copy(layer)
        _synchronize(device)
        if not all(
            torch.equal(target[layer, :blocks].cpu().flatten(1).view(torch.uint8), expected) for layer in layers
        ):
            raise RuntimeError(f"Not {copier.name}: it copied wrongly.")
    finally:
        for layer in layers:
            source[layer, :blocks].zero_()
            target[layer, :blocks].zero_()
        _synchronize(device)


def _synchronize(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.synchronize(device)


# cuda.h: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, since sources may be written by what the stream waits for, and
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, which asks for copy engines.
STREAM_ORDER, PREFER_OVERLAP = 1, 1
_VERSION = 12080  # of the signature below; later ones have no index of the failed copy


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory, which the pools are not."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


BATCH_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # addresses of the targets
    ctypes.c_void_p,  # of the sources
    ctypes.c_void_p,  # bytes
    ctypes.c_size_t,  # how many copies
    ctypes.POINTER(Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # the first copy that each of the attributes is for
    ctypes.c_size_t,  # how many attributes
    ctypes.POINTER(ctypes.c_size_t),  # which copy was refused
    ctypes.c_void_p,  # stream, not the default one
)


def find_batch_call() -> Any:
    """The driver's function, as BATCH_CALL. Raises EngineMissing where the driver is too old, or not NVIDIA's."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        look_up = driver.cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise EngineMissing(f"No batched copies: the CUDA driver (12.8 or newer) was not found ({error}).") from error
    look_up.argtypes = (
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_int),
    )
    look_up.restype = ctypes.c_int
    address, found = ctypes.c_void_p(), ctypes.c_int()
    code = look_up(b"cuMemcpyBatchAsync", address, _VERSION, 0, found)
    if code or not address.value:
        raise EngineMissing(f"No batched copies: this CUDA driver has none (error {code}); 12.8 was the first.")
    return BATCH_CALL(address.value)
