"""The memory of a server's process: what it holds, and giving back what it does not."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import NamedTuple


class Held(NamedTuple):
    """blocks: objects of Python's own allocator. malloc_bytes: in use of the C library's, in which larger objects and native
    libraries have theirs; None: it does not say. Resident memory is more: pages that were needed once, with room in them.
    """

    blocks: int
    malloc_bytes: int | None


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def held() -> Held:
    mallinfo = getattr(_C, "mallinfo2", None)
    if mallinfo is None:
        return Held(sys.getallocatedblocks(), None)
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    return Held(sys.getallocatedblocks(), told.uordblks + told.hblkhd)


def settle() -> None:
    """All that there is now is here to stay: modules, model, engine. The cycle collector does not go through it again, which
    takes 0.1 s and more while nobody is served, nor lets what requests leave grow to a quarter of it."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Free pages of the C library to the system, where it is glibc: each thread's share of its memory is else as large as
    the most that the thread has ever needed."""
    trim = getattr(_C, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # not everywhere is a process its own library
        return None


_C = _library()
