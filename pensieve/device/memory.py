"""How much KV fits beside the model, and what is said when memory ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pensieve.core.plan import Row, Sample
from pensieve.device.model import LoadedModel
from pensieve.device.options import TorchOptions
from pensieve.errors import HardwareMissing
from pensieve.units import ceil_div, format_bytes

LEAST_BLOCKS = 4
_KEPT_BITS = 6  # sizes are rounded down to so many binary digits, so that a few MB more or less in use change nothing


def rounded(blocks: int, bits: int = _KEPT_BITS) -> int:
    """`blocks` with all but its `bits` highest binary digits cleared."""
    spare = max(0, blocks.bit_length() - bits)
    return blocks >> spare << spare


def largest_rows(tokens: int, requests: int, max_context: int) -> tuple[list[Row], list[Row]]:
    """The two iterations that take most memory: one of the longest rows, and one of the most sampled rows. All are rows of
    slot 0, so that they share its blocks; whether the last one is sampled, and of which slot, does not matter. They are
    drawn by chance from a limited set, for which the sampler takes most."""
    longest = min(tokens, max_context)
    long = [_prompt(min(longest, tokens - start)) for start in range(0, tokens, longest)]
    many = min(requests, tokens)
    return long, [_prompt(min(longest, tokens // many)) for _ in range(many)]


def _prompt(tokens: int) -> Row:
    return Row(0, ((0, tokens),), (0,) * tokens, Sample(tokens, temperature=1.0, top_p=0.9, top_k=2))


class Rehearsal(Protocol):
    """A worker that tries what it will do, over a pool of few blocks."""

    def stand(self, blocks: int) -> None:
        """Allocate a pool of so many blocks."""
        ...

    def iterate(self, blocks: int, rows: list[Row]) -> None:
        """Perform an iteration over the pool and keep nothing of it."""
        ...

    def record(self) -> None:
        """Make what lives as long as the worker: graphs with their memory, standing plans."""
        ...


@dataclass(frozen=True, slots=True)
class Room:
    """blocks: of the GPU tier. Beside them is reserved what was measured: iteration_bytes, of the largest iteration with its
    sampler, while it runs; standing_bytes, of graphs and their pool, standing plans and libraries' workspaces."""

    blocks: int
    iteration_bytes: int
    standing_bytes: int


def find_room(model: LoadedModel, options: TorchOptions, block_bytes: int, rehearsal: Rehearsal) -> Room:
    """GPU blocks that fit beside the weights, the largest iteration, and what the worker makes at its start, as measured.

    Raises HardwareMissing with the numbers, also where the iteration itself does not fit.
    """
    device = model.device
    assert device.type == "cuda", "on a CPU memory is the machine's, and the configuration decides"
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    tokens, requests, context = options.max_batch_tokens, options.max_batch_requests, model.spec.max_context
    blocks = ceil_div(min(tokens, context), block_bytes // model.spec.kv_bytes_per_token)
    try:
        rehearsal.stand(blocks)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        for rows in largest_rows(tokens, requests, context):
            rehearsal.iterate(blocks, rows)
        torch.cuda.synchronize(device)
        working = torch.cuda.max_memory_allocated(device) - before
        rehearsal.record()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise HardwareMissing(_no_room(model, options, free, total, None)) from error
    torch.cuda.empty_cache()
    beside = torch.cuda.mem_get_info(device)[0] + blocks * block_bytes  # what stands, stands; the pool will be another
    return Room(blocks_in(model, options, beside, total, working, block_bytes), working, free - beside)


def blocks_in(model: LoadedModel, options: TorchOptions, free: int, total: int, working: int, block_bytes: int) -> int:
    """Blocks in what memory_share leaves of `total` beside what is in use and `working` bytes of one iteration."""
    room = min(free, int(options.memory_share * total) - (total - free)) - working
    blocks = rounded(max(0, room) // block_bytes)
    if blocks < LEAST_BLOCKS:
        raise HardwareMissing(_no_room(model, options, free, total, working))
    return blocks


def _no_room(model: LoadedModel, options: TorchOptions, free: int, total: int, working: int | None) -> str:
    needs = "more than that" if working is None else format_bytes(working)
    return (
        f"cache.gpu=auto finds no room on {model.device}: {format_bytes(free)} of {format_bytes(total)} are free beside the "
        f"weights of {model.spec.name} and other programs. An iteration of {options.max_batch_tokens} tokens needs {needs}, "
        f"and hardware.memory_share={options.memory_share:g} bounds all of it. Lower scheduler.max_batch_tokens, use a "
        "smaller model, or end what else uses the device."
    )


def free_bytes(device: torch.device) -> int | None:
    """Device memory that nobody uses, torch's own cache included; None where the device cannot say, or is a CPU."""
    if device.type != "cuda":
        return None
    try:
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:  # a device in error answers nothing
        return None


def explain(failure: Exception, device: torch.device) -> str:
    """One sentence for the requests that fail with a step."""
    text = (str(failure).strip().splitlines() or [""])[0]
    if isinstance(failure, torch.OutOfMemoryError):
        free = free_bytes(device)
        there = "" if free is None else f" ({format_bytes(free)} are free)"
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return (
            f"The device ran out of memory in this step{there}; lower scheduler.max_batch_tokens or cache.gpu: {text}"
        )
    return f"The step failed on the device: {type(failure).__name__}: {text}"
