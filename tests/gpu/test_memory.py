"""On a GPU: what memory allows is found out, and running out of it is a sentence that the next requests do not notice."""

from __future__ import annotations

import gc

import pytest
import torch

from pensieve.device.options import TorchOptions
from pensieve.device.worker import TorchWorker
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.base import WallClock
from tests.worker.torch.driver import plain_logits

from .shortage import fail_and_go_on
from .small import small_model

pytestmark = pytest.mark.real_device


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shortage_in_flight_fails_its_step_alone(depth: int) -> None:
    """The failing forwards hold a quarter of what is free each; without the garbage collector none of it may stay."""
    model = small_model("llama", 8)
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] // 4
    gc.collect()
    gc.disable()
    try:
        failed, served, prompt = fail_and_go_on(model, depth, held)
        kept = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    assert kept < held // 2
    assert "ran out of memory" in (failed.error or "") and "are free" in (failed.error or "")
    tokens = [*prompt, *served.token_ids]
    best = plain_logits(model, tokens[:-1])[len(prompt) - 1 :].argmax(dim=1)
    assert best.tolist() == list(served.token_ids)


def test_a_pool_beyond_the_device_is_a_sentence_with_the_numbers() -> None:
    model = small_model("llama", 8)
    block_bytes = 8 * model.spec.kv_bytes_per_token
    worker = TorchWorker(model, 8, WallClock())
    with pytest.raises(HardwareMissing, match=r"A KV pool of .* does not fit in CUDA memory, of which .* are free"):
        worker.start(2 * torch.cuda.mem_get_info()[1] // block_bytes, 0)
    assert worker.start(16, 16).settings["gpu_pool_bytes"] >= 16 * block_bytes
    worker.close()


def test_auto_fits_and_leaves_its_share() -> None:
    model = small_model("llama")
    options = TorchOptions(max_batch_tokens=256, max_batch_requests=12, memory_share=0.5)
    worker = TorchWorker(model, 32, WallClock(), options=options)
    blocks = worker.room()
    worker.start(blocks, 0)
    free, total = torch.cuda.mem_get_info()
    worker.close()
    assert 0.35 < 1 - free / total < 0.6


def test_a_closed_worker_gives_everything_back() -> None:
    """Its pools, and the graphs' memory; what stays are the libraries' workspaces, which the first start has made."""
    model = small_model("llama")
    left = []
    for _ in range(3):
        worker = TorchWorker(model, 32, WallClock(), options=TorchOptions(max_batch_requests=8))
        worker.start(64, 64)
        worker.close()
        left.append(torch.cuda.memory_reserved())
    assert abs(left[1] - left[2]) < 2**25, left
