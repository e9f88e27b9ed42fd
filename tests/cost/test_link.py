"""What a copy between the tiers takes, by the pieces it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.core.plan import StepPlan
from pensieve.serve.systems.profiling import swap_in
from pensieve.sim.roofline import Roofline
from tests.simulated import MACHINE, MODEL
from tests.worker.test_simulated import perform, started

ENGINES_S = 5.9e-6


def test_pieces_of_32_kib_come_at_five_gb_a_second_and_large_ones_at_the_links_rate() -> None:
    """What was published for an H100, from which the 5.9 us are."""
    machine = replace(MACHINE, h2d_bw=48e9, fragment_s=ENGINES_S)
    rates = {}
    for size in (32 * 1024, 32 * 1024 * 1024):
        model = replace(MODEL, layers=1, kv_heads=1, head_dim=1)
        tokens = size // model.kv_bytes_per_token
        rates[size] = size / Roofline(model, machine, tokens).transfer_s(1, to_gpu=True)
    assert rates[32 * 1024] == pytest.approx(5e9, rel=0.01)
    assert rates[32 * 1024 * 1024] == pytest.approx(48e9, rel=0.01)


@pytest.mark.parametrize(("scattered", "pieces"), [(False, 1), (True, 4)])
def test_neighbours_in_both_tiers_are_one_piece(scattered: bool, pieces: int) -> None:
    worker, clock = started(fragment_s=1e-3)
    blocks = (0, 2, 4, 6) if scattered else (0, 1, 2, 3)
    perform(worker, StepPlan(0, moves=(swap_in(1, blocks, (4, 5, 6, 7)),)))
    worker.collect(None)
    alone = worker.cost.transfer_s(4, to_gpu=True) - MODEL.layers * 1e-3
    assert clock.now_s() == pytest.approx(alone + pieces * MODEL.layers * 1e-3, rel=1e-6)


@pytest.mark.parametrize("run_blocks", [1.0, 1.5])
def test_a_load_is_priced_by_single_blocks_which_is_too_long_by_no_more_than_its_runs_are(run_blocks: float) -> None:
    """Runs of 1.0 to 1.5 blocks were measured."""
    cost = Roofline(MODEL, replace(MACHINE, fragment_s=ENGINES_S), 32)
    taken = cost.transfer_s(24, to_gpu=True, runs=int(24 / run_blocks))
    assert taken <= 24 * cost.load_s() * (1 + 1e-12) <= run_blocks * taken * (1 + 1e-12)
