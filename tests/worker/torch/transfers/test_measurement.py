"""Which way of copying is chosen, from which measurements; and that each way brings every byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pensieve.errors import EngineMissing, HardwareMissing
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.transfers import driver
from pensieve.worker.torch.transfers import measurement as copying_module
from pensieve.worker.torch.transfers.driver import BATCH_CALL, Attributes, BatchCopier
from pensieve.worker.torch.transfers.link import BlockRun, CallCopier, Copier, Haul, copy_runs
from pensieve.worker.torch.transfers.measurement import (
    Copying,
    CopyWay,
    Limits,
    Sample,
    SplitCopier,
    Took,
    decide_copying,
    limits_of,
    samples_of,
    scattered,
)
from tests.worker.torch.driver import tiny_spec

BLOCKS = 48
RUNS = [BlockRun(1, 9, 2), BlockRun(4, 0, 1), BlockRun(6, 2, 3), BlockRun(20, 30, 8)]


def tensors(blocks: int = BLOCKS) -> KvTensors:
    return KvTensors(tiny_spec("llama"), 4, blocks, blocks, torch.device("cpu"), torch.float32)


class Named:
    """Copies as `copy_runs` does, but for the faults it is given; its name is what a stopwatch knows it by."""

    def __init__(self, name: str, fault: Callable[[Haul], Haul] | None = None) -> None:
        self.name, self.fault = name, fault
        self.hauls: list[list[BlockRun]] = []

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        self.hauls.append(list(haul.runs))
        done = haul if self.fault is None else self.fault(haul)
        return lambda layer: copy_runs(done.piece(layer))


def memory(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[int, int, int]]]:
    """A driver's batched copy for RAM, by the signature that cuda.h has, and what it was asked for."""
    asked: list[tuple[int, int, int]] = []
    stream = SimpleNamespace(query=lambda: True, cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def perform(
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: Any,
        first: Any,
        known: int,
        refused: Any,
        on: int,
    ) -> int:
        assert (known, first[0], on) == (1, 0, 77)
        asked.append((count, attributes[0].source_order, attributes[0].flags))
        words = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)]
        for target, source, size in zip(*words, strict=True):
            if not size:
                refused[0] = 1
                return 1
            ctypes.memmove(target, source, size)
        return 0

    return BATCH_CALL(perform), asked


@pytest.mark.parametrize("kind", ["calls", "batch", "split"])
def test_every_way_brings_every_byte_layer_by_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, expected = tensors(), tensors()
    for pool in (pools.cpu, pools.gpu):
        noise = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8)
        pool.view(-1).view(torch.uint8).copy_(noise)  # NaN patterns included
    expected.gpu.view(torch.uint8).copy_(pools.gpu.view(torch.uint8))
    for run in RUNS:
        for i in range(run.blocks):
            expected.gpu.view(torch.uint8)[:, run.dst + i] = pools.cpu.view(torch.uint8)[:, run.src + i]
    call, asked = memory(monkeypatch)
    ways: dict[str, Copier] = {
        "calls": CallCopier(),
        "batch": BatchCopier(call),
        "split": SplitCopier(BatchCopier(call), CallCopier(), Limits(longest=2, least=2)),
    }
    copy = ways[kind].prepare(Haul(RUNS, pools.cpu, pools.gpu))
    for layer in range(pools.layers):
        assert not torch.equal(pools.gpu.view(torch.uint8)[layer], expected.gpu.view(torch.uint8)[layer])
        copy(layer)
        assert torch.equal(pools.gpu.view(torch.uint8)[layer], expected.gpu.view(torch.uint8)[layer])
    assert asked == {"calls": [], "batch": 2 * [(4, 1, 1)], "split": 2 * [(2, 1, 1)]}[kind], "a call a layer"


def test_the_drivers_structure_is_as_large_as_in_its_header() -> None:
    assert ctypes.sizeof(Attributes) == 24
    assert [getattr(Attributes, name).offset for name in ("source_order", "source", "target", "flags")] == [
        0,
        4,
        12,
        20,
    ]


def test_a_refused_batch_is_an_error_and_a_driver_without_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = memory(monkeypatch)
    pools = tensors()
    copy = BatchCopier(call).prepare(Haul([BlockRun(0, 1, 1), BlockRun(2, 3, 0)], pools.cpu, pools.gpu))
    with pytest.raises(RuntimeError, match="error 1 in copy 1 of 2"):
        copy(0)

    class Old:
        class cuGetProcAddress_v2:
            def __new__(cls, name: bytes, address: Any, version: int, flags: int, found: Any) -> Any:
                assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
                return 1

    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Old)
    with pytest.raises(EngineMissing, match="was the first"):
        BatchCopier()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: object())
    with pytest.raises(EngineMissing, match="not found"):
        BatchCopier()


