"""Each way of copying brings every byte, one layer a call; which of them serves. Page-locking with a CUDA runtime that only
writes down what it is asked."""

import ctypes
import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from pensieve.device.kv_tensors import KvTensors, kept, pinned_bytes
from pensieve.device.transfers import cuda_link
from pensieve.device.transfers.cuda_link import BATCH_CALL, Attributes, BatchCopier, CallCopier, choose_copier
from pensieve.device.transfers.transfer import BlockRun, Haul

from .driver import tiny_spec

RUNS = [BlockRun(1, 9, 2), BlockRun(4, 0, 1), BlockRun(6, 2, 3), BlockRun(20, 30, 8)]


def tensors():
    return KvTensors(tiny_spec("llama"), 4, 48, 48, torch.device("cpu"), torch.float32)


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
    pools, expected = tensors(), tensors()
    for pool in (pools.cpu, pools.gpu):
        noise = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8)
        pool.view(-1).view(torch.uint8).copy_(noise)  # NaN patterns included
    got, wanted, source = (pool.view(torch.uint8) for pool in (pools.gpu, expected.gpu, pools.cpu))
    wanted.copy_(got)
    for run in RUNS:
        wanted[:, run.dst : run.dst + run.blocks] = source[:, run.src : run.src + run.blocks]
    call, asked = memory(monkeypatch)
    copy = {"calls": CallCopier(), "batch": BatchCopier(call)}[kind].prepare(Haul(RUNS, pools.cpu, pools.gpu))
    for layer in range(pools.layers):
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
        pools = tensors()
        copier, said = choose_copier(pools)
        assert (copier.name, said) == (name, note)
        assert not pools.cpu.any() and not pools.gpu.any(), "nothing of the check stays behind"
        copy = BatchCopier(call).prepare(Haul([BlockRun(0, 1, 1), BlockRun(2, 3, 0)], pools.cpu, pools.gpu))
        with pytest.raises(RuntimeError, match="error 1 in copy 1 of 2"):
            copy(0)
    monkeypatch.undo()
    monkeypatch.setattr(cuda_link.ctypes, "CDLL", lambda name: object())
    assert choose_copier(tensors())[1].startswith("a call a run; No batched copies: the CUDA driver")


# -- pinned memory ----------------------------------------------------------------------------------------------------------


def runtime(monkeypatch, answer):
    calls = []

    def register(address, size, flags):
        calls.append(("register", address, size, flags))
        return answer

    fake = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append(("unregister", address))
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return calls


def test_exactly_the_bytes_asked_for_are_locked_and_given_back_with_the_last_view_or_kept_for_the_next(monkeypatch):
    calls = runtime(monkeypatch, 0)
    flat = pinned_bytes(100_000)
    address = flat.data_ptr()
    assert calls == [("register", address, 100_000, 0)] and address % mmap.PAGESIZE == 0
    assert (flat.dtype, flat.shape) == (torch.uint8, (100_000,)) and not flat.any()
    view = flat[:4096].view(torch.float32)
    del flat
    gc.collect()
    view.fill_(1.0)
    assert len(calls) == 1, "a view still needs it"
    del view
    gc.collect()
    assert calls[1:] == [("unregister", address)]
    monkeypatch.setattr(kept, "keeps", lambda: True)
    first = pinned_bytes(100_000)
    address = first.data_ptr()
    first.fill_(7)
    del first
    second = pinned_bytes(60_000)
    assert second.data_ptr() == address and len(second) == 60_000 and not second.any()
    beside = pinned_bytes(50_000)
    assert kept.nbytes == 0 and beside.data_ptr() != address, "in use"
    del second, beside
    assert kept.nbytes == 100_000, "the larger one, whole"
    larger = pinned_bytes(200_000)
    assert [call[0] for call in calls[2:]] == ["register", "register", "unregister", "unregister", "register"]
    del larger
    kept.clear()
    assert calls[-1][0] == "unregister"


def test_where_it_is_refused_torch_pins(monkeypatch):
    calls = runtime(monkeypatch, 801)
    asked = []

    def zeros(size, **how):
        asked.append({"size": size, **how})
        if "device" in how:
            raise RuntimeError("CUDA error: what happened before")
        return "pinned by torch"

    monkeypatch.setattr(torch, "zeros", zeros)
    assert pinned_bytes(64) == "pinned by torch"
    assert asked[1:] == [{"size": 64, "dtype": torch.uint8, "pin_memory": True}]
    assert asked[0] == {"size": 1, "device": "cuda"}, "the runtime's last error was cleared first"
    gc.collect()
    assert [call[0] for call in calls] == ["register"], "what was not locked is not unlocked"
