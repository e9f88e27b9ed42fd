"""All copies of a layer in one call of CUDA's driver, which hands them to its copy engines (cuMemcpyBatchAsync, CUDA 12.8).

torch has no such call. A cudaMemcpyAsync a run costs the host some microseconds each, in Python and in the driver; where
blocks are scattered that is more than the link needs for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np
import torch

from pensieve.errors import EngineMissing
from pensieve.worker.torch.transfers.link import Haul

# cuda.h: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, since sources may be written by what the stream waits for, and
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, which asks for copy engines.
_STREAM_ORDER, _PREFER_OVERLAP = 1, 1
_VERSION = 12080  # of the signature below; later ones have no index of the failed copy


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Locations are hints for managed memory; ours is not."""

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


class BatchCopier:
    """A driver call a layer. Raises EngineMissing where the driver is too old for it, or is not NVIDIA's."""

    name = "dma, a call a layer"

    def __init__(self, call: Any = None) -> None:
        self._call = _of_driver() if call is None else call
        self._attributes = Attributes(source_order=_STREAM_ORDER, flags=_PREFER_OVERLAP)
        self._first, self._refused = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._thread = 0

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        source, target = haul.source, haul.target
        stream = torch.cuda.current_stream(source.device if source.is_cuda else target.device)
        if self._thread != get_ident():
            stream.query()  # the driver, unlike the runtime, works only in threads that have met the device
            self._thread = get_ident()
        runs = np.array([(run.src, run.dst, run.blocks) for run in haul.runs], dtype=np.uint64)
        sizes = runs[:, 2] * np.uint64(haul.layer_block_bytes)
        sources = _addresses(source, runs[:, 0])
        targets = _addresses(target, runs[:, 1])

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


def _addresses(
    pool: torch.Tensor, blocks: np.ndarray[Any, np.dtype[np.uint64]]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """uint64 [layers, blocks]: where each block begins."""
    layer_bytes, block_bytes = (np.uint64(stride * pool.itemsize) for stride in pool.stride()[:2])
    layers = np.arange(pool.shape[0], dtype=np.uint64) * layer_bytes
    return np.uint64(pool.data_ptr()) + layers[:, None] + (blocks * block_bytes)[None, :]


def _of_driver() -> Any:
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
