"""How large the GPU tier is where cache.gpu=auto."""

from __future__ import annotations

from pensieve.compose.machine import Device, free_host_memory_bytes
from pensieve.errors import HardwareMissing
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes

AUTO = "auto"
GPU_SHARE = 0.9
"""Of a GPU's memory: weights, KV and the largest iteration together. The rest is the context's and fragmentation."""
CPU_SHARE = 0.5
"""Of a CPU machine's free memory: it belongs to others too, and a machine that runs out kills processes."""
LEAST_GPU_BLOCKS = 4
"""A prompt, its reply and the reserve need a few blocks; what the workload's longest conversation needs comes later."""


def memory_share(device: Device, asked: float | None) -> float:
    if asked is not None:
        return asked
    return CPU_SHARE if device.shared else GPU_SHARE


def auto_gpu_blocks(
    device: Device,
    model: ModelSpec,
    activation_bytes: int,
    cpu_bytes: int,
    block_bytes: int,
    asked_share: float | None,
    free_bytes: int | None = None,
) -> int:
    """Blocks of the GPU tier: what weights, one iteration and (on a CPU, the same memory) the CPU tier leave.

    Simulated: exact. A GPU: by its data sheet, since this is asked before anything is loaded; the worker measures again
    and its number counts. A CPU: of its free memory, to a power of two of blocks, so that trials that follow each other
    get the same although a few MB more or less are free. Raises HardwareMissing with the numbers.
    """
    share = memory_share(device, asked_share)
    if device.shared:
        there = free_host_memory_bytes() if free_bytes is None else free_bytes
        room = int(share * there) - model.weight_bytes - activation_bytes - cpu_bytes
        blocks = max(0, room) // block_bytes
        blocks = 1 << (blocks.bit_length() - 1) if blocks else 0
    else:
        there = device.gpu_bytes
        room = int(share * there) - model.weight_bytes - activation_bytes
        blocks = max(0, room) // block_bytes
    if blocks >= LEAST_GPU_BLOCKS:
        return blocks
    cpu = f", the CPU tier {format_bytes(cpu_bytes)}" if device.shared else ""
    raise HardwareMissing(
        f"cache.gpu=auto finds no room: hardware.memory_share={share:g} of the {format_bytes(there)} "
        f"{'free' if device.shared else 'of memory'} on {device.label} is {format_bytes(int(share * there))}, and of that "
        f"model={model.name} takes {format_bytes(model.weight_bytes)} in {model.dtype}, an iteration "
        f"{format_bytes(activation_bytes)}{cpu}; use a smaller model{' or cache.cpu' if device.shared else ''}, or set "
        "hardware.memory_share higher."
    )
