"""On a GPU: a model in bfloat16 is served by our kernel, and what it took is measured."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from pensieve.device.options import TorchOptions
from pensieve.lab.bench.steps import Generate, Stepper, plain_module

from .small import small_model

pytestmark = pytest.mark.real_device


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_deep_model_with_random_weights_is_served_by_triton_and_the_fused_forward() -> None:
    model = small_model("deep", dtype="bfloat16")
    assert (model.attention.name, model.attention_note, model.forward_note) == ("triton", "", "")
    assert model.self_check.difference > 0


def test_decode_steps_are_timed_by_the_device_and_graphs_are_faster() -> None:
    model = small_model("deep", dtype="bfloat16")
    stepper = Stepper(model, 8, 200, TorchOptions(depth=2))
    try:
        stepper.fill()
        stepper.decode(8, 4)
        took = min(stepper.decode(8, 16) for _ in range(5))
        graphs = stepper.worker.settings()["graphs"]
    finally:
        stepper.close()
    assert took > 0
    assert graphs == "on" or not model.attention.captures
    assert len(set(stepper.tokens.values())) > 1 and all(0 <= token < 1024 for token in stepper.tokens.values())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_the_peer_of_the_benchmarks_runs() -> None:
    """transformers' own decode, on the weights that the fused forward has joined."""
    assert Generate(plain_module(small_model("deep", dtype="bfloat16")), 4, 100, 1024).step_ms(6) > 0
