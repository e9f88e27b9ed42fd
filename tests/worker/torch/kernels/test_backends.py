from __future__ import annotations

import importlib.util

import pytest
import torch

from pensieve.device.kernels import backends
from pensieve.device.kernels.backends import BACKENDS, candidates, load_backend
from pensieve.errors import ConfigError, EngineMissing

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _load(name, device=CPU, dtype=torch.bfloat16, chunk=32):
    return load_backend(name, device, dtype, 64, chunk)


def test_auto_takes_the_triton_kernel_on_a_gpu_and_the_compiled_one_on_a_cpu():
    assert candidates("auto", "cuda") == ("triton", "triton_pointers", "reference")
    assert candidates("auto", "cpu") == ("native", "reference")
    assert [candidates(name, "cpu") for name in BACKENDS] == [(name,) for name in BACKENDS]
    with pytest.raises(ConfigError, match="attention_backend=flash is unknown; use auto, reference"):
        candidates("flash", "cpu")


@pytest.mark.parametrize(
    ("name", "device", "chunk", "interpret", "sentence"),
    [
        ("triton", CPU, 32, None, "needs a GPU; use auto on a CPU, or set TRITON_INTERPRET=1"),
        ("triton", CUDA, 32, "1", "TRITON_INTERPRET=1 is set"),
        ("triton", CPU, 24, "1", "cache.chunk_tokens=24"),
        ("triton_pointers", CPU, 32, None, "attention_backend=triton_pointers needs a GPU"),
        ("native", CUDA, 32, None, "runs on a CPU only"),
    ],
)
def test_what_cannot_run_here_is_one_sentence(name, device, chunk, interpret, sentence, monkeypatch):
    if name.startswith("triton"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(EngineMissing, match=sentence) as raised:
        _load(name, device, chunk=chunk)
    assert "\n" not in str(raised.value)


def test_a_missing_triton_names_its_extra(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(EngineMissing, match=r"pip install 'pensieve-lab\[triton\]'"):
        _load("triton")
