"""Swap-ins of the same bytes in fragments of all sizes, by every way of copying, beside one plain copy of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from pensieve.bench.case import OURS, Case, Figure, Measured
from pensieve.bench.record import now
from pensieve.bench.returning import CHUNK
from pensieve.bench.session import Bench
from pensieve.bench.timer import interleaved
from pensieve.errors import EngineMissing
from pensieve.plan import Copy
from pensieve.specs import ModelSpec
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.transfers.choice import Copying, CopyWay, choose_copying
from pensieve.worker.torch.transfers.lanes import CudaLink
from pensieve.worker.torch.transfers.transfer import Transfer

_FRAGMENT_BLOCKS = (1, 2, 8, 32)
_WAYS: tuple[CopyWay, ...] = ("auto", "dma", "kernel")


def measure_fragments(bench: Bench, spec: ModelSpec) -> None:
    """A case for each size of fragments: the sizes of _FRAGMENT_BLOCKS, and all blocks in one piece."""
    blocks = 1024 if bench.on_gpu else 256
    tensors = KvTensors(spec, CHUNK, blocks, blocks, bench.device, bench.dtype)
    transfers = _transfers(bench, tensors)
    ours = next(iter(transfers))
    tensors.cpu.fill_(0.5)
    moved = blocks // 2
    size = moved * tensors.block_bytes
    plain_source = torch.empty(size, dtype=torch.uint8, pin_memory=bench.on_gpu).fill_(1)
    plain_target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    for together in (*_FRAGMENT_BLOCKS, moved):
        began = now()
        ids = scattered(moved, together)
        copy = Copy(0, ids, ids[together:] + ids[:together])  # so that all runs lie elsewhere in the target
        runs: dict[str, Callable[[], object]] = {
            **{name: partial(_swap_in, transfer, tensors.layers, copy) for name, transfer in transfers.items()},
            "plain_copy": lambda: plain_target.copy_(plain_source, non_blocking=True),
        }
        if together == 1:  # seconds a round, and the same whatever lies together
            runs["gathered"] = partial(_gathered, tensors, torch.tensor(copy.src), torch.tensor(copy.dst))
        with torch.inference_mode():
            times = interleaved(runs, bench.rounds(7), bench.device)
            held = {
                name: _held_ms(transfer, tensors.layers, copy)
                for name, transfer in transfers.items()
                if bench.on_gpu and times[name].error is None
            }
        rates = {name: [size / ms / 1e6 for ms in t.values] for name, t in times.items()}
        fragment = together * tensors.layer_block_bytes
        case = Case(
            label=f"swap in, fragments of {fragment // 1024} KiB",
            floor=max(rates["plain_copy"]),
            floor_is="one plain copy of the same bytes" + (" from pinned memory" if bench.on_gpu else ""),
            metric="swap_in_gb_s",
            unit="GB/s",
            higher_is_better=True,
            parameters={"fragment_bytes": fragment, "bytes": size, "fragments": moved // together * tensors.layers},
            ours=ours,
        )
        figures = {name: [Figure("host_ms", ms, "ms")] for name, ms in held.items()}
        bench.record(
            case, [Measured(n, rates[n], figures=figures.get(n, ()), error=times[n].error) for n in runs], began
        )
    for transfer in transfers.values():
        transfer.close()


def _transfers(bench: Bench, tensors: KvTensors) -> dict[str, Transfer]:
    """Ours by name, the one that serves first. On a GPU: as measured at start, each kind by itself, and a call a run."""
    if not bench.on_gpu:
        return {OURS: Transfer(tensors)}
    ways = ways_of_copying(bench, tensors)
    transfers = {way: Transfer(tensors, CudaLink(bench.device, c.inward, c.outward)) for way, c in ways.items()}
    return {**transfers, "call_a_run": Transfer(tensors, CudaLink(bench.device))}


def ways_of_copying(bench: Bench, tensors: KvTensors) -> dict[str, Copying]:
    """By what hardware.copies would say, as far as they run here; those that do not are noted. The pools are zeroed."""
    ways: dict[str, Copying] = {}
    for way in _WAYS:
        try:
            ways[way] = choose_copying(tensors, way)
        except EngineMissing as missing:
            bench.note(str(missing))
        else:
            bench.note(f"hardware.copies={way}: {ways[way].note}.")
    return ways


def _held_ms(transfer: Transfer, layers: int, copy: Copy) -> float:
    """For how long the host is busy with a swap-in, in milliseconds: no compute is launched meanwhile."""
    held: list[float] = []
    for _ in range(3):
        transfer.finish()
        began = perf_counter()
        transfer.swap_in([copy])
        held.append((perf_counter() - began) * 1e3)
    _swap_in(transfer, layers, copy)
    transfer.finish()
    return min(held)


def _swap_in(transfer: Transfer, layers: int, copy: Copy) -> None:
    transfer.swap_in([copy])
    for layer in range(layers):  # the current stream waits, so that its events see the copies
        transfer.wait_for_layer(layer)
    transfer.done()
    transfer.stalled_ns()


def _gathered(tensors: KvTensors, src: torch.Tensor, dst: torch.Tensor) -> None:
    """The same blocks by index: gathered in RAM, copied in one piece, scattered."""
    tensors.gpu[:, dst.to(tensors.device)] = tensors.cpu[:, src].to(tensors.device)


def scattered(count: int, together: int) -> tuple[int, ...]:
    """`count` of twice as many blocks, in runs of `together`."""
    return tuple(first + i for first in range(0, 2 * count, 2 * together) for i in range(together))[:count]
