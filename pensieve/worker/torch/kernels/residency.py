"""How many programs of a compiled kernel share a multiprocessor: what its registers, shared memory and warps leave room for.

The sizes are those of NVIDIA's occupancy rules (CUDA C++ Programming Guide, technical specifications by compute capability).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WARP = 32
_REGISTER_UNIT = 256  # a warp is given registers in whole units
RESERVED_SHARED = 1024  # of each program, for the system


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What programs share: 32-bit registers, bytes of shared memory, threads. shared_a_program: the most one may have."""

    registers: int
    shared_bytes: int
    threads: int
    shared_a_program: int

    @classmethod
    def of(cls, properties: Any) -> Multiprocessor | None:
        """Read torch.cuda.get_device_properties; None where this torch does not say all of it."""
        names = (
            "regs_per_multiprocessor", "shared_memory_per_multiprocessor", "max_threads_per_multi_processor",
            "shared_memory_per_block_optin",
        )  # fmt: skip
        values = [getattr(properties, name, None) for name in names]
        return None if None in values else cls(*(int(value) for value in values if value is not None))


KNOWN = {
    80: Multiprocessor(65536, 164 * 1024, 2048, 163 * 1024),
    86: Multiprocessor(65536, 100 * 1024, 1536, 99 * 1024),
    89: Multiprocessor(65536, 100 * 1024, 1536, 99 * 1024),
    90: Multiprocessor(65536, 228 * 1024, 2048, 227 * 1024),
    100: Multiprocessor(65536, 228 * 1024, 2048, 227 * 1024),
}
"""By architecture: for kernels that are compiled for a GPU that is not there."""


def resident(registers: int, shared_bytes: int, warps: int, on: Multiprocessor) -> int:
    """Programs on a multiprocessor at once; registers: of a thread. 0 where not one fits."""
    units = -(-registers * _WARP // _REGISTER_UNIT)
    by_registers = on.registers // (units * _REGISTER_UNIT * warps)
    by_shared = on.shared_bytes // (shared_bytes + RESERVED_SHARED)
    return min(by_registers, by_shared, on.threads // (warps * _WARP))


def resident_of(compiled: Any, warps: int, properties: Any) -> int | None:
    """How many programs of a kernel that Triton has launched share a multiprocessor; None where the launch does not say (an
    interpreter, a stand-in, another Triton)."""
    registers, on = getattr(compiled, "n_regs", None), Multiprocessor.of(properties)
    shared = getattr(getattr(compiled, "metadata", None), "shared", None)
    if not registers or shared is None or on is None:
        return None
    return max(1, resident(int(registers), int(shared), warps, on))
