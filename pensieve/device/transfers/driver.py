"""CUDA's batched copy, cuMemcpyBatchAsync (CUDA 12.8): many copies in one call of the driver. torch has no such call."""

from __future__ import annotations

import ctypes
from typing import Any

from pensieve.errors import EngineMissing

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
