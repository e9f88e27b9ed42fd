"""On a GPU: conversations whose KV was on CPU, dropped, or both are answered as the plain model answers them."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.options import TorchOptions
from pensieve.plugins.caches.restore import RestoreMode

from .conversations import CHUNK, REQUESTS, TURNS, check_paths, converse
from .small import small_model

pytestmark = pytest.mark.real_device


@pytest.mark.parametrize(
    ("name", "mode", "depth"),
    [("llama", "load", 2), ("llama", "hybrid", 2), ("llama", "recompute", 1), ("gemma2", "hybrid", 2)],
)
def test_every_token_is_the_plain_models(name: str, mode: RestoreMode, depth: int) -> None:
    model = small_model(name, CHUNK)
    options = TorchOptions(depth=depth, max_batch_requests=REQUESTS)
    check_paths(converse(model, mode, options, None, TURNS), mode)


def test_a_forward_that_is_not_ours_is_captured_too_or_says_why() -> None:
    """transformers' own modules may wait for the device somewhere: then the eager forward serves, on the stream it had."""
    model = small_model("llama", CHUNK, fused=False)
    check_paths(converse(model, "load", TorchOptions(depth=2, max_batch_requests=REQUESTS), None, TURNS), "load")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device() -> None:
    model = small_model("llama", CHUNK, device="cuda:1")
    check_paths(converse(model, "load", TorchOptions(depth=2, max_batch_requests=REQUESTS), None, TURNS), "load")
