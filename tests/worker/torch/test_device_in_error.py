"""A device that is in error for good raises whatever it is asked: steps fail with a sentence, and nothing else does."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import torch

from pensieve.core.plan import Moved, Row, Sample, StepPlan
from pensieve.device.transfers import lanes
from pensieve.device.transfers.lanes import CudaLink
from pensieve.device.worker import TorchWorker
from pensieve.serve.systems.base import WallClock
from pensieve.serve.systems.profiling import swap_out

from .driver import Driver, random_tokens


class Device:
    """A link, both its lanes and the marks in them; from `fails` on each answer is an error."""

    error, fails = None, False

    def __init__(self):
        self.inward = self.outward = self

    def _ask(self, *given):
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
        return self

    computed = hold_compute = wait = synchronize = close = _ask

    def enqueue(self, haul, after):
        return [self._ask()] * haul.layers

    def reached(self):
        return self._ask() is None

    def stalled_ns(self):
        return 0


def test_steps_fail_with_a_sentence_and_copies_under_way_fail_once(llama, monkeypatch):
    device = Device()
    driver = Driver(llama, link=device)
    row, deltas = driver.prompt_row(0, random_tokens(12, 0)), driver.allocate(0, 12)
    assert driver.perform([row], deltas, moves=[swap_out(5, (90,), (1,))]).error is None

    def breaks(batch):
        device.fails = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(driver.worker, "_forward", breaks)
    result = driver.perform([row], moves=[swap_out(6, (91,), (2,))])
    assert "illegal memory access" in (result.error or "") and "\n" not in (result.error or "")
    assert result.moved == (Moved(5, ok=False),), "those of the failed plan are void, and not reported"
    later = driver.perform([row], moves=[swap_out(7, (91,), (2,))])
    assert "illegal memory access" in (later.error or "") and later.moved == ()
    assert driver.worker.collect(None) is None
    driver.worker.close()


def test_waits_of_a_device_in_error_are_forgotten(monkeypatch):
    class Event:
        def query(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(lanes, "_CudaLane", lambda *_: None)
    link = CudaLink(torch.device("cpu"))
    link._waits = [(Event(), Event())]
    assert link.stalled_ns() == 0 and not link._waits


def test_a_failed_step_keeps_no_activations(llama):
    """Else the memory that was too little stays taken until the garbage collector comes by, and the next steps fail too."""
    held = []

    class Greedy:
        name = "greedy"
        fails = False

        def __call__(self, iteration, wanted):
            activations = torch.zeros(1000)
            if self.fails:
                held.append(weakref.ref(activations))
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
            return llama.forward(iteration, wanted)

    forward = Greedy()
    worker = TorchWorker(replace(llama, forward=forward), 8, WallClock())
    worker.start(8, 0)
    forward.fails = True
    gc.collect()
    gc.disable()
    try:
        worker.launch(StepPlan(1, (Row(0, ((0, 4),), (5, 6, 7, 8), Sample(4)),), ((0, 0, (3,)),)))
        assert len(held) == 1 and held[0]() is None
        result = worker.collect(None)
    finally:
        gc.enable()
    assert result is not None and "ran out of memory" in (result.error or "")
    worker.close()
