"""Memory is taken when it is used, and goes back when it is needed no more: pools, blocks that only a measurement filled."""

import mmap
import sys

import numpy as np
import psutil
import pytest
import torch

from pensieve.device.kv_tensors import KvTensors
from pensieve.errors import HardwareMissing
from pensieve.lab.compose.build import build_system
from pensieve.lab.compose.plan import plan_trial
from pensieve.serve.systems import profiling
from tests.composed import checked
from tests.worker.torch.driver import tiny_spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are told by Linux")


def resident(tensor):
    """The share of a tensor's whole pages that are in memory. What else the process takes or gives back is not in it."""
    first, stop = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(8 * first)
        return float(np.mean(np.frombuffer(entries.read(8 * (stop - first)), np.uint64) >> np.uint64(63)))


def _make(gpu_blocks, cpu_blocks):
    return KvTensors(tiny_spec("llama"), 32, gpu_blocks, cpu_blocks, torch.device("cpu"), torch.float32)


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
