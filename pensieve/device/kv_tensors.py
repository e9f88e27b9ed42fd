"""The memory behind the blocks: one pool a tier; and RAM that a GPU copies from and to directly."""

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from pensieve.errors import HardwareMissing
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes


class KvTensors:
    """Two pools of [layers, blocks, chunk_tokens, 2, kv_heads, head_dim]: `gpu` on the model's device, `cpu` in RAM.

    K and V of a token lie side by side (the 2 is inside the token), so that a run of consecutive blocks is a plain
    strided view of tokens for attention, one gather fetches both, and a block is one fragment a layer for a copy. With
    the 2 outside the tokens, no run of blocks could be attended to without copying it first.

    On a CPU machine both pools are RAM. They are zeroed (a place that was never written may meet a zero weight, and
    0 x NaN is NaN), which costs nothing in RAM: the kernel has zeroed pages, which it maps at first use (torch.zeros
    writes its zeroes). The CPU pool is pinned, and so mapped at once, only where there is a GPU to copy to.
    """

    def __init__(
        self,
        spec: ModelSpec,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises HardwareMissing, with the sizes, where the memory is not there."""
        assert gpu_blocks > 0 and cpu_blocks >= 0 and chunk_tokens > 0
        self.layers = spec.layers
        self.chunk_tokens = chunk_tokens
        self.gpu_blocks, self.cpu_blocks = gpu_blocks, cpu_blocks
        self.device, self.dtype = device, dtype
        self.token_shape = (2, spec.kv_heads, spec.head_dim)
        # Lazily mapped memory is granted beyond what the machine has; the process would be killed when it fills.
        in_ram, there = cpu_blocks + (gpu_blocks if device.type == "cpu" else 0), psutil.virtual_memory().total
        if (wanted := in_ram * self.block_bytes) > there:
            raise HardwareMissing(
                f"{'Both KV tiers' if device.type == 'cpu' else 'The CPU tier of the KV cache'} would take "
                f"{format_bytes(wanted)}, and this machine has {format_bytes(there)} of memory; lower cache.gpu or cache.cpu."
            )
        self._pages: list[mmap.mmap] = []
        self.gpu = self._pool(gpu_blocks, device, pinned=False)
        self.cpu = self._pool(cpu_blocks, torch.device("cpu"), pinned=device.type == "cuda" and cpu_blocks > 0)

    @property
    def layer_block_bytes(self) -> int:
        """One block of one layer: the contiguous unit of every copy."""
        k_and_v, kv_heads, head_dim = self.token_shape
        return self.chunk_tokens * k_and_v * kv_heads * head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """One block, all layers."""
        return self.layers * self.layer_block_bytes

    @property
    def gpu_bytes(self) -> int:
        return self.gpu_blocks * self.block_bytes

    @property
    def cpu_bytes(self) -> int:
        return self.cpu_blocks * self.block_bytes

    def gpu_tokens(self) -> torch.Tensor:
        """The GPU pool as [layers, tokens, 2, kv_heads, head_dim]; a token's place is block * chunk_tokens + offset."""
        return self.gpu.view(self.layers, self.gpu_blocks * self.chunk_tokens, *self.token_shape)

    def forget(self) -> None:
        """What the pools hold is not needed: their values are undefined from now on. On a CPU their memory is returned where
        the system allows that, and they are zeroes again."""
        if self.device.type == "cpu":
            for pages in self._pages:
                with suppress(AttributeError, OSError):  # only Linux promises zeroes
                    pages.madvise(mmap.MADV_DONTNEED)

    def _pool(self, blocks: int, device: torch.device, pinned: bool) -> torch.Tensor:
        shape = (self.layers, blocks, self.chunk_tokens, *self.token_shape)
        try:
            if device.type == "cpu" and not pinned and blocks:
                pages = mmap.mmap(-1, blocks * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(AttributeError, OSError):  # as numpy's own: fewer misses of the address cache
                    pages.madvise(mmap.MADV_HUGEPAGE)
                self._pages.append(pages)
                return torch.frombuffer(pages, dtype=self.dtype).view(shape)
            if pinned:
                with torch.cuda.device(self.device):  # else a context is made on the first device, whoever uses that
                    return pinned_bytes(blocks * self.block_bytes).view(self.dtype).view(shape)
            return torch.zeros(shape, dtype=self.dtype, device=device)
        except (RuntimeError, MemoryError, OSError) as error:  # torch's OutOfMemoryError is a RuntimeError
            where, on_gpu = "pinned CPU" if pinned else device.type.upper(), device.type == "cuda"
            free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
            raise HardwareMissing(
                f"A KV pool of {format_bytes(blocks * self.block_bytes)} ({blocks} blocks of "
                f"{format_bytes(self.block_bytes)}) does not fit in {where} memory, of which {format_bytes(free)} are free; "
                "lower cache.gpu or cache.cpu."
            ) from error


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
