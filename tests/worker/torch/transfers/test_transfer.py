from __future__ import annotations

import random

import torch

from pensieve.core.plan import BlockRun, merge_moves, swap_in, swap_out
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import Transfer
from tests.worker.torch.driver import tiny_spec


def _tensors(gpu_blocks: int = 24, cpu_blocks: int = 24) -> KvTensors:
    return KvTensors(tiny_spec("llama"), 4, gpu_blocks, cpu_blocks, torch.device("cpu"), torch.float32)


def test_adjacent_blocks_merge_whatever_their_order_and_ticket() -> None:
    copies = [swap_in(1, (7, 5), (3, 1)), swap_in(2, (6, 9, 10), (2, 4, 6))]
    assert merge_moves(copies) == [BlockRun(5, 1, 3), BlockRun(9, 4, 1), BlockRun(10, 6, 1)]
    assert merge_moves([]) == []


def test_blocks_adjacent_on_one_side_only_stay_apart() -> None:
    assert merge_moves([swap_in(1, (1, 2), (5, 4))]) == [BlockRun(1, 5, 1), BlockRun(2, 4, 1)]


def test_a_round_trip_is_byte_for_byte_and_touches_nothing_else() -> None:
    tensors = _tensors()
    transfer = Transfer(tensors)
    random_bytes = torch.randint(0, 256, (tensors.gpu.numel() * 4,), dtype=torch.uint8)
    tensors.gpu.view(-1).view(torch.uint8).copy_(random_bytes)  # NaN patterns included: bytes, not values
    tensors.cpu.view(-1).view(torch.uint8).fill_(0xA5)
    before = tensors.gpu.view(torch.uint8).clone()
    source = random.Random(3)
    out_of, home = source.sample(range(24), 11), source.sample(range(24), 11)
    back = source.sample(range(24), 11)

    transfer.swap_out(
        [swap_out(1, tuple(out_of[:4]), tuple(home[:4])), swap_out(2, tuple(out_of[4:]), tuple(home[4:]))]
    )
    kept = tensors.cpu.view(torch.uint8)
    for block, at in zip(out_of, home, strict=True):
        assert torch.equal(kept[:, at], before[:, block])
    untouched = [block for block in range(24) if block not in home]
    assert (kept[:, untouched] == 0xA5).all()

    transfer.swap_in([swap_in(3, tuple(home), tuple(back))])
    now = tensors.gpu.view(torch.uint8)
    for block, at in zip(out_of, back, strict=True):
        assert torch.equal(now[:, at], before[:, block])
    untouched = [block for block in range(24) if block not in back]
    assert torch.equal(now[:, untouched], before[:, untouched])


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
