"""On a GPU: every way of copying blocks brings every byte in both directions, and the choice is in the record."""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.core.machine import WallClock
from pensieve.core.plan import Moved, swap_in, swap_out
from pensieve.device.asked import ModelAsked
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import load_model
from pensieve.device.options import TorchOptions
from pensieve.device.transfers.copies import BatchCopier, CallCopier, choose_copier
from pensieve.device.transfers.lanes import CudaLink
from pensieve.device.transfers.link import Copier
from pensieve.device.transfers.transfer import Transfer
from pensieve.device.worker import TorchWorker
from pensieve.errors import EngineMissing
from pensieve.specs import ModelSpec

from .small import SIZES

CHUNK, BLOCKS = 32, 600


def spec() -> ModelSpec:
    return ModelSpec.from_architecture("small", SIZES["llama"])


def tensors() -> KvTensors:
    return KvTensors(spec(), CHUNK, BLOCKS, BLOCKS, torch.device("cuda"), torch.bfloat16)


def copier(name: str) -> Copier:
    try:
        return CallCopier() if name == "calls" else BatchCopier()
    except EngineMissing as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", ["calls", "batch"])
def test_a_round_trip_by_every_way_is_byte_for_byte(name: str) -> None:
    """Scattered runs of one to five blocks, out and in again elsewhere, and nothing beside them changes."""
    pools = tensors()
    transfer = Transfer(pools, CudaLink(pools.device, copier(name)))
    pools.gpu.view(-1).view(torch.int16).random_(-(2**15), 2**15)
    before = pools.gpu.cpu().view(torch.int16)
    torch.cuda.synchronize()
    chance = random.Random(7)
    starts, homes, back = (chance.sample(range(0, BLOCKS, 6), 60) for _ in range(3))
    lengths = [chance.randint(1, 5) for _ in starts]

    def blocks(firsts: list[int]) -> tuple[int, ...]:
        return tuple(first + i for first, length in zip(firsts, lengths, strict=True) for i in range(length))

    transfer.swap_out([swap_out(1, blocks(starts), blocks(homes))])
    transfer.finish()
    kept = pools.cpu.view(torch.int16)
    expected = torch.zeros_like(kept)
    expected[:, list(blocks(homes))] = before[:, list(blocks(starts))]
    assert torch.equal(kept, expected)
    transfer.swap_in([swap_in(2, blocks(homes), blocks(back))])
    transfer.finish()
    expected = before.clone()
    expected[:, list(blocks(back))] = before[:, list(blocks(starts))]
    assert torch.equal(pools.gpu.cpu().view(torch.int16), expected)
    assert transfer.moved() == (Moved(1), Moved(2))
    transfer.close()


def test_what_is_chosen_leaves_nothing_behind_and_is_in_the_record() -> None:
    pools = tensors()
    _, note = choose_copier(pools)
    assert not pools.gpu.any() and not pools.cpu.any()
    assert "wrongly" not in note and "Error" not in note, note
    model = load_model(ModelAsked(spec(), device="cuda", attention="reference", chunk_tokens=CHUNK))
    worker = TorchWorker(model, CHUNK, WallClock(), options=TorchOptions(max_batch_requests=4, graphs=False))
    assert worker.start(100, 100).settings["copies"] == note
    worker.close()
