"""Transfers between the tiers: alone beside a plain copy of the same bytes, and beside the compute that waits for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pensieve.core.plan import Move, Row, Sample, StepPlan
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import LoadedModel
from pensieve.device.transfers.cuda_link import BatchCopier, CallCopier, CudaLink, choose_copier
from pensieve.device.transfers.transfer import Transfer
from pensieve.device.worker import TorchWorker
from pensieve.lab.bench.case import OURS, Case, in_turn, interleaved
from pensieve.lab.bench.session import Bench
from pensieve.lab.bench.steps import CHUNK, load, perform_ms
from pensieve.serve.systems.base import WallClock
from pensieve.serve.systems.profiling import swap_in
from pensieve.specs import ModelSpec

_RESTORED, _NEW = 8192, 512  # tokens: loaded, and computed over them
_FRAGMENT_BLOCKS = (1, 2, 8, 32)


def run(bench: Bench) -> None:
    """Target swap. Raises PensieveError."""
    model = load(bench)
    _fragments(bench, model.spec)
    if bench.on_gpu:
        _pipelined(bench, model, min(_RESTORED, model.spec.max_context - _NEW) // CHUNK * CHUNK)
    else:
        bench.note("A CPU has no link between its tiers: swap_in_gb_s is of RAM to RAM, and no restore is pipelined.")


def _fragments(bench: Bench, spec: ModelSpec) -> None:
    """Swap-ins of the same bytes by every way of copying, beside one plain copy of them: a case for each size of fragments in
    _FRAGMENT_BLOCKS, and one for all blocks in one piece."""
    blocks = 1024 if bench.on_gpu else 256
    tensors = KvTensors(spec, CHUNK, blocks, blocks, bench.device, bench.dtype)
    transfers = _transfers(bench, tensors)
    tensors.cpu.fill_(0.5)
    moved = blocks // 2
    size = moved * tensors.block_bytes
    plain_source = torch.empty(size, dtype=torch.uint8, pin_memory=bench.on_gpu).fill_(1)
    plain_target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    for together in (*_FRAGMENT_BLOCKS, moved):
        ids = scattered(moved, together)
        move = swap_in(0, ids, ids[together:] + ids[:together])  # so that all runs lie elsewhere in the target
        runs: dict[str, Callable[[], object]] = {
            **{name: partial(_swap_in, transfer, tensors.layers, move) for name, transfer in transfers.items()},
            "plain_copy": lambda: plain_target.copy_(plain_source, non_blocking=True),
        }
        with torch.inference_mode():
            times = interleaved(runs, bench.options.repeats or 7, bench.device)
        rates = [replace(one, values=[size / ms / 1e6 for ms in one.values]) for one in times.values()]
        fragment = together * tensors.layer_block_bytes
        case = Case(
            label=f"swap in, fragments of {fragment // 1024} KiB",
            floor=max(rates[-1].values),
            floor_is="one plain copy of the same bytes" + (" from pinned memory" if bench.on_gpu else ""),
            metric="swap_in_gb_s",
            parameters={"fragment_bytes": fragment, "bytes": size, "fragments": moved // together * tensors.layers},
        )
        bench.record(case, rates)
    for transfer in transfers.values():
        transfer.close()


def _transfers(bench: Bench, tensors: KvTensors) -> dict[str, Transfer]:
    """Ours by name, first the one that serves; on a GPU beside a call a run, where that is something else."""
    if not bench.on_gpu:
        return {OURS: Transfer(tensors)}
    chosen, note = choose_copier(tensors)
    bench.note(f"Copies between the tiers: {note}.")
    copiers: dict[str, CallCopier | BatchCopier] = (
        {OURS: chosen} if isinstance(chosen, CallCopier) else {OURS: chosen, "call_a_run": CallCopier()}
    )
    return {name: Transfer(tensors, CudaLink(bench.device, copier)) for name, copier in copiers.items()}


def _swap_in(transfer: Transfer, layers: int, move: Move) -> None:
    transfer.swap_in([move])
    for layer in range(layers):  # the current stream waits, so that its events see the copies
        transfer.wait_for_layer(layer)
    transfer.moved()
    transfer.stalled_ns()


def scattered(count: int, together: int) -> tuple[int, ...]:
    """`count` of twice as many blocks, in runs of `together`."""
    return tuple(first + i for first in range(0, 2 * count, 2 * together) for i in range(together))[:count]


def _pipelined(bench: Bench, model: LoadedModel, tokens: int) -> None:
    """Restore `tokens` tokens and compute `new` over them: layer by layer, and one after the other."""
    new, chunks = _NEW, tokens // CHUNK
    worker = TorchWorker(model, CHUNK, WallClock())
    worker.start(chunks + new // CHUNK, chunks)
    worker.tensors.cpu.fill_(0.01)
    blocks = tuple(range(chunks))
    row = Row(0, ((tokens, tokens + new),), tuple(i % 250 for i in range(new)), Sample(tokens + new))
    table = ((0, 0, tuple(range(chunks + new // CHUNK))),)
    copies = (swap_in(1, blocks, blocks),)

    def step(rows: tuple[Row, ...], moves: tuple[Move, ...]) -> float:
        return perform_ms(worker, [StepPlan(1, rows, table, moves)])

    ways: dict[str, Callable[[], float]] = {
        "pipelined": lambda: step((row,), copies),
        "sequential": lambda: step((), copies) + step((row,), ()),
        "transfer": lambda: step((), copies),
        "compute": lambda: step((row,), ()),
    }
    times = in_turn(ways, bench.options.repeats or 7)
    worker.close()
    middle = {name: one.value for name, one in times.items()}
    hidden = (middle["sequential"] - middle["pipelined"]) / min(middle["transfer"], middle["compute"])
    figures = {
        "speedup": middle["sequential"] / middle["pipelined"],
        "overlap_pct": 100 * hidden,
        "transfer_ms": middle["transfer"],
        "compute_ms": middle["compute"],
    }
    case = Case(
        label=f"restore {tokens}, compute {new}",
        floor=max(middle["transfer"], middle["compute"]),
        floor_is="the longer of transfer and compute, each alone in the same rounds",
        metric="restore_ms",
        parameters={"context": tokens, "new": new},
        ours="pipelined",
    )
    bench.record(case, [replace(times["pipelined"], figures=figures), times["sequential"]])
