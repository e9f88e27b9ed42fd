"""Pages of files that weights were read from, returned to the system while their tensors live on.

On a CPU a safetensors file is not read into memory but mapped: a tensor is a part of the file, whose pages come when they
are first read and count as this process's own. The mapping ends with the last tensor in it. So weights that were copied into
another layout would stay beside their copies for as long as one norm of the same file is in use.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_MAPS = Path("/proc/self/maps")


def return_file_pages(copied: Iterable[torch.Tensor]) -> int:
    """Return the whole pages of tensors that nobody will write to or has to find changed: if one is read after all, it is as
    the file has it. Returns the bytes. Tensors that are no part of a file keep theirs."""
    files = _files()
    returned = 0
    for tensor in copied:
        first, last = _whole_pages(tensor)
        if first < last and any(start <= first and last <= stop for start, stop in files):
            returned += _returned(first, last)
    return returned


def _whole_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the pages begin and end that are this tensor's alone; equal where there is none."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0, 0
    begins = tensor.data_ptr()
    first = -(-begins // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, max(first, (begins + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE)


def _returned(first: int, last: int) -> int:
    """Linux drops the pages of these addresses, as no other system promises to; bytes."""
    madvise = getattr(_library(), "madvise", None)
    if not sys.platform.startswith("linux") or madvise is None:
        return 0
    failed = madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED))
    return 0 if failed else last - first


def _files() -> list[tuple[int, int]]:
    """Addresses at which this process has files mapped, each as start and stop; none where the system does not tell."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        if inode != "0":
            start, _, stop = addresses.partition("-")
            found.append((int(start, 16), int(stop, 16)))
    return found


def _library() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # not everywhere is a process its own library
        return None
