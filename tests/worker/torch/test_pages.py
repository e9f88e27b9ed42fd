"""Memory is taken when it is used, and goes back when it is needed no more: pools, files that weights were mapped from,
blocks that only a measurement filled."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from pensieve.device.asked import ModelAsked
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import load_model
from pensieve.errors import HardwareMissing
from pensieve.lab.compose.build import build_system
from pensieve.lab.compose.plan import plan_trial
from pensieve.serve.systems import profiling
from tests.composed import checked
from tests.worker.torch.driver import plain_logits, tiny_spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of a file are told by Linux")

READ_AROUND = 64 * 1024  # bytes that a page fault may map on either side


def mapped(file):
    """Bytes of a file that this process has mapped, and of them those in memory."""
    size = resident = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            inside = line.endswith(str(file))
        elif inside and fields[0] in ("Size:", "Rss:"):
            size += int(fields[1]) * 1024 * (fields[0] == "Size:")
            resident += int(fields[1]) * 1024 * (fields[0] == "Rss:")
    return size, resident


LLAMA = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
GPT2 = {"n_embd": 256, "n_inner": 1024, "n_head": 8}
COPIED = {"llama": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "gpt2": ("c_attn", "c_proj", "c_fc")}
"""Joined, or turned round: GPT-2 keeps its weights the other way."""


@pytest.mark.parametrize(("name", "large"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_weights_that_were_laid_out_anew_do_not_stay_in_memory_as_they_were(name, large, tmp_path):
    spec = tiny_spec(name, **large)
    saved = load_model(ModelAsked(spec, threads=1))
    saved.module.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    model = load_model(ModelAsked(spec, weights=str(tmp_path), threads=1))
    assert model.forward.name.startswith("fused")
    weights = {
        path: weight
        for path, weight in model.module.named_parameters()
        if path.endswith("weight") and path.split(".")[-2] in COPIED[name]
    }
    copied = sum(weight.nbytes for weight in weights.values())
    size, resident = mapped(file)
    assert size >= file.stat().st_size, "the other weights are the file's own pages"
    assert 0 < resident <= size - copied + 2 * READ_AROUND * len(weights) < size - copied / 2
    assert plain_logits(model, [5, 6, 7]).equal(plain_logits(saved, [5, 6, 7]))
    stored = load_file(file)
    assert all(weight.equal(stored[path]) for path, weight in weights.items())


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
