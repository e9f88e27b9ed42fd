"""Copies that take their time: what waits for what, and what becomes of a copy that fails. Each way of copying on a GPU
brings every byte, one layer a call; which of them serves."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers import cuda_link
from pensieve.device.transfers.cuda_link import BATCH_CALL, Attributes, BatchCopier, CallCopier, choose_copier
from pensieve.device.transfers.transfer import BlockRun, Haul, Transfer, merge_moves
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

    def make(**changes):
        tensors, gate = pools(), Gate(**changes)
        gate.watch(tensors)
        transfer = Transfer(tensors, ThreadLink(copy=gate))
        opened.append((transfer, gate))
        return transfer, tensors, gate

    yield make
    for transfer, gate in opened:
        gate.let(1000)
        transfer.close()


def until(true):
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit, "it never came"
        time.sleep(1e-4)


def test_rows_that_attend_to_none_of_the_loaded_blocks_do_not_wait(gated):
    transfer, _, gate = gated()
    transfer.swap_in([swap_in(1, (0, 1), (4, 5))])
    transfer.swap_in([swap_in(2, (2,), (6,))])
    assert not transfer.require(np.array([0, 1, 2, -1]))
    transfer.wait_for_layer(1)  # would hang
    assert transfer.require(np.array([0, 1, 5]))
    gate.let(LAYERS)
    transfer.wait_for_layer(1)
    until(lambda: transfer.moved() == (Moved(1),))
    assert transfer.require(np.array([4, 5, 6])), "the second plan's load is still under way"
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
    assert not transfer.require(np.array([0, 1]))
    with pytest.raises(RuntimeError, match="in1 is broken"):
        transfer.require(np.array([0, 4]))
    assert sorted(transfer.moved()) == [Moved(1, ok=False), Moved(2)]
    assert (tensors.cpu[:, 9] == 3.0).all()
    assert not transfer.require(np.array([0, 4])), "it was reported; the blocks are somebody else's"
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
    tensors = pools(24)
    transfer = Transfer(tensors, link and link(2e6 if link is Hasty else 2e8))
    if link is Hasty:
        with pytest.raises(AssertionError, match="read before its load had come"):
            shuttle(tensors, transfer, lambda: None, rounds=3)
    else:
        shuttle(tensors, transfer, lambda: None, rounds=3)
    transfer.close()


# -- the ways of a GPU -------------------------------------------------------------------------------------------------------

RUNS = [BlockRun(1, 9, 2), BlockRun(4, 0, 1), BlockRun(6, 2, 3), BlockRun(20, 30, 8)]


def memory(monkeypatch, misses=0):
    """A driver's batched copy for RAM, by the signature that cuda.h has, and what it was asked for. misses: bytes that it
    leaves out of each copy."""
    asked = []
    stream = SimpleNamespace(query=lambda: True, cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def perform(targets, sources, sizes, count, attributes, first, known, refused, on):
        assert (known, first[0], on) == (1, 0, 77)
        asked.append((count, attributes[0].source_order, attributes[0].flags))
        words = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)]
        for target, source, size in zip(*words, strict=True):
            if not size:
                refused[0] = 1
                return 1
            ctypes.memmove(target, source, size - misses)
        return 0

    return BATCH_CALL(perform), asked


@pytest.mark.parametrize("kind", ["calls", "batch"])
def test_every_way_brings_every_byte_layer_by_layer(kind, monkeypatch):
    tensors, expected = pools(48), pools(48)
    for pool in (tensors.cpu, tensors.gpu):
        noise = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8)
        pool.view(-1).view(torch.uint8).copy_(noise)  # NaN patterns included
    got, wanted, source = (pool.view(torch.uint8) for pool in (tensors.gpu, expected.gpu, tensors.cpu))
    wanted.copy_(got)
    for run in RUNS:
        wanted[:, run.dst : run.dst + run.blocks] = source[:, run.src : run.src + run.blocks]
    call, asked = memory(monkeypatch)
    copy = {"calls": CallCopier(), "batch": BatchCopier(call)}[kind].prepare(Haul(RUNS, tensors.cpu, tensors.gpu))
    for layer in range(tensors.layers):
        assert not torch.equal(got[layer], wanted[layer])
        copy(layer)
        assert torch.equal(got[layer], wanted[layer])
    assert asked == {"calls": [], "batch": 2 * [(4, 1, 1)]}[kind], "a call a layer"


def test_the_drivers_structure_is_as_large_as_in_its_header():
    offsets = [getattr(Attributes, name).offset for name in ("source_order", "source", "target", "flags")]
    assert (offsets, ctypes.sizeof(Attributes)) == ([0, 4, 12, 20], 24)


def test_the_batched_copy_serves_where_it_is_there_and_brings_every_byte(monkeypatch):
    for misses, name, note in (
        (0, "a call a layer", "a call a layer"),
        (1, "a call a run", "a call a run; Not a call a layer: it copied wrongly"),
    ):
        call, _ = memory(monkeypatch, misses)
        monkeypatch.setattr(cuda_link, "find_batch_call", lambda call=call: call)
        tensors = pools(48)
        copier, said = choose_copier(tensors)
        assert (copier.name, said) == (name, note)
        assert not tensors.cpu.any() and not tensors.gpu.any(), "nothing of the check stays behind"
        copy = BatchCopier(call).prepare(Haul([BlockRun(0, 1, 1), BlockRun(2, 3, 0)], tensors.cpu, tensors.gpu))
        with pytest.raises(RuntimeError, match="error 1 in copy 1 of 2"):
            copy(0)
    monkeypatch.undo()
    monkeypatch.setattr(cuda_link.ctypes, "CDLL", lambda name: object())
    assert choose_copier(pools(48))[1].startswith("a call a run; No batched copies: the CUDA driver")
