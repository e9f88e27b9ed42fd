"""What one model of time makes of another: the load that saturates a machine, and a model that is wrong on purpose."""

from __future__ import annotations

import pytest

from pensieve.lab.compose.build import Batches, stateless_capacity
from pensieve.serve.systems.engine_system import MistakenCost
from pensieve.sim.roofline import Roofline
from tests.composed import replayed
from tests.simulated import MACHINE, MODEL

TRUE = Roofline(MODEL, MACHINE, 4)
PRESSED = (
    "cache.gpu=1024 tokens", "cache.cpu=2048 tokens", "workload.pressure=0", "workload.conversations=8",
    "workload.max_turns=4", "workload.min_turns=4", "scheduler.load_apart=false",
)  # fmt: skip


class Cost:
    """An iteration takes a millisecond for each position that it computes, and 10 ms."""

    def iteration_s(self, runs, sampled):
        return 0.01 + 0.001 * sum(stop - start for start, stop in runs)


HELD = (10 * (10 + 5) + 100 * (10 + 50)) / 110
"""The long reply holds its KV ten times as long: (1 x 15 + 10 x 60) tokens x iterations over 11 iterations."""


@pytest.mark.parametrize(
    ("lengths", "bounds", "expected"),
    [
        ([(90, 10)], {"kv_tokens": 950}, 1 / 0.11),  # 10 of 90 + 10 / 2 tokens fit; 10 decodes, 90 positions, one ends
        ([(90, 10)] * 7, {"kv_tokens": 950}, 1 / 0.11),  # means, however many they are of
        ([(90, 10)], {"requests": 10}, 1 / 0.11),
        ([(90, 10)], {"positions": 100}, 1 / 0.11),
        ([(9, 10)], {"requests": 10}, 1 / 0.029),  # history that need not be computed
        ([(10, 10), (10, 100)], {"kv_tokens": round(6 * HELD)}, 6 * 2 / 110 / (0.01 + 0.001 * (6 + round(6 * 20 / 110)))),
    ],
)  # fmt: skip
def test_what_bounds_the_batch_bounds_the_capacity(lengths, bounds, expected):
    batches = Batches(**{"kv_tokens": 10**6, "requests": 10**6, "positions": 10**6, **bounds})
    assert stateless_capacity(Cost(), lengths, batches) == pytest.approx(expected)


def test_computing_is_priced_wrong_and_loading_right():
    wrong, flat = MistakenCost(TRUE, 3.0, 1.0, 4), MistakenCost(TRUE, 1.0, 0.0, 4)
    for context in (4, 40, 4000):
        assert wrong.recompute_s(context) == pytest.approx(3 * TRUE.recompute_s(context))
        assert flat.recompute_s(context) == TRUE.recompute_s(4)
    assert (wrong.step_s(), wrong.weights_s()) == (3 * TRUE.step_s(), 3 * TRUE.weights_s())
    assert wrong.load_s() == TRUE.load_s()


def test_where_no_decision_weighs_computing_against_loading_a_factor_changes_no_time_and_no_record():
    """The machine is the same, and so is the order of retention values, which hangs on ratios of prices. Seconds recomputed
    and saved go by the true prices."""
    found = []
    for error in ("1.0", "7.0"):
        record, _ = replayed(*PRESSED, "baseline.cache.restore=load", f"scheduler.cost_error={error}")
        found.append([(t.session, t.first_token_s, t.finished_s, t.recomputed_s, t.saved_s) for t in record.turns])
    assert found[0] == found[1]
    assert any(t.cpu_hit_tokens for t in record.turns) and any(t.recomputed_s for t in record.turns)


def test_a_hybrid_restore_computes_more_where_computing_looks_cheap():
    cheap, right, dear = (
        sum(turn.cpu_recomputed_tokens or 0 for turn in replayed(*PRESSED, *hybrid)[0].turns)
        for hybrid in (
            ("baseline.cache.restore=hybrid", "hardware.h2d_bw=1e9", f"scheduler.cost_error={error}")
            for error in (0.01, 1.0, 100.0)
        )
    )
    assert cheap > dear and cheap >= right >= dear
