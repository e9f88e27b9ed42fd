"""On a GPU: what leaves for pinned memory and comes back is the same bytes, by each way of copying, while it computes."""

import pytest
import torch

from pensieve.device.asked import ModelAsked
from pensieve.device.kv_tensors import KvTensors, pinned_bytes
from pensieve.device.model import load_model
from pensieve.device.transfers.cuda_link import CudaLink, choose_copier
from pensieve.device.transfers.transfer import Link, Transfer
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.serve.systems.base import WallClock
from pensieve.specs import ModelSpec

from .conversations import SIZES
from .shuttle import shuttle

DEVICE = torch.device("cuda", 0)
LARGE = {**SIZES["llama"], "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 8}


def _tensors(sizes: dict[str, object], blocks: int) -> KvTensors:
    spec = ModelSpec.from_architecture("copied", sizes, "bfloat16")
    return KvTensors(spec, 32, blocks, blocks, DEVICE, torch.bfloat16)


def _shuttle(tensors: KvTensors, link: Link | None) -> None:
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)

    def compute() -> None:
        for _ in range(20):
            torch.mm(square, square)

    transfer = Transfer(tensors, link)
    with torch.inference_mode():
        shuttle(tensors, transfer, compute, rounds=5)
    transfer.close()


@pytest.mark.parametrize("sizes", [SIZES["llama"], LARGE], ids=["blocks of 16 KiB", "blocks of 128 KiB"])
@pytest.mark.parametrize("way", ["calls", "chosen"])
def test_bytes_survive(way: str, sizes: dict[str, object]) -> None:
    tensors = _tensors(sizes, 96)
    _shuttle(tensors, CudaLink(DEVICE, None if way == "calls" else choose_copier(tensors)[0]))


def test_pinned_memory_is_copied_without_waiting_and_may_be_given_back() -> None:
    """A copy from it returns while the device is still busy; and it can be taken and dropped again and again."""
    for _ in range(3):
        memory = pinned_bytes(2**26 + 1)
        assert memory.is_pinned() and not memory.any()
        target = torch.empty(memory.shape, dtype=torch.uint8, device=DEVICE)
        square = torch.randn(8192, 8192, device=DEVICE)
        torch.cuda.synchronize()
        memory.fill_(7)
        for _ in range(5):
            torch.mm(square, square)
        target.copy_(memory, non_blocking=True)
        assert not torch.cuda.current_stream().query(), "the copy was waited for"
        assert bool((target == 7).all())
        del memory


def test_what_is_chosen_leaves_nothing_behind_and_is_in_the_record() -> None:
    spec = ModelSpec.from_architecture("small", SIZES["llama"])
    pools = KvTensors(spec, 32, 100, 100, DEVICE, torch.bfloat16)
    _, note = choose_copier(pools)
    assert not pools.gpu.any() and not pools.cpu.any()
    assert "wrongly" not in note and "Error" not in note, note
    model = load_model(ModelAsked(spec, device="cuda:0", attention="reference"))
    worker = TorchWorker(model, 32, WallClock(), options=TorchOptions(max_batch_requests=4, graphs=False))
    assert worker.start(100, 100).settings["copies"] == note
    worker.close()
