from __future__ import annotations

import psutil
import pytest
import torch

from pensieve.device import kv_tensors
from pensieve.device.kv_tensors import KvTensors
from pensieve.errors import HardwareMissing

from .driver import tiny_spec


def _make(gpu_blocks: int, cpu_blocks: int) -> KvTensors:
    return KvTensors(tiny_spec("llama"), 32, gpu_blocks, cpu_blocks, torch.device("cpu"), torch.float32)


def test_pools_are_zero_and_memory_is_touched_only_when_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    tensors = _make(16384, 16384)  # 256 MiB each
    assert tensors.gpu_bytes == tensors.cpu_bytes == 256 * 2**20
    assert process.memory_info().rss - before < 32 * 2**20
    tensors.cpu[:, :4096] = 1.0
    touched = process.memory_info().rss - before
    assert 48 * 2**20 < touched < 160 * 2**20, "a quarter of one pool"
    assert not tensors.gpu[:, 100:110].any()


def test_more_than_the_machine_has_is_refused_with_numbers() -> None:
    with pytest.raises(HardwareMissing, match=r"TiB.*this machine has .*GiB"):
        _make(2**28, 0)


def test_a_failed_allocation_is_a_sentence_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(kv_tensors.mmap, "mmap", full)
    with pytest.raises(HardwareMissing, match=r"64\.0 KiB \(4 blocks of 16\.0 KiB\) does not fit in CPU memory"):
        _make(4, 0)
