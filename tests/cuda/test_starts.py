"""What a worker's start costs the second time in a process, and what cache.gpu=auto reserves beside the blocks."""

from __future__ import annotations

import pytest

from pensieve.clock import WallClock
from pensieve.worker.torch import shelf
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.options import TorchOptions
from pensieve.worker.torch.transfers import choice, copies
from pensieve.worker.torch.worker import TorchWorker

from .serving import CHUNK, Hand, tiny
from .standin.machine import Machine


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_decided", {})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry a measurement."""
    entries: list[str] = []
    decide = choice.decide_copying

    def watched(tensors: KvTensors, way: choice.CopyWay, *rest: object) -> choice.Copying:
        entries.append(way)
        return decide(tensors, way, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(choice, "decide_copying", watched)
    return entries


def started(blocks: int = 40, way: choice.CopyWay = "dma", chunk: int = CHUNK) -> dict[str, object]:
    worker = TorchWorker(tiny(), chunk, WallClock(), options=TorchOptions(graphs=False, copies=way))
    settings = worker.start(blocks, blocks).settings
    worker.close()
    return settings


def test_copies_are_measured_once_for_pools_alike(device: Machine, measured: list[str]) -> None:
    first, second = started(), started()
    assert len(measured) == 1 and first["copies_measured"]
    assert (second["copies"], second["copies_measured"]) == (first["copies"], first["copies_measured"])
    started(chunk=2 * CHUNK)
    assert len(measured) == 2, "blocks of another size"
    started(blocks=8)
    assert len(measured) == 3, "too few blocks for the same samples"
    started(way="auto")
    assert len(measured) == 4


def test_a_way_that_no_longer_brings_every_byte_is_measured_again(
    device: Machine, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = started()["copies"]
    kind = copies.BatchCopier if "a call a layer" in str(chosen) else copies.CallCopier
    monkeypatch.setattr(kind, "prepare", lambda self, haul: lambda layer: None)  # copies nothing
    assert started()["copies"] != chosen
    assert len(measured) == 2


def test_kept_pinned_memory_holds_nothing_of_the_worker_before(device: Machine) -> None:
    """Blocks that one conversation left in the CPU tier are zero for the next worker, which swaps out and in as ever."""
    with shelf.open_shelf():
        hand = Hand(tiny(), TorchOptions(max_batch_requests=2, copies="dma"))
        address = hand.worker.tensors.cpu.data_ptr()
        hand.worker.tensors.cpu.fill_(7)
        hand.close()
        del hand
        again = Hand(tiny(), TorchOptions(max_batch_requests=2, copies="dma"))
        assert again.worker.tensors.cpu.data_ptr() == address
        assert not again.worker.tensors.cpu.any()
        assert again.worker.tensors.cpu.is_pinned()
        again.prompt()
        again.close()
