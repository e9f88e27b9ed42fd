"""Page-locking with a CUDA runtime that only writes down what it is asked."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pensieve.worker.torch.transfers.pinned import pinned_bytes


def runtime(monkeypatch: pytest.MonkeyPatch, answer: int) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("register", address, size, flags))
        return answer

    fake = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append(("unregister", address))
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return calls


def test_exactly_the_bytes_asked_for_are_locked_and_given_back_with_the_last_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_where_it_is_refused_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = runtime(monkeypatch, 801)
    asked: list[dict[str, Any]] = []

    def zeros(size: int, **how: Any) -> str:
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
