"""Transfers between the tiers: alone beside a plain copy of the same bytes, and beside the compute that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pensieve.core.clock import WallClock
from pensieve.core.plan import Move, Row, Sample, StepPlan, swap_in
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import LoadedModel
from pensieve.device.transfers.copies import CallCopier, choose_copier
from pensieve.device.transfers.lanes import CudaLink
from pensieve.device.transfers.transfer import Transfer
from pensieve.device.worker import TorchWorker
from pensieve.lab.bench.case import OURS, Case
from pensieve.lab.bench.models import CHUNK, load, perform_ms
from pensieve.lab.bench.restore import measure_restores
from pensieve.lab.bench.session import Bench
from pensieve.lab.bench.timer import in_turn, interleaved
from pensieve.plugins.device.thread_link import ThreadLink, copy_and_wait
from pensieve.specs import ModelSpec

SLOW_LINK = 12.5e9  # bytes/s of PCIe Gen4 x8, as large copies reach it: what a GPU with a faster link is held to
# On a CPU: loading a token over computing it, by PCIe Gen4 x8 and Gen5 x16 (48 GB/s) to an H200 with an 8B model in bf16.
# The stand-in for the link is as much slower than this machine's compute.
LINKS = {"gen4_x8": 0.35, "gen5_x16": 0.09}
_LEARNED = ("gpt2", "opt")  # positions beyond max_context do not exist; rotary ones do, and speed is what is asked
_GPU, _GPU_FULL, _CPU = (8192,), (8192, 16384, 32768), (1024,)  # tokens that are restored
_FRAGMENT_BLOCKS = (1, 2, 8, 32)


def run(bench: Bench) -> None:
    """Target swap. Raises PensieveError."""
    model = load(bench)
    _fragments(bench, model.spec)
    for tokens in (_GPU_FULL if bench.full else _GPU) if bench.on_gpu else _CPU:
        if tokens + 512 > model.spec.max_context:
            if model.spec.model_type in _LEARNED:
                continue
            model = replace(model, spec=replace(model.spec, max_context=tokens + 512))
        _pipelined(bench, model, tokens)
        if bench.on_gpu:
            measure_restores(bench, model, tokens, None, {"own_link": None})
            slow = ThreadLink(SLOW_LINK, copy_and_wait, bench.device)
            measure_restores(bench, model, tokens, slow, {"gen4_x8": None})
        else:
            measure_restores(bench, model, tokens, ThreadLink(), LINKS)
    bench.note(
        f"gen4_x8: copies held back to {SLOW_LINK / 1e9} GB/s by the host. own_link: the machine's." if bench.on_gpu else
        "A CPU has no link between its tiers: a thread with a bandwidth stands in, as slow beside this machine's compute as "
        "the named link is beside an H200's. swap_in_gb_s is of RAM to RAM."
    )  # fmt: skip


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
            times = interleaved(runs, bench.rounds(7), bench.device)
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
    copiers = {OURS: chosen} if isinstance(chosen, CallCopier) else {OURS: chosen, "call_a_run": CallCopier()}
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
    new = 512 if bench.on_gpu else 64
    link = None if bench.on_gpu else ThreadLink()
    worker = TorchWorker(model, CHUNK, WallClock(), link=link)
    chunks = tokens // CHUNK
    worker.start(chunks + new // CHUNK, chunks)
    worker.tensors.cpu.fill_(0.01)
    blocks = tuple(range(chunks))
    row = Row(0, ((tokens, tokens + new),), tuple(i % 250 for i in range(new)), Sample(tokens + new))
    table = ((0, 0, tuple(range(chunks + new // CHUNK))),)
    copies = (swap_in(1, blocks, blocks),)

    def step(rows: tuple[Row, ...], moves: tuple[Move, ...]) -> float:
        return perform_ms(worker, [StepPlan(1, rows, table, moves)])

    if link is not None:  # as long as the compute takes: where overlapping matters most
        link.throttle(chunks * worker.tensors.block_bytes / (min(step((row,), ()) for _ in range(4)) / 1e3))
    ways: dict[str, Callable[[], float]] = {
        "pipelined": lambda: step((row,), copies),
        "sequential": lambda: step((), copies) + step((row,), ()),
        "transfer": lambda: step((), copies),
        "compute": lambda: step((row,), ()),
    }
    times = in_turn(ways, bench.rounds(7))
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
