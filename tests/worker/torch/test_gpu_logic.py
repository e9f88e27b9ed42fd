"""What tests/gpu asks of a GPU, asked of its stand-ins on a CPU: so that the questions themselves are right."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import Transfer
from pensieve.plugins.device.thread_link import ThreadLink
from tests.gpu.shuttle import shuttle

from .driver import tiny_spec


class Hasty(ThreadLink):
    """Marks are reached too early."""

    def hold_compute(self, mark):
        return


@pytest.mark.parametrize("link", [None, ThreadLink, Hasty])
def test_blocks_survive_and_a_copy_that_overtakes_is_found(link):
    tensors = KvTensors(tiny_spec("llama"), 4, 24, 24, torch.device("cpu"), torch.float32)
    transfer = Transfer(tensors, link and link(2e6 if link is Hasty else 2e8))
    if link is Hasty:
        with pytest.raises(AssertionError, match="read before its load had come"):
            shuttle(tensors, transfer, lambda: None, rounds=3)
    else:
        shuttle(tensors, transfer, lambda: None, rounds=3)
    transfer.close()
