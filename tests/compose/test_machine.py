from __future__ import annotations

import pytest
import torch

from pensieve.lab.compose.machine import Device, free_device_bytes


def test_what_this_process_holds_of_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench keeps its model from trial to trial: it must not be refused for the memory that its own model takes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (7 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda name: {"cuda:1": 16 * 2**30}[name])
    device = Device("cuda", "cuda:1", "GPU-1", "a GPU", 1, 24 * 2**30, 2**36)
    assert free_device_bytes(device) == 23 * 2**30
