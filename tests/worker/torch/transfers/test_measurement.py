"""What ways of copying are measured with, and what the stopwatch counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pensieve.worker.block_runs import BlockRun
from pensieve.worker.torch.transfers import measurement
from pensieve.worker.torch.transfers.link import Haul
from pensieve.worker.torch.transfers.measurement import CudaStopwatch, samples_of, scattered


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
    monkeypatch.setattr(measurement, "perf_counter", lambda: next(clock))

    class Written:
        name = "written down"

        def prepare(self, haul: Haul) -> Callable[[int], None]:
            log.append("prepares")
            return self.copy

        def copy(self, layer: int) -> None:
            log.append(f"copies {layer}")
            lane.ends_ms += 3.0
            state.copied += 1

    stopwatch = CudaStopwatch(torch.device("cpu"), torch.float32)
    log.clear()
    pool = torch.zeros(4, 8, 1, 1, 1, 4)
    took = stopwatch(Written(), Haul([BlockRun(0, 0, 1)], pool, pool))
    assert log == ["prepares", *2 * ["compute times"], "lane times", "copies 0", "copies 1", "lane times"]
    assert took.host_s == pytest.approx(0.4 / 4 + 0.6 / 2) and took.device_s == pytest.approx(3e-3)
    # Four products are more than 2.5 ms; they took 2 ms longer, and all of the 6 ms of copies were beside them.
    assert took.lost_s == pytest.approx(2e-3 / 2)
    assert took.seconds == pytest.approx(0.4 + 3e-3 + 1e-3)
