"""RAM that a GPU copies from and to directly."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray


class Kept:
    """Page-locked memory that nobody uses now, by device one piece each, for whoever asks next: for some hundred GiB
    page-locking takes a minute, zeroing seconds. Only while `keeps` says so; `clear` gives it back to the system."""

    def __init__(self) -> None:
        self.keeps: Callable[[], bool] = lambda: False
        self._pieces: dict[int, NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces.values())

    def clear(self) -> None:
        self._pieces.clear()

    def take(self, device: int, size: int) -> NDArray[np.uint8] | None:
        """At least `size` bytes, holding what was left there. What is too small goes: there may be no room for both."""
        piece = self._pieces.pop(device, None)
        return piece if piece is not None and piece.nbytes >= size else None

    def give(self, device: int, piece: NDArray[np.uint8]) -> None:
        """The larger of two pieces stays."""
        if self.keeps() and ((other := self._pieces.get(device)) is None or other.nbytes < piece.nbytes):
            self._pieces[device] = piece


kept = Kept()


def pinned_bytes(size: int) -> torch.Tensor:
    """uint8 [size], zeroed and page-locked: exactly so many bytes, where torch's own pinned memory takes the next power of
    two (128 GiB for 65). Raises RuntimeError where the machine does not grant it."""
    device = torch.cuda.current_device()
    again = kept.take(device, size)
    if again is not None:
        return _lent(again, size, device).zero_()
    memory = np.zeros(size + mmap.PAGESIZE, dtype=np.uint8)
    begins = -memory.ctypes.data % mmap.PAGESIZE
    locked = memory[begins : begins + size]
    address, cudart = locked.ctypes.data, torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, size, 0)) != 0:
        # Some virtual machines refuse. That stays behind as the runtime's last error, for which the next kernel would be
        # blamed; then it is torch's way.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    # The array is told before its memory goes; whoever has a part of it keeps it.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return _lent(locked, size, device)


def _lent(locked: NDArray[np.uint8], size: int, device: int) -> torch.Tensor:
    """Make a tensor of the first bytes of page-locked memory, which may be kept when no view of the tensor is left."""
    part = locked[:size]
    weakref.finalize(part, kept.give, device, locked).atexit = False
    return torch.from_numpy(part)


def send(values: NDArray[np.int32], target: torch.Tensor) -> None:
    """Copy values into `target` without waiting for the device: from pinned memory, which torch keeps until the copy is
    done."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def sent(values: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Make a new tensor on the device, filled as `send` does it."""
    target = torch.empty(values.shape, dtype=torch.int32, device=device)
    send(values, target)
    return target
