"""Copies that take their time: what waits for what, and what becomes of a copy that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import Transfer
from pensieve.plugins.device import thread_link
from pensieve.plugins.device.thread_link import Piece, ThreadLink, copy_runs
from pensieve.serve.systems.profiling import swap_in, swap_out
from tests.worker.torch.driver import Driver, random_tokens, tiny_model, tiny_spec

LAYERS, BLOCKS = 2, 16


@dataclass
class Gate:
    """Lets copies through one by one, and writes down in which order they were made."""

    passes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    made: list[str] = field(default_factory=list)
    fails: Callable[[str], bool] = lambda name: False
    names: dict[int, str] = field(default_factory=dict)

    def __call__(self, piece: Piece) -> None:
        name = self.names[piece.target.data_ptr()]
        if not self.passes.acquire(timeout=10):
            raise TimeoutError("nobody let this copy through")
        self.made.append(name)
        if self.fails(name):
            raise OSError(f"{name} is broken")
        copy_runs(piece)

    def let(self, count: int) -> None:
        self.passes.release(count)


def gated(**changes: Any) -> tuple[Transfer, KvTensors, Gate]:
    tensors = KvTensors(tiny_spec("llama"), 4, BLOCKS, BLOCKS, torch.device("cpu"), torch.float32)
    gate = Gate(**changes)
    for layer in range(LAYERS):
        gate.names[tensors.gpu[layer].data_ptr()] = f"in{layer}"
        gate.names[tensors.cpu[layer].data_ptr()] = f"out{layer}"
    return Transfer(tensors, ThreadLink(copy=gate)), tensors, gate


def rows(*blocks: int) -> Any:
    return np.array(blocks)


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit, "it never came"
        time.sleep(1e-4)


@pytest.fixture
def open_at_the_end() -> Iterator[Callable[[Transfer, Gate], None]]:
    opened: list[tuple[Transfer, Gate]] = []
    yield lambda transfer, gate: opened.append((transfer, gate))
    for transfer, gate in opened:
        gate.let(1000)
        transfer.close()


def waits_of(monkeypatch: pytest.MonkeyPatch, *waits_ns: int) -> None:
    """Each hold_compute takes as long by its clock as it is given here, however long it really was."""
    now = iter([at for wait in waits_ns for at in (1000, 1000 + wait)])
    timer = SimpleNamespace(perf_counter=time.perf_counter, perf_counter_ns=lambda: next(now), sleep=time.sleep)
    monkeypatch.setattr(thread_link, "time", timer)


def test_a_layer_waits_for_its_own_load_only(open_at_the_end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_of(monkeypatch, 7, 50)
    transfer, tensors, gate = gated()
    open_at_the_end(transfer, gate)
    tensors.cpu[:, 3] = 7.0
    transfer.swap_in([swap_in(1, (3,), (5,))])
    assert transfer.require(rows(0, 5))
    gate.let(1)
    transfer.wait_for_layer(0)
    assert (tensors.gpu[0, 5] == 7.0).all() and not tensors.gpu[1, 5].any()
    assert transfer.moved() == ()
    threading.Timer(0.05, gate.let, [1]).start()
    transfer.wait_for_layer(1)
    assert (tensors.gpu[1, 5] == 7.0).all()
    assert transfer.stalled_ns() == 57
    assert transfer.moved() == (Moved(1),) and transfer.moved() == ()
    assert not transfer.require(rows(5)) and transfer.stalled_ns() == 0


def test_rows_that_attend_to_none_of_the_loaded_blocks_do_not_wait(open_at_the_end: Any) -> None:
    transfer, _, gate = gated()
    open_at_the_end(transfer, gate)
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


def test_without_require_a_forward_waits_for_all_loads(open_at_the_end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_of(monkeypatch, 30)
    transfer, tensors, gate = gated()
    tensors.cpu[:, 0] = 7.0
    open_at_the_end(transfer, gate)
    transfer.swap_in([swap_in(1, (0,), (4,))])
    transfer.swap_in([])
    threading.Timer(0.03, gate.let, [LAYERS]).start()
    transfer.wait_for_layer(LAYERS - 1)
    assert (tensors.gpu[:, 4] == 7.0).all() and transfer.stalled_ns() == 30


@pytest.mark.parametrize("urgent", [False, True])
def test_swap_outs_wait_for_loads_unless_urgent(urgent: bool, open_at_the_end: Any) -> None:
    transfer, _, gate = gated()
    open_at_the_end(transfer, gate)
    transfer.swap_in([swap_in(1, (0,), (4,))])
    until(lambda: transfer._link.inward._orders.empty())  # the load is at the gate
    transfer.swap_out([swap_out(2, (8,), (9,), urgent)])
    if urgent:
        until(lambda: transfer._link.outward._orders.empty())
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


def test_a_failed_load_fails_whoever_needs_it_and_nobody_else(open_at_the_end: Any) -> None:
    transfer, tensors, gate = gated(fails=lambda name: name == "in1")
    open_at_the_end(transfer, gate)
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


def test_abandoned_tickets_are_never_reported(open_at_the_end: Any) -> None:
    transfer, _, gate = gated(fails=lambda name: name == "out0")
    open_at_the_end(transfer, gate)
    gate.let(100)
    transfer.swap_in([swap_in(1, (0,), (4,))])
    transfer.swap_in([swap_in(2, (1,), (5,))])
    transfer.swap_out([swap_out(3, (8,), (9,))])
    transfer.abandon([2, 3])
    assert transfer.moved() == (Moved(1),)


def test_a_link_keeps_its_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only its own sleeps move."""
    now_s = [5.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    timer = SimpleNamespace(perf_counter=lambda: now_s[0], perf_counter_ns=time.perf_counter_ns, sleep=sleep)
    monkeypatch.setattr(thread_link, "time", timer)
    tensors = KvTensors(tiny_spec("llama"), 4, BLOCKS, BLOCKS, torch.device("cpu"), torch.float32)
    gate = Gate(names={tensors.gpu[layer].data_ptr(): f"in{layer}" for layer in range(LAYERS)})
    transfer = Transfer(tensors, ThreadLink(bytes_per_s=8 * tensors.block_bytes / 0.1, copy=gate))
    assert transfer.swap_in([swap_in(1, tuple(range(8)), tuple(range(8)))]) == 0
    assert gate.made == [], "the caller is not held up"
    gate.let(LAYERS)
    transfer.finish()
    assert now_s[0] == pytest.approx(5.1)
    transfer.close()


def test_a_step_goes_on_beside_loads_it_does_not_need_and_reports_them_later() -> None:
    gate = Gate()
    driver = Driver(tiny_model("llama"), link=ThreadLink(copy=gate))
    worker, tensors = driver.worker, driver.worker.tensors
    for layer in range(LAYERS):
        gate.names[tensors.gpu[layer].data_ptr()] = "in"
        gate.names[tensors.cpu[layer].data_ptr()] = "out"
    driver.step(driver.prompt_row(0, random_tokens(12, 0)))
    result = driver.step(driver.decode_row(0), moves=[swap_in(7, (0,), (driver.free[-1],))])
    assert (result.error, result.moved) == (None, ())
    gate.let(LAYERS)
    late = worker.collect(None)
    assert late is not None and (late.step, late.moved) == (None, (Moved(7),))
    assert worker.collect(None) is None
    gate.fails = lambda name: True
    gate.let(LAYERS)
    results = [driver.perform(moves=[swap_out(8, (0,), (1,))]), worker.collect(None)]
    assert [r.moved for r in results if r is not None and r.moved] == [(Moved(8, ok=False),)]
    worker.close()
