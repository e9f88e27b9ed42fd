"""Which way of copying is chosen, from which measurements."""

from __future__ import annotations

import pytest

from pensieve.errors import EngineMissing, HardwareMissing
from pensieve.worker.block_runs import BlockRun
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.transfers.choice import Copying, CopyWay, decide_copying, limits_of
from pensieve.worker.torch.transfers.copies import Limits, SplitCopier
from pensieve.worker.torch.transfers.link import Copier, Haul
from pensieve.worker.torch.transfers.measurement import Sample, Took
from tests.worker.torch.transfers.named import BLOCKS, Named, tensors

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
