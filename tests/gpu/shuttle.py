"""Blocks that leave the GPU, are overwritten there and come back elsewhere while it computes: not a byte may change."""

import random
from collections.abc import Callable

import numpy as np
import torch

from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import Transfer
from pensieve.serve.systems.profiling import swap_in, swap_out


def shuttle(tensors: KvTensors, transfer: Transfer, compute: Callable[[], None], rounds: int) -> None:
    """compute: enqueues work that takes the device some milliseconds. Both tiers have the same number of blocks.

    Each round writes all blocks behind such work, copies half of them out without waiting, and reads them back on the
    compute stream behind nothing but the wait for each layer. Then loads and swap-outs run at the same time.
    """
    chance, count = random.Random(1), tensors.gpu_blocks
    source = torch.Generator(tensors.device).manual_seed(1)
    for number in range(rounds):
        known = torch.randn(tensors.gpu.shape, generator=source, dtype=torch.float32, device=tensors.device)
        known = known.to(tensors.dtype)
        out, homes, back = (tuple(chance.sample(range(count), count // 2)) for _ in range(3))
        compute()
        tensors.gpu.copy_(known)
        transfer.swap_out([swap_out(1, out, homes, urgent=number % 2 == 0)])
        _finish(transfer, 1)
        assert torch.equal(tensors.cpu[:, homes], known.cpu()[:, out]), "a swap-out did not wait for what it copies"

        tensors.gpu.fill_(-7.0)
        _synchronize(tensors.device)
        others, spare = (tuple(set(range(count)) - set(taken)) for taken in (back, homes))
        places = torch.tensor(back, device=tensors.device)
        compute()
        transfer.swap_in([swap_in(2, homes, back)])
        transfer.swap_out([swap_out(3, others, spare)])
        transfer.require(np.array(back))
        read: list[torch.Tensor] = []
        for layer in range(tensors.layers):
            transfer.wait_for_layer(layer)
            read.append(tensors.gpu[layer].index_select(0, places))
        compute()
        _finish(transfer, 2, 3)
        assert torch.equal(torch.stack(read), known[:, out]), "a layer was read before its load had come"
        assert torch.equal(tensors.cpu[:, homes], known.cpu()[:, out])
        assert (tensors.gpu[:, others] == -7.0).all() and (tensors.cpu[:, spare] == -7.0).all()


def _finish(transfer: Transfer, *tickets: int) -> None:
    left = set(tickets)
    while left:
        assert transfer.wait(), "a ticket was never reported"
        moved = transfer.moved()
        assert all(one.ok for one in moved)
        left -= {one.ticket for one in moved}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
