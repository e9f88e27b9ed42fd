"""The link of a GPU: two lanes made of CUDA streams, marks made of events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from pensieve.device.transfers.copies import CallCopier
from pensieve.device.transfers.link import Copier, Haul, Mark


class CudaLink:
    """Two streams, whose copies copy engines perform beside the compute. copier: by default a call a run, which every driver
    has; copies.choose_copier tells what serves here."""

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self._device = device
        self.inward = _CudaLane(device, copier or CallCopier())
        self.outward = _CudaLane(device, copier or CallCopier())
        self._waits: list[tuple[Any, Any]] = []  # events on the compute stream before and after each wait

    def computed(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self._device).record_event())

    def hold_compute(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        if mark.reached():
            return
        compute = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(mark.event)
        after.record(compute)
        self._waits.append((before, after))

    def stalled_ns(self) -> int:
        stalled_ms, still = 0.0, []
        for before, after in self._waits:
            with suppress(RuntimeError):  # a device in error answers no query; its waits are forgotten
                if after.query():
                    stalled_ms += before.elapsed_time(after)
                else:
                    still.append((before, after))
        self._waits = still
        return int(stalled_ms * 1e6)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self.inward.stream.synchronize()
        self.outward.stream.synchronize()

    def close(self) -> None:
        self.synchronize()


class _CudaLane:
    def __init__(self, device: torch.device, copier: Copier) -> None:
        self.stream = torch.cuda.Stream(device)
        self.copier = copier

    def enqueue(self, haul: Haul, after: Sequence[Mark]) -> list[Mark]:
        marks: list[Mark] = []
        with torch.cuda.stream(self.stream):
            for mark in after:
                assert isinstance(mark, CudaMark)
                self.stream.wait_event(mark.event)
            copy = self.copier.prepare(haul) if haul.runs else _copy_nothing
            for layer in range(haul.layers):
                copy(layer)
                marks.append(CudaMark(self.stream.record_event()))
        return marks


def _copy_nothing(layer: int) -> None:
    """Do nothing for a layer of a haul without runs."""


class CudaMark:
    """An event. It has no error of its own: a failed copy puts the whole device in error, and the next query raises it."""

    error = None

    def __init__(self, event: Any) -> None:
        self.event = event

    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()
