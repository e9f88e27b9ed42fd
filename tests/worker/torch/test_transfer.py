"""Copies that take their time: what waits for what, and what becomes of a copy that fails."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import BlockRun, Transfer, merge_moves
from pensieve.serve.systems.profiling import swap_in, swap_out
from tests.gpu.shuttle import shuttle
from tests.thread_link import ThreadLink, copy_runs

from .driver import Hand, tiny_model, tiny_spec

LAYERS, BLOCKS = 2, 16


@dataclass
class Gate:
    """Lets copies through one by one, and writes down in which order they were made."""

    passes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    made: list[str] = field(default_factory=list)
    fails: Callable[[str], bool] = lambda name: False
    names: dict[int, str] = field(default_factory=dict)

    def watch(self, tensors):
        for layer in range(LAYERS):
            self.names[tensors.gpu[layer].data_ptr()] = f"in{layer}"
            self.names[tensors.cpu[layer].data_ptr()] = f"out{layer}"

    def __call__(self, piece):
        name = self.names[piece.target.data_ptr()]
        if not self.passes.acquire(timeout=10):
            raise TimeoutError("nobody let this copy through")
        self.made.append(name)
        if self.fails(name):
            raise OSError(f"{name} is broken")
        copy_runs(piece)

    def let(self, count):
        self.passes.release(count)


def pools(blocks=BLOCKS):
    return KvTensors(tiny_spec("llama"), 4, blocks, blocks, torch.device("cpu"), torch.float32)


@pytest.fixture
def gated():
    """Makes a transfer over a link whose copies wait at a gate, which is open at the end."""
    opened = []

    def make(bytes_per_s=None, **changes):
        tensors, gate = pools(), Gate(**changes)
        gate.watch(tensors)
        transfer = Transfer(tensors, ThreadLink(bytes_per_s, gate))
        opened.append((transfer, gate))
        return transfer, tensors, gate

    yield make
    for transfer, gate in opened:
        gate.let(1000)
        transfer.close()


def rows(*blocks):
    return np.array(blocks)


def until(true):
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit, "it never came"
        time.sleep(1e-4)


def test_rows_that_attend_to_none_of_the_loaded_blocks_do_not_wait(gated):
    transfer, _, gate = gated()
    transfer.swap_in([swap_in(1, (0, 1), (4, 5))])
    transfer.swap_in([swap_in(2, (2,), (6,))])
    assert not transfer.require(rows(0, 1, 2, -1))
    transfer.wait_for_layer(1)  # would hang
    assert transfer.require(rows(0, 1, 5))
    gate.let(LAYERS)
    transfer.wait_for_layer(1)
    until(lambda: transfer.moved() == (Moved(1),))
    assert transfer.require(rows(4, 5, 6)), "the second plan's load is still under way"
    gate.let(LAYERS)
    transfer.wait_for_layer(1)
    assert transfer.wait() and transfer.moved() == (Moved(2),)
    assert not transfer.wait(), "nothing is under way"


@pytest.mark.parametrize("urgent", [False, True])
def test_swap_outs_wait_for_loads_unless_urgent(urgent, gated):
    transfer, _, gate = gated()
    transfer.swap_in([swap_in(1, (0,), (4,))])
    until(lambda: transfer._link.lanes[True]._orders.empty())  # the load is at the gate
    transfer.swap_out([swap_out(2, (8,), (9,), urgent)])
    if urgent:
        until(lambda: transfer._link.lanes[False]._orders.empty())
        gate.let(2 * LAYERS)
        transfer.finish()
        assert sorted(gate.made) == ["in0", "in1", "out0", "out1"]
    else:
        gate.let(LAYERS)
        until(lambda: transfer.moved() == (Moved(1),))
        assert gate.made == ["in0", "in1"]
        gate.let(LAYERS)
        assert transfer.wait() and transfer.moved() == (Moved(2),)
        assert gate.made == ["in0", "in1", "out0", "out1"]


def test_a_failed_load_fails_whoever_needs_it_and_nobody_else(gated):
    transfer, tensors, gate = gated(fails=lambda name: name == "in1")
    gate.let(100)
    tensors.gpu[:, 8] = 3.0
    transfer.swap_in([swap_in(1, (0,), (4,))])
    transfer.swap_out([swap_out(2, (8,), (9,))])
    assert transfer._required is not None
    transfer.wait_for_layer(0)
    with pytest.raises(RuntimeError, match="in1 is broken"):
        transfer.wait_for_layer(1)
    transfer.finish()
    assert not transfer.require(rows(0, 1))
    with pytest.raises(RuntimeError, match="in1 is broken"):
        transfer.require(rows(0, 4))
    assert sorted(transfer.moved()) == [Moved(1, ok=False), Moved(2)]
    assert (tensors.cpu[:, 9] == 3.0).all()
    assert not transfer.require(rows(0, 4)), "it was reported; the blocks are somebody else's"
    gate.fails = lambda name: False
    transfer.swap_in([swap_in(3, (0,), (4,))])
    transfer.wait_for_layer(1)
    assert transfer.moved() == (Moved(3),)


def test_abandoned_tickets_are_never_reported(gated):
    transfer, _, gate = gated(fails=lambda name: name == "out0")
    gate.let(100)
    transfer.swap_in([swap_in(1, (0,), (4,))])
    transfer.swap_in([swap_in(2, (1,), (5,))])
    transfer.swap_out([swap_out(3, (8,), (9,))])
    transfer.abandon([2, 3])
    assert transfer.moved() == (Moved(1),)


def test_a_step_goes_on_beside_loads_it_does_not_need_and_reports_them_later():
    gate = Gate()
    hand = Hand(tiny_model("llama"), link=ThreadLink(copy=gate))
    worker = hand.worker
    gate.watch(worker.tensors)
    hand.prompt(tokens=12)
    result = hand.step(hand.decode(12), moves=(swap_in(7, (0,), (30,)),))
    assert (result.error, result.moved) == (None, ())
    gate.let(LAYERS)
    late = worker.collect(None)
    assert late is not None and (late.step, late.moved) == (None, (Moved(7),))
    assert worker.collect(None) is None
    gate.fails = lambda name: True
    gate.let(LAYERS)
    results = [hand.perform(moves=(swap_out(8, (0,), (1,)),)), worker.collect(None)]
    assert [r.moved for r in results if r is not None and r.moved] == [(Moved(8, ok=False),)]
    worker.close()


def test_adjacent_blocks_merge_whatever_their_order_and_ticket_and_are_counted():
    moves = [swap_in(1, (7, 5), (3, 1)), swap_in(2, (6, 9, 10), (2, 4, 6))]
    assert merge_moves(moves) == [BlockRun(5, 1, 3), BlockRun(9, 4, 1), BlockRun(10, 6, 1)]
    transfer = Transfer(pools())
    assert transfer.swap_out([]) == 0
    transfer.swap_out([swap_out(1, (0, 1, 2, 9), (4, 5, 6, 7))])  # runs of 3 and 1, in each of 2 layers
    transfer.swap_in([swap_in(2, (4,), (12,))])
    layer_block = 4 * 2 * 2 * 16 * 4  # tokens, K and V, KV heads, head_dim, bytes
    assert (transfer.d2h_bytes, transfer.h2d_bytes) == (4 * 2 * layer_block, 2 * layer_block)


class Hasty(ThreadLink):
    """Marks are reached too early."""

    def hold_compute(self, mark):
        return


@pytest.mark.parametrize("link", [None, ThreadLink, Hasty])
def test_blocks_survive_and_a_copy_that_overtakes_is_found(link):
    tensors = KvTensors(tiny_spec("llama"), 4, 24, 24, torch.device("cpu"), torch.float32)
    transfer = Transfer(tensors, link and link(2e6 if link is Hasty else 2e8))
    if link is Hasty:
        with pytest.raises(AssertionError, match="read before its load had come"):
            shuttle(tensors, transfer, lambda: None, rounds=3)
    else:
        shuttle(tensors, transfer, lambda: None, rounds=3)
    transfer.close()
