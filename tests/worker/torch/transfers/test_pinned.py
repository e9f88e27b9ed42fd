"""Page-locking with a CUDA runtime that only writes down what it is asked."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import torch

from pensieve.device.transfers.pinned import kept, pinned_bytes


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


def test_exactly_the_bytes_asked_for_are_locked_and_given_back_with_the_last_view(monkeypatch):
    calls = runtime(monkeypatch, 0)
    flat = pinned_bytes(100_000)
    address = flat.data_ptr()
    assert calls == [("register", address, 100_000, 0)]
    assert address % mmap.PAGESIZE == 0
    assert (flat.dtype, flat.shape) == (torch.uint8, (100_000,)) and not flat.any()
    view = flat[:4096].view(torch.float32).view(8, 128)
    del flat
    gc.collect()
    view.fill_(1.0)
    assert len(calls) == 1, "a view still needs it"
    del view
    gc.collect()
    assert calls[1:] == [("unregister", address)]


def test_where_it_is_kept_it_stays_locked_for_the_next_one(monkeypatch):
    """Zeroed, also for less; what is too small goes before the larger one is locked."""
    calls = runtime(monkeypatch, 0)
    monkeypatch.setattr(kept, "keeps", lambda: True)
    first = pinned_bytes(100_000)
    address = first.data_ptr()
    first.fill_(7)
    del first
    assert kept.nbytes == 100_000
    second = pinned_bytes(60_000)
    assert kept.nbytes == 0, "in use"
    assert second.data_ptr() == address and len(second) == 60_000 and not second.any()
    beside = pinned_bytes(50_000)
    assert beside.data_ptr() != address, "the other one is in use"
    del second, beside
    assert kept.nbytes == 100_000, "the larger one, whole"
    assert [call[0] for call in calls] == ["register", "register", "unregister"]
    larger = pinned_bytes(200_000)
    assert [call[0] for call in calls[3:]] == ["unregister", "register"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    del larger
    elsewhere = pinned_bytes(10)
    assert [call[0] for call in calls[5:]] == ["register"], "what another device has locked does not serve"
    del elsewhere
    kept.clear()
    assert sorted(call[0] for call in calls[6:]) == ["unregister", "unregister"]


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
