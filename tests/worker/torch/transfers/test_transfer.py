from __future__ import annotations

import torch

from pensieve.core.plan import BlockRun, merge_moves
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import Transfer
from pensieve.serve.systems.profiling import swap_in, swap_out
from tests.worker.torch.driver import tiny_spec


def _tensors(gpu_blocks: int = 24, cpu_blocks: int = 24) -> KvTensors:
    return KvTensors(tiny_spec("llama"), 4, gpu_blocks, cpu_blocks, torch.device("cpu"), torch.float32)


def test_adjacent_blocks_merge_whatever_their_order_and_ticket() -> None:
    copies = [swap_in(1, (7, 5), (3, 1)), swap_in(2, (6, 9, 10), (2, 4, 6))]
    assert merge_moves(copies) == [BlockRun(5, 1, 3), BlockRun(9, 4, 1), BlockRun(10, 6, 1)]
    assert merge_moves([]) == []


def test_bytes_and_fragments_are_counted() -> None:
    tensors = _tensors()
    transfer = Transfer(tensors)
    assert transfer.mean_fragment_bytes == 0.0
    assert transfer.swap_out([]) == 0
    transfer.swap_out([swap_out(1, (0, 1, 2, 9), (4, 5, 6, 7))])  # runs of 3 and 1, in each of 2 layers
    transfer.swap_in([swap_in(2, (4,), (20,))])
    layer_block = 4 * 2 * 2 * 16 * 4  # tokens, K and V, KV heads, head_dim, bytes
    assert tensors.layer_block_bytes == layer_block
    assert (transfer.d2h_bytes, transfer.h2d_bytes) == (4 * 2 * layer_block, 2 * layer_block)
    assert transfer.fragments == 6
    assert transfer.mean_fragment_bytes == 10 * layer_block / 6
