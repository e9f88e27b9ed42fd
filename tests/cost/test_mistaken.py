"""A cost model that is wrong changes decisions, and nothing that a machine takes."""

from __future__ import annotations

import pytest

from pensieve.sim.cost import MistakenCost
from pensieve.sim.roofline import Roofline
from tests.composed import replayed
from tests.simulated import MACHINE, MODEL

TRUE = Roofline(MODEL, MACHINE, 4)
PRESSED = (
    "cache.gpu=1024 tokens",
    "cache.cpu=2048 tokens",
    "workload.pressure=0",
    "workload.conversations=8",
    "workload.max_turns=4",
    "workload.min_turns=4",
)


def test_computing_is_priced_wrong_and_loading_right() -> None:
    wrong = MistakenCost(TRUE, compute=3.0, context=1.0, chunk_tokens=4)
    for context in (4, 40, 4000):
        assert wrong.recompute_s(context) == pytest.approx(3 * TRUE.recompute_s(context))
    assert (wrong.step_s(), wrong.weights_s()) == (3 * TRUE.step_s(), 3 * TRUE.weights_s())
    assert wrong.load_s() == TRUE.load_s()
    assert wrong.describe()["mistaken"] == {"compute": 3.0, "context": 1.0}


def test_without_what_grows_with_context_all_chunks_cost_what_the_first_does() -> None:
    flat = MistakenCost(TRUE, compute=1.0, context=0.0, chunk_tokens=4)
    assert flat.recompute_s(4000) == TRUE.recompute_s(4) < TRUE.recompute_s(4000)


def times(*overrides: str) -> list[tuple[str, int, float, float, int | None]]:
    record, _ = replayed(*PRESSED, *overrides)
    assert any(turn.cpu_hit_tokens for turn in record.turns) and any(turn.recomputed_tokens for turn in record.turns)
    return [
        (turn.session, turn.turn, turn.first_token_s or 0.0, turn.finished_s or 0.0, turn.cpu_recomputed_tokens)
        for turn in record.turns
    ]


def test_where_no_decision_weighs_computing_against_loading_a_factor_changes_no_time() -> None:
    """The machine is the same, and so is the order of retention values: who is evicted hangs on ratios of prices."""
    plain = ("scheduler.load_apart=false", "baseline.cache.restore=load")
    assert times(*plain, "scheduler.cost_error=7.0") == times(*plain)


def test_what_is_recorded_goes_by_the_true_prices() -> None:
    """Of the same trial, decided the same way: seconds recomputed and saved are no decision."""
    plain = ("scheduler.load_apart=false", "baseline.cache.restore=load")
    found = []
    for error in ("1.0", "7.0"):
        record, system = replayed(*PRESSED, *plain, f"scheduler.cost_error={error}")
        seconds = [(turn.recomputed_s, turn.saved_s) for turn in record.turns]
        found.append((seconds, system.cost.recompute_s(512)))
    assert found[0] == found[1]
    assert any(recomputed for recomputed, _ in found[0][0])


def test_a_hybrid_restore_computes_more_where_computing_looks_cheap() -> None:
    hybrid = ("scheduler.load_apart=false", "baseline.cache.restore=hybrid", "hardware.h2d_bw=1e9")
    found = {
        error: sum(turn[4] or 0 for turn in times(*hybrid, f"scheduler.cost_error={error}"))
        for error in (0.01, 1.0, 100.0)
    }
    assert found[0.01] > found[100.0] and found[0.01] >= found[1.0] >= found[100.0]
