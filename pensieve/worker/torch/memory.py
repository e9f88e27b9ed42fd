"""How much KV fits beside the model, and what is said when memory ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pensieve.errors import HardwareMissing
from pensieve.plan import Row, Sample
from pensieve.units import ceil_div, format_bytes
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.options import TorchOptions

LEAST_BLOCKS = 4
_KEPT_BITS = 6  # sizes are rounded down to so many binary digits, so that a few MB more or less in use change nothing


def rounded(blocks: int, bits: int = _KEPT_BITS) -> int:
    """`blocks` with all but its `bits` highest binary digits cleared."""
    spare = max(0, blocks.bit_length() - bits)
    return blocks >> spare << spare


def largest_rows(tokens: int, requests: int, max_context: int) -> tuple[list[Row], list[Row]]:
    """The two iterations that take most memory: one of the longest rows, and one of the most sampled rows. All are rows of
    slot 0, so that they share its blocks; whether the last one is sampled, and of which slot, does not matter."""
    longest = min(tokens, max_context)
    long = [_prompt(min(longest, tokens - start)) for start in range(0, tokens, longest)]
    many = min(requests, tokens)
    return long, [_prompt(min(longest, tokens // many)) for _ in range(many)]


def _prompt(tokens: int) -> Row:
    return Row(0, ((0, tokens),), (0,) * tokens, Sample(tokens))


def fitting_blocks(
    model: LoadedModel, options: TorchOptions, block_bytes: int, iterate: Callable[[int, list[Row]], None]
) -> int:
    """GPU blocks that fit beside the weights and the largest iteration, whose memory is measured here.

    iterate(blocks, rows): performs an iteration over a pool of that many blocks and frees everything. Raises
    HardwareMissing with the numbers, also where the iteration itself does not fit.
    """
    device = model.device
    assert device.type == "cuda", "on a CPU memory is the machine's, and the configuration decides"
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens, requests, context = options.max_batch_tokens, options.max_batch_requests, model.spec.max_context
    blocks = ceil_div(min(tokens, context), block_bytes // model.spec.kv_bytes_per_token)
    try:
        for rows in largest_rows(tokens, requests, context):
            iterate(blocks, rows)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise HardwareMissing(_no_room(model, options, free, total, None)) from error
    working = torch.cuda.max_memory_allocated(device) - before - blocks * block_bytes
    torch.cuda.empty_cache()
    return blocks_in(model, options, free, total, working, block_bytes)


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
        f"weights of {model.spec.name}, an iteration of {options.max_batch_tokens} tokens needs {needs}, and "
        f"hardware.memory_share={options.memory_share:g} bounds all of it; lower scheduler.max_batch_tokens, use a smaller "
        "model, or end what else uses the device."
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
