"""What tests/gpu asks of a GPU, asked of its stand-ins on a CPU: so that the questions themselves are right."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.kv_tensors import KvTensors
from pensieve.device.options import TorchOptions
from pensieve.device.transfers.transfer import Transfer
from pensieve.plugins.device.thread_link import ThreadLink
from tests.gpu.conversations import REQUESTS, TURNS, check_paths, converse
from tests.gpu.shuttle import shuttle

from .driver import tiny_spec


@pytest.mark.parametrize(("mode", "depth"), [("load", 2), ("hybrid", 2), ("recompute", 1)])
def test_conversations(llama, mode, depth):
    options = TorchOptions(depth=depth, max_batch_requests=REQUESTS)
    check_paths(converse(llama, mode, options, ThreadLink(5e7), turns=TURNS), mode)


@pytest.mark.parametrize("link", [True, False])
def test_blocks_survive(link):
    tensors = KvTensors(tiny_spec("llama"), 4, 24, 24, torch.device("cpu"), torch.float32)
    transfer = Transfer(tensors, ThreadLink(2e8) if link else None)
    shuttle(tensors, transfer, lambda: None, rounds=3)
    transfer.close()


def test_a_copy_that_overtakes_is_found():
    """A link whose marks are reached too early."""

    class Hasty(ThreadLink):
        def hold_compute(self, mark):
            return

    tensors = KvTensors(tiny_spec("llama"), 4, 24, 24, torch.device("cpu"), torch.float32)
    transfer = Transfer(tensors, Hasty(2e6))
    with pytest.raises(AssertionError, match="read before its load had come"):
        shuttle(tensors, transfer, lambda: None, rounds=3)
    transfer.close()