@pytest.mark.parametrize("blocks", [8, 9, 40, 1000])
@pytest.mark.parametrize("layer_block_bytes", [1024, 131072, 2**21])
def test_samples_fit_into_both_pools_and_scatter(blocks: int, layer_block_bytes: int) -> None:
    samples = samples_of(blocks, layer_block_bytes)
    assert samples[0].blocks == 1 and samples[0].runs == max(s.runs for s in samples)
    assert samples[0].runs == min(256, blocks // 2, 64 * 2**20 // layer_block_bytes)
    for sample in samples:
        assert sample.runs * sample.blocks * layer_block_bytes <= 64 * 2**20
        runs = scattered(sample)
        assert max(max(run.src, run.dst) + run.blocks for run in runs) <= blocks
        assert len({run.dst for run in runs}) == sample.runs
        for before, after in pairwise(runs):
            assert after.src > before.src + before.blocks
    assert samples_of(7, layer_block_bytes) == []


SAMPLES = [Sample(256, 1), Sample(4, 1), Sample(16, 1), Sample(64, 1), Sample(128, 2), Sample(64, 4), Sample(32, 8)]


def times(**seconds: float) -> dict[Sample, Took]:
    """What each sample took, named runs_blocks; half a second where it is not named."""
    return {s: Took(0.25, seconds.get(f"t{s.runs}_{s.blocks}", 0.5) - 0.25) for s in SAMPLES}


def test_the_kernel_copies_as_short_and_as_many_runs_as_it_was_seen_to_win_at() -> None:
    slow = times(t256_1=2.0, t64_1=2.0, t16_1=0.54, t4_1=3.0, t128_2=1.0, t64_4=0.56, t32_8=0.549)
    assert limits_of(slow, times(), SAMPLES) == Limits(longest=4, least=64), "ten per cent is too little"
    assert limits_of(times(t64_1=9.0, t128_2=9.0), times(), SAMPLES) == Limits(), "not at the largest sample: nowhere"
    assert limits_of(times(t256_1=0.6), times(), SAMPLES) == Limits(longest=1, least=256)


def decided(
    way: CopyWay, cost: dict[str, float], kernel: Copier | None, engines: list[Copier] | None = None
) -> tuple[Copying, KvTensors]:
    pools = tensors()

    def stopwatch(copier: Copier, haul: Haul) -> Took:
        copier.prepare(haul)(0)
        return Took(1e-6 * len(haul.runs), cost[copier.name] * sum(run.blocks for run in haul.runs))

    engines = engines or [Named("calls"), Named("batch")]
    return decide_copying(pools, way, engines, kernel, "" if kernel else "no triton", stopwatch), pools


def test_the_fastest_engine_is_chosen_unless_the_kernel_is_clearly_faster() -> None:
    kernel = Named("kernel")
    slow, pools = decided("auto", {"calls": 3e-6, "batch": 2e-6, "kernel": 1.8e-6}, kernel)
    assert (slow.inward.name, slow.outward.name) == ("batch", "batch"), "1.07 times is not enough"
    assert slow.note == "in: batch; out: batch"
    fast, pools = decided("auto", {"calls": 3e-6, "batch": 2e-6, "kernel": 1e-6}, kernel)
    assert isinstance(fast.inward, SplitCopier) and isinstance(fast.outward, SplitCopier)
    assert fast.inward.limits == Limits(longest=16, least=4)
    assert fast.inward.name == "kernel for runs of up to 16 blocks where there are 4 or more, else batch"
    figure = fast.figures[f"in, kernel, 24 x {pools.layer_block_bytes / 1024:g} KiB"]
    assert figure["gb_s"] == pytest.approx(pools.layer_block_bytes / 1e-6 / 1e9)
    assert figure["host_us"] == pytest.approx(1.0) and figure["compute_lost_us"] == 0.0
    assert not pools.cpu.any() and not pools.gpu.any(), "nothing that was measured with stays behind"


def test_what_is_asked_for_is_done() -> None:
    cost = {"calls": 3e-6, "batch": 2e-6, "kernel": 1e-6}
    copying, _ = decided("dma", cost, Named("kernel"))
    assert copying.inward.name == copying.outward.name == "batch"
    slow = {**cost, "kernel": 9e-6}
    copying, pools = decided("kernel", slow, kernel := Named("kernel"))
    kernel.hauls.clear()
    copying.inward.prepare(Haul([BlockRun(0, 0, BLOCKS)], pools.cpu, pools.gpu))
    assert kernel.hauls == [[BlockRun(0, 0, BLOCKS)]], "even one run of all blocks"
    copying, _ = decided("auto", cost, None)
    assert copying.note == "in: batch; out: batch; no kernel: no triton"


def misplaced(haul: Haul) -> Haul:
    return Haul(
        [BlockRun(run.src, run.dst + 1, run.blocks) for run in haul.runs[:-1]] + haul.runs[-1:],
        haul.source,
        haul.target,
    )


def broken(haul: Haul) -> Haul:
    raise ValueError("no such\ninstruction")


def test_a_way_that_copies_wrongly_or_not_at_all_is_left_out() -> None:
    cost = {"calls": 3e-6, "batch": 2e-6, "kernel": 1e-6}
    copying, _ = decided("auto", cost, Named("kernel", broken), [Named("calls"), Named("batch", misplaced)])
    assert copying.inward.name == copying.outward.name == "calls"
    assert copying.note.startswith("in: calls (not batch: it copied wrongly) (not kernel: ValueError: no such);")
    assert not any("kernel" in name or "batch" in name for name in copying.figures)
    with pytest.raises(EngineMissing, match=r"hardware\.copies=kernel: ValueError: no such"):
        decided("kernel", cost, Named("kernel", broken))
    with pytest.raises(HardwareMissing, match="fail on this machine"):
        decided("auto", cost, None, [Named("calls", misplaced)])


def test_few_or_long_runs_go_by_dma() -> None:
    dma, kernel, pools = Named("dma"), Named("kernel"), tensors()
    copier = SplitCopier(dma, kernel, Limits(longest=2, least=2))
    copier.prepare(Haul(RUNS, pools.cpu, pools.gpu))
    assert (kernel.hauls, dma.hauls) == ([RUNS[:2]], [RUNS[2:]])
    copier.prepare(Haul(RUNS[1:], pools.cpu, pools.gpu))
    assert (len(kernel.hauls), dma.hauls[1:]) == (1, [RUNS[1:]]), "one short run is not worth a launch"
    copier.prepare(Haul(RUNS[:2], pools.cpu, pools.gpu))
    assert (kernel.hauls[1:], len(dma.hauls)) == ([RUNS[:2]], 2)


def test_the_stopwatch_copies_beside_compute_and_counts_what_each_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams and events that only count, on a device where a product takes 1 ms, and half as long again beside copies
    of 3 ms a layer; the host needs 0.4 s to prepare all four layers, and 0.6 s to copy two of them."""
    log: list[str] = []
    clock = iter((0.0, 0.4, 1.0, 1.6))
    state = SimpleNamespace(now_ms=0.0, copied=0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_ms: float | None = None

        def record(self, on: Any) -> None:
            log.append(f"{on.name} times")
            self.on, self.at_ms = on, on.ends_ms

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            slowed = 1.5 if state.copied and self.on is compute else 1.0
            assert self.at_ms is not None and other.at_ms is not None
            return (other.at_ms - self.at_ms) * slowed

    lane, compute = (SimpleNamespace(name=name, ends_ms=0.0) for name in ("lane", "compute"))

    def multiply(left: Any, right: Any, out: Any) -> None:
        compute.ends_ms += 1.0

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: lane)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda on: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(copying_module, "perf_counter", lambda: next(clock))

    class Written:
        name = "written down"

        def prepare(self, haul: Haul) -> Callable[[int], None]:
            log.append("prepares")
            return self.copy

        def copy(self, layer: int) -> None:
            log.append(f"copies {layer}")
            lane.ends_ms += 3.0
            state.copied += 1

    stopwatch = copying_module._CudaStopwatch(torch.device("cpu"), torch.float32)
    log.clear()
    pool = torch.zeros(4, 8, 1, 1, 1, 4)
    took = stopwatch(Written(), Haul([BlockRun(0, 0, 1)], pool, pool))
    assert log == ["prepares", *2 * ["compute times"], "lane times", "copies 0", "copies 1", "lane times"]
    assert took.host_s == pytest.approx(0.4 / 4 + 0.6 / 2) and took.device_s == pytest.approx(3e-3)
    # Four products are more than 2.5 ms; they took 2 ms longer, and all of the 6 ms of copies were beside them.
    assert took.lost_s == pytest.approx(2e-3 / 2)
    assert took.seconds == pytest.approx(0.4 + 3e-3 + 1e-3)
