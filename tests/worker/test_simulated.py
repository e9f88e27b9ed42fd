"""The simulated worker: copies beside compute and beside each other, what follows an iteration, tokens that are drawn."""

from dataclasses import replace

import pytest

from pensieve.core.plan import Decodes, Moved, Row, Sample, StepPlan
from pensieve.serve.systems.profiling import swap_in
from pensieve.sim.roofline import Roofline
from pensieve.sim.worker import SimulatedWorker, VirtualClock, drawn_token, drawn_tokens
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
