"""Memory is taken when it is used, and goes back when it is needed no more: pools, blocks that only a measurement filled.
Page-locking with a CUDA runtime that only writes down what it is asked."""

import gc
import mmap
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from pensieve.device.kv_tensors import KvTensors, kept, pinned_bytes
from pensieve.errors import HardwareMissing
from pensieve.lab.compose.build import build_system
from pensieve.lab.compose.plan import plan_trial
from pensieve.serve.systems import profiling
from tests.composed import checked

from .driver import tiny_spec

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are told by Linux")


def resident(tensor):
    """The share of a tensor's whole pages that are in memory. What else the process takes or gives back is not in it."""
    first, stop = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(8 * first)
        return float(np.mean(np.frombuffer(entries.read(8 * (stop - first)), np.uint64) >> np.uint64(63)))


def _make(gpu_blocks, cpu_blocks):
    return KvTensors(tiny_spec("llama"), 32, gpu_blocks, cpu_blocks, torch.device("cpu"), torch.float32)


@on_linux
def test_pools_are_zero_and_memory_is_touched_only_when_used():
    process = psutil.Process()
    before = process.memory_info().rss
    tensors = _make(16384, 16384)  # 256 MiB each
    assert tensors.gpu_bytes == tensors.cpu_bytes == 256 * 2**20
    assert process.memory_info().rss - before < 32 * 2**20
    tensors.cpu[:, :4096] = 1.0
    touched = process.memory_info().rss - before
    assert 48 * 2**20 < touched < 160 * 2**20, "a quarter of one pool"
    assert not tensors.gpu[:, 100:110].any()
    with pytest.raises(HardwareMissing, match=r"TiB.*this machine has .*GiB"):
        _make(2**28, 0)


@on_linux
def test_pools_are_zeroed_by_returning_their_pages():
    tensors = _make(1000, 500)
    for pool in (tensors.gpu, tensors.cpu):
        pool.fill_(7)
    assert resident(tensors.gpu) == resident(tensors.cpu) == 1
    tensors.forget()
    assert max(resident(tensors.gpu), resident(tensors.cpu)) < 0.01, "but for those that it shares with others"
    assert not tensors.gpu.any() and not tensors.cpu.any()


def test_what_measures_the_machine_leaves_both_tiers_empty(monkeypatch):
    """Else the first trial of a process, and a server, has memory for both that no conversation has asked for."""
    monkeypatch.setattr(profiling, "_known", {})
    options = ("hardware=cpu", "hardware.threads=1", "cache.gpu=512 tokens", "cache.cpu=512 tokens")
    system = build_system(plan_trial(checked(*options, "model.architecture.num_hidden_layers=2")))
    launched = []
    worker = system._worker
    launch = worker.launch
    monkeypatch.setattr(worker, "launch", lambda plan: (launched.append(plan.step), launch(plan)))
    system.start()
    try:
        assert set(launched) == {-1}, "it was measured"
        assert not worker.tensors.gpu.any() and not worker.tensors.cpu.any()
    finally:
        system.close()


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
