"""The memory of a server's process: what it holds, and giving back what it does not."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any, NamedTuple

SMALL_BYTES, LARGE_BYTES = 26_624, 8_192
"""What one turn that waits holds, with its connection, in objects of Python's own allocator and beyond: 25.5 and 7.0 kB,
measured over 200 streamed ones of 40 characters each."""
_MOST_TURNS = 1_024  # that memory is taken for in advance
_M_ARENA_MAX = -8  # of mallopt in glibc's malloc.h
_SMALL = 512  # bytes of the largest object that Python's own allocator has; larger ones are the C library's
_ROOM = 4  # times what is reserved of the C library's heap may be free in it
_ARENA = 2**20  # bytes that Python's own allocator takes from the system at once, and returns only as a whole


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
    told = _mallinfo()
    return Held(sys.getallocatedblocks(), None if told is None else told.uordblks + told.hblkhd)


def _mallinfo() -> _Mallinfo | None:
    mallinfo = getattr(_C, "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    assert isinstance(told, _Mallinfo)
    return told


def one_heap() -> None:
    """Have all threads share one heap of the C library, where it is glibc; to be called before there are others. Each thread
    has else one of its own, as large as the most that it has ever needed.

    Threads of Python take turns anyway; those of an engine on a CPU (OpenMP, oneDNN) do not, and may wait for each other.
    With model `tiny` on two of them no cost was to be seen: CPU time of a prefill of 500 tokens -0.8 %, and of 200 tokens
    decoded -1.8 % (medians of ten processes each, in turn; the shortest: -0.1 and +0.4 %), wall times -0.1 and -15 % on a
    machine that others used too. Many threads and larger models were not measured.
    """
    mallopt = getattr(_C, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


class Reserve:
    """Memory for as many turns as there may be under way, taken at once: a crowd does not wait for the system, and resident
    memory is from the start what it will be.

    Python's allocator returns what is wholly free in pieces of _ARENA: a little of each stays in use, and the fullest piece
    is used first, so this one last. The C library returns the end of its heap: what stays in use there is behind the rest.
    """

    def __init__(self, turns: int, more_bytes: int = 0) -> None:
        """more_bytes: that others will take of the C library's heap."""
        turns, header = min(turns, _MOST_TURNS), sys.getsizeof(b"")
        self._heap_bytes = turns * LARGE_BYTES + more_bytes
        # Filled: the system gives a page when it is written to.
        small = [b"x" * (_SMALL - header) for _ in range(turns * SMALL_BYTES // _SMALL)]
        large = [b"x" * (LARGE_BYTES - header) for _ in range(self._heap_bytes // LARGE_BYTES)]
        # Pieces start anywhere: each holds a whole half of one that is aligned.
        self._kept = [*{id(one) // (_ARENA // 2): one for one in small}.values(), max(large, key=id)]
        self._free_bytes = 0  # of the C library's heap after the last trim: most of it without pages

    def give_back(self) -> None:
        """Free pages of the C library to the system, where it can: after long bodies or prompts its heap is else as large as
        the most that was ever needed.

        A trim leaves what is free in the heap and takes its pages, those reserved too, which the next crowd has to wait for:
        so there is another one only where _ROOM times the reserve more is free than after the last. No more than what was
        free then and _ROOM times the reserve is ever resident in vain. A library that does not say what is free is trimmed
        at each call.
        """
        trim = getattr(_C, "malloc_trim", None)
        told = _mallinfo()
        if trim is None or (told is not None and told.fordblks <= self._free_bytes + _ROOM * self._heap_bytes):
            return
        trim(0)
        left = _mallinfo()
        self._free_bytes = 0 if left is None else left.fordblks


def settle() -> None:
    """All that there is now is here to stay: modules, model, engine. The cycle collector does not go through it again, which
    takes 0.1 s and more while nobody is served, nor lets what requests leave grow to a quarter of it."""
    gc.collect()
    gc.freeze()


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # not everywhere is a process its own library
        return None


_C: Any = _library()
