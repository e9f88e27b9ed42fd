"""RAM that a GPU copies from and to directly."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray


def pinned_bytes(size: int) -> torch.Tensor:
    """uint8 [size], zeroed and page-locked: exactly so many bytes, where torch's own pinned memory takes the next power of
    two (128 GiB for 65). Raises RuntimeError where the machine does not grant it."""
    memory = np.zeros(size + mmap.PAGESIZE, dtype=np.uint8)
    begins = -memory.ctypes.data % mmap.PAGESIZE
    flat = torch.from_numpy(memory[begins : begins + size])
    address, cudart = flat.data_ptr(), torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, size, 0)) != 0:
        # Some virtual machines refuse. That stays behind as the runtime's last error, for which the next kernel would be
        # blamed; then it is torch's way.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    # The array outlives every view of it, and is told before its memory goes.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return flat


def send(values: NDArray[np.int32], target: torch.Tensor) -> None:
    """Into `target` without waiting for the device: from pinned memory, which torch keeps until the copy is done."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def sent(values: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """A new tensor there, filled as `send` does it."""
    target = torch.empty(values.shape, dtype=torch.int32, device=device)
    send(values, target)
    return target
