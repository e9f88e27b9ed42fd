"""The simulated worker: copies beside compute and beside each other, what follows an iteration, tokens that are drawn."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pensieve.core.plan import Decodes, Moved, Row, Sample, StepPlan
from pensieve.serve.systems.profiling import swap_in, swap_out
from pensieve.sim.roofline import Roofline
from pensieve.sim.worker import DuplexLink, SimulatedWorker, VirtualClock, drawn_token, drawn_tokens
from tests.simulated import MACHINE, MODEL

ROW = Row(0, ((0, 40),), tuple(range(40)), Sample(40, key=9))
TABLE = ((0, 0, tuple(range(10))),)


def started(**changes):
    clock = VirtualClock()
    worker = SimulatedWorker(MODEL, replace(MACHINE, **changes), clock, 4)
    worker.start(16, 16)
    return worker, clock


def perform(worker, plan):
    worker.launch(plan)
    result = worker.collect(None)
    assert result is not None
    return result


@pytest.mark.parametrize("machine", [{}, {"pipelined_swap_in": False}, {"overlaps": False}], ids=str)
def test_a_swap_in_is_pipelined_by_layer_with_compute_where_the_machine_can(machine):
    worker, clock = started(h2d_bw=1e6, **machine)
    compute = worker.cost.iteration_s([(0, 40)], 1)
    transfer = worker.cost.transfer_s(4, to_gpu=True)
    result = perform(worker, StepPlan(0, (ROW,), TABLE, moves=(swap_in(1, (0, 1, 2, 3), (4, 5, 6, 7)),)))
    expected = compute + transfer
    if not machine:
        expected = max(transfer / MODEL.layers + compute, transfer + compute / MODEL.layers)
        assert max(compute, transfer) < expected < compute + transfer
    assert clock.now_s() == pytest.approx(expected, rel=1e-6)
    assert (result.moved, result.stall_ns) == ((Moved(1),), pytest.approx((expected - compute) * 1e9, rel=1e-6))


def test_swap_out_waits_for_swap_in_unless_urgent_and_is_reported_when_it_ends():
    ends = {}
    for urgent in (False, True):
        worker, clock = started(h2d_bw=1e6, d2h_bw=1e5)
        plan = StepPlan(0, (ROW,), TABLE, moves=(swap_in(1, (0,), (9,)), swap_out(2, (2,), (3,), urgent)))
        assert Moved(2) not in perform(worker, plan).moved
        assert worker.collect(clock.now_ns()) is None, "not before its time"
        late = worker.collect(None)
        assert (late.step, late.moved) == (None, (Moved(2),))
        ends[urgent] = clock.now_s()
    assert ends[True] < ends[False]


def test_a_row_waits_only_for_the_loads_below_its_positions():
    """A restore: chunks 0 to 3 are computed again while chunks 4 to 7 load; the plan above them waits."""
    worker, clock = started(h2d_bw=3e5)
    leading, rest = Row(0, ((0, 16),), tuple(range(16))), Row(0, ((32, 40),), tuple(range(8)), Sample(40))
    transfer = worker.cost.transfer_s(4, to_gpu=True)
    first = perform(worker, StepPlan(0, (leading,), TABLE, moves=(swap_in(1, (0, 1, 2, 3), (4, 5, 6, 7)),)))
    assert (first.stall_ns, first.moved) == (0, ())
    alone = clock.now_s()
    assert alone == pytest.approx(worker.cost.iteration_s([(0, 16)], 0), rel=1e-6) and alone < transfer / 4
    second = perform(worker, StepPlan(1, (rest,)))
    assert second.moved == (Moved(1),)
    compute = worker.cost.iteration_s([(32, 40)], 1)
    assert clock.now_s() == pytest.approx(transfer + compute / MODEL.layers, rel=1e-5)
    assert perform(worker, StepPlan(2, (rest,))).stall_ns == 0


@pytest.mark.parametrize(("scattered", "pieces"), [(False, 1), (True, 4)])
def test_neighbours_in_both_tiers_are_one_piece(scattered, pieces):
    worker, clock = started(fragment_s=1e-3)
    blocks = (0, 2, 4, 6) if scattered else (0, 1, 2, 3)
    perform(worker, StepPlan(0, moves=(swap_in(1, blocks, (4, 5, 6, 7)),)))
    worker.collect(None)
    alone = worker.cost.transfer_s(4, to_gpu=True) - MODEL.layers * 1e-3
    assert clock.now_s() == pytest.approx(alone + pieces * MODEL.layers * 1e-3, rel=1e-6)


def by_the_nanosecond(asked, penalty):
    """When each copy is done. What waits for the loads waits for those that were asked for by then."""
    left = [float(work) for _, _, work, _ in asked]
    ends, now = [0] * len(asked), 0
    while any(one > 0 for one in left):
        heads = []
        for way in ("in", "out"):
            queue = [i for i, (own, at, _, _) in enumerate(asked) if own == way and left[i] > 0 and at <= now]
            if queue:
                waits = way == "out" and asked[queue[0]][3]
                if not (waits and any(asked[i][0] == "in" and left[i] > 0 for i in range(queue[0]))):
                    heads.append(queue[0])
        for head in heads:
            left[head] -= 1 - penalty if len(heads) == 2 else 1
            if left[head] <= 1e-9:
                left[head], ends[head] = 0.0, now + 1
        now += 1
    return ends


@pytest.mark.parametrize("penalty", [0.0, 0.2, 0.5])
def test_random_copies_end_when_a_second_computation_says(penalty):
    """asked: way, when, what it takes alone, after the loads."""
    for seed in range(60):
        rng, link = random.Random(seed), DuplexLink(penalty)
        at, asked, ends = 0, [], []
        for number in range(rng.randint(1, 8)):
            at += rng.choice([0, 0, rng.randint(1, 300)])
            way, _, work, after = one = (rng.choice(["in", "out"]), at, rng.randint(1, 200), rng.random() < 0.5)
            asked.append(one)
            if way == "in":
                ends.append(link.copy_in((number,), frozenset({1}), work, at))
            else:
                ends.append(link.copy_out((number,), 1, work, at, after_loads=after))
        expected = by_the_nanosecond(asked, penalty)
        assert [one.ends_ns for one in ends] == pytest.approx(expected, abs=2 * len(asked)), (seed, asked)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("gpus", [1, 4])
def test_the_iterations_that_follow_cost_what_each_alone_would(window, gpus):
    model = replace(MODEL, sliding_window=window)
    cost = Roofline(model, replace(MACHINE, gpus=gpus, link_bw=1e9), 4)
    rows, beside = [(47, 48), (20, 33)], Decodes(2, 10 + 300, 300)
    following = cost.following_s(rows, 4, beside, 399)
    if window is not None:
        assert following is None, "each length counts"
        return
    for further, seconds in enumerate(following, start=1):
        alone = [(start + further * (stop - start), stop + further * (stop - start)) for start, stop in rows]
        decodes = [(10 + further, 11 + further), (300 + further, 301 + further)]
        assert (
            seconds
            == cost.iteration_s([*decodes, *alone], 4)
            == cost.iteration_s(alone, 4, Decodes(2, 310 + 2 * further, 300 + further))
        )


def test_tokens_drawn_at_once_are_those_drawn_one_by_one():
    for key in (0, 1, (1 << 63) - 1, 0x9E3779B97F4A7C15 >> 1):
        one_by_one = [drawn_token(key, at, MODEL.vocab) for at in range(3, 203)]
        assert list(drawn_tokens(key, 3, 200, MODEL.vocab)) == one_by_one
        assert len(set(one_by_one)) > 40
