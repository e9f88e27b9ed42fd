"""The memory of a server's process: what it holds, and giving back what it does not."""

from __future__ import annotations

import gc

import psutil


def malloc_bytes() -> int | None:
    """In use of the C library's heap, in which native libraries and larger objects have theirs; None: it does not say."""
    if not hasattr(psutil, "heap_info"):  # psutil knows the heaps of glibc, macOS and Windows
        return None
    told = psutil.heap_info()
    return told.heap_used + told.mmap_used


def give_back() -> None:
    """Free pages of the C library to the system, where it can: after long bodies or prompts its heap is else as large as
    the most that was ever needed."""
    if hasattr(psutil, "heap_trim"):
        psutil.heap_trim()


def settle() -> None:
    """All that there is now is here to stay: modules, model, engine. The cycle collector does not go through it again, which
    takes 0.1 s and more while nobody is served, nor lets what requests leave grow to a quarter of it: the second collection
    counts what is not here to stay, which is nothing."""
    gc.collect()
    gc.freeze()
    gc.collect()
