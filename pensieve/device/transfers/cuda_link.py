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
from pensieve.device.transfers.transfer import BlockRun, Haul, Mark, gpu_of
from pensieve.errors import EngineMissing


class CudaLink:
    """Two streams, whose copies copy engines perform beside the compute. copier: by default a call a run, which every driver
    has; choose_copier tells what serves here."""

    def __init__(self, device: torch.device, copier: CallCopier | BatchCopier | None = None) -> None:
        self._device, self._copier = device, copier or CallCopier()
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._waits: list[tuple[Any, Any]] = []  # events on the compute stream before and after each wait

    def enqueue(self, haul: Haul, inward: bool, after: Sequence[Mark] = ()) -> list[Mark]:
        stream, marks = self._inward if inward else self._outward, list[Mark]()
        with torch.cuda.stream(stream):
            for mark in after:
                assert isinstance(mark, CudaMark)
                stream.wait_event(mark.event)
            copy = self._copier.prepare(haul)
            for layer in range(haul.layers):
                copy(layer)
                marks.append(CudaMark(stream.record_event()))
        return marks

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
        self._inward.synchronize()
        self._outward.synchronize()

    def close(self) -> None:
        self.synchronize()


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
        """A function that copies one layer on the stream that is current now; call it for the layers in order. Both calls
        return at once. Raises RuntimeError where the device refuses."""
        source, target = haul.source.flatten(2), haul.target.flatten(2)
        sources = list(zip(*(source.narrow(1, run.src, run.blocks).unbind(0) for run in haul.runs), strict=True))
        targets = list(zip(*(target.narrow(1, run.dst, run.blocks).unbind(0) for run in haul.runs), strict=True))

        def copy(layer: int) -> None:
            torch._foreach_copy_(targets[layer], sources[layer], non_blocking=True)

        return copy


class BatchCopier:
    """One driver call a layer: `prepare` and what it returns as of CallCopier.

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


def choose_copier(tensors: KvTensors) -> tuple[CallCopier | BatchCopier, str]:
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


def _check(copier: BatchCopier, source: torch.Tensor, target: torch.Tensor) -> None:
    """Raises RuntimeError where the bytes of the first block do not arrive in the last one. Leaves zeros."""
    device, last = gpu_of(source, target), target.shape[1] - 1
    noise = torch.randint(0, 256, (source[0, 0].nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    source[0, 0].copy_(noise.view(source.dtype).view(source[0, 0].shape))
    _synchronize(device)  # the streams used here do not wait for each other
    with torch.cuda.stream(None if device is None else torch.cuda.Stream(device)):  # no batch on the default one
        copier.prepare(Haul([BlockRun(0, last, 1)], source, target))(0)
    _synchronize(device)
    arrived = torch.equal(target[0, last].cpu().flatten().view(torch.uint8), noise)
    source[0, 0].zero_()
    target[0, last].zero_()
    _synchronize(device)
    if not arrived:
        raise RuntimeError(f"Not {copier.name}: it copied wrongly.")


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
