"""Each way of copying brings every byte, one layer a call; which of them serves."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pensieve.core.plan import BlockRun
from pensieve.device.transfers import copies
from pensieve.device.transfers.copies import (
    BATCH_CALL,
    Attributes,
    BatchCopier,
    CallCopier,
    choose_copier,
    find_fault,
    first_sound,
)
from pensieve.device.transfers.link import Haul
from pensieve.errors import EngineMissing, HardwareMissing
from tests.worker.torch.transfers.named import RUNS, Named, tensors


def memory(monkeypatch):
    """A driver's batched copy for RAM, by the signature that cuda.h has, and what it was asked for."""
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
            ctypes.memmove(target, source, size)
        return 0

    return BATCH_CALL(perform), asked


@pytest.mark.parametrize("kind", ["calls", "batch"])
def test_every_way_brings_every_byte_layer_by_layer(kind, monkeypatch):
    pools, expected = tensors(), tensors()
    for pool in (pools.cpu, pools.gpu):
        noise = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8)
        pool.view(-1).view(torch.uint8).copy_(noise)  # NaN patterns included
    expected.gpu.view(torch.uint8).copy_(pools.gpu.view(torch.uint8))
    for run in RUNS:
        for i in range(run.blocks):
            expected.gpu.view(torch.uint8)[:, run.dst + i] = pools.cpu.view(torch.uint8)[:, run.src + i]
    call, asked = memory(monkeypatch)
    ways = {"calls": CallCopier(), "batch": BatchCopier(call)}
    assert find_fault(ways[kind], tensors().cpu, tensors().gpu) == ""
    asked.clear()
    copy = ways[kind].prepare(Haul(RUNS, pools.cpu, pools.gpu))
    for layer in range(pools.layers):
        assert not torch.equal(pools.gpu.view(torch.uint8)[layer], expected.gpu.view(torch.uint8)[layer])
        copy(layer)
        assert torch.equal(pools.gpu.view(torch.uint8)[layer], expected.gpu.view(torch.uint8)[layer])
    assert asked == {"calls": [], "batch": 2 * [(4, 1, 1)]}[kind], "a call a layer"


def test_the_drivers_structure_is_as_large_as_in_its_header():
    assert ctypes.sizeof(Attributes) == 24
    assert [getattr(Attributes, name).offset for name in ("source_order", "source", "target", "flags")] == [
        0,
        4,
        12,
        20,
    ]


def test_a_refused_batch_is_an_error_and_a_driver_without_it_is_said_to_be(monkeypatch):
    call, _ = memory(monkeypatch)
    pools = tensors()
    copy = BatchCopier(call).prepare(Haul([BlockRun(0, 1, 1), BlockRun(2, 3, 0)], pools.cpu, pools.gpu))
    with pytest.raises(RuntimeError, match="error 1 in copy 1 of 2"):
        copy(0)

    class Old:
        class cuGetProcAddress_v2:
            def __new__(cls, name, address, version, flags, found):
                assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
                return 1

    monkeypatch.setattr(copies.ctypes, "CDLL", lambda name: Old)
    with pytest.raises(EngineMissing, match="was the first"):
        BatchCopier()
    monkeypatch.setattr(copies.ctypes, "CDLL", lambda name: object())
    with pytest.raises(EngineMissing, match="not found"):
        BatchCopier()


def misplaced(haul):
    runs = [replace(run, dst=run.dst + 1) for run in haul.runs[:-1]] + list(haul.runs[-1:])
    return Haul(runs, haul.source, haul.target)


def broken(haul):
    raise ValueError("no such\ninstruction")


def test_a_way_that_copies_wrongly_or_not_at_all_does_not_serve(monkeypatch):
    pools = tensors()
    copier, note = first_sound([Named("batch", misplaced), Named("broken", broken), Named("calls")], pools)
    assert copier.name == "calls"
    assert note == "calls; not batch: it copied wrongly; not broken: ValueError: no such"
    assert not pools.cpu.any() and not pools.gpu.any(), "nothing of the check stays behind"
    with pytest.raises(HardwareMissing, match=r"fail on this machine \(not calls: it copied wrongly\)"):
        first_sound([Named("calls", misplaced)], pools)
    monkeypatch.setattr(copies.ctypes, "CDLL", lambda name: object())
    copier, note = choose_copier(pools)
    assert isinstance(copier, CallCopier) and note.startswith("a call a run; No batched copies: the CUDA driver")
