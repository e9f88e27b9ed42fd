from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pensieve.bench import swap
from pensieve.errors import EngineMissing
from pensieve.plan import Copy
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.model import LoadedModel, load_model
from pensieve.worker.torch.transfers.choice import Copying
from pensieve.worker.torch.transfers.copies import CallCopier, copy_runs
from pensieve.worker.torch.transfers.lanes import ThreadLink
from pensieve.worker.torch.transfers.link import Copier
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_spec


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    spec = tiny_spec("llama", vocab_size=300, max_position_embeddings=2048)
    return load_model(spec, "random", None, None, 0, "cpu", threads=1)


def test_blocks_lie_in_runs_of_the_length_asked_for() -> None:
    assert swap.scattered(6, 2) == (0, 1, 4, 5, 8, 9)
    assert swap.scattered(4, 4) == (0, 1, 2, 3)
    assert max(swap.scattered(128, 8)) < 256


def test_every_figure_stands_beside_its_limit_and_its_peer(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("swap", tmp_path, repeats=1)
    monkeypatch.setattr(swap, "load", lambda bench: model)
    monkeypatch.setattr(swap, "_CPU", (256,))
    monkeypatch.setattr(swap, "_FRAGMENT_BLOCKS", (1,))
    monkeypatch.setattr(swap, "LINKS", {"gen4_x8": 0.35})
    swap.run(bench)
    assert bench.gaps == []
    backends = {result.case.label.split(" of ")[0].split(",")[0]: [m.backend for m in result.measured]
                for result in bench.results}  # fmt: skip
    assert backends["swap in"] == ["ours", "plain_copy"], "gathering is timed for the smallest fragments alone"
    assert backends["restore 256"] == ["pipelined", "sequential"]
    assert backends["hit on CPU"] == ["load", "recompute"]
    assert backends["hybrid restore"] == ["hybrid", "load", "recompute"]
    assert backends["decode 8 over 256"] == ["tier_unused", "no_tier"]
    assert all(m.values for result in bench.results for m in result.measured)
    pipelined = next(m for result in bench.results for m in result.measured if m.backend == "pipelined")
    assert [figure.name for figure in pipelined.figures] == ["speedup", "overlap_pct", "transfer_ms", "compute_ms"]


def test_on_a_gpu_every_way_of_copying_is_measured_beside_what_auto_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ways and links of a machine that has none: names, notes, and what is left out."""
    links: list[tuple[object, ...]] = []

    def choose(tensors: KvTensors, way: str) -> Copying:
        if way == "kernel":
            raise EngineMissing("hardware.copies=kernel: it needs the package triton; use hardware.copies=auto.")
        return Copying(CallCopier(), CallCopier(), f"in: best for {way}", {})

    def link(device: torch.device, *copiers: object) -> ThreadLink:
        links.append(copiers)
        return ThreadLink()

    monkeypatch.setattr(swap, "choose_copying", choose)
    monkeypatch.setattr(swap, "CudaLink", link)
    notes: list[str] = []
    bench = SimpleNamespace(on_gpu=True, device=torch.device("cpu"), note=notes.append)
    tensors = KvTensors(tiny_spec("llama"), 32, 8, 8, torch.device("cpu"), torch.float32)
    tensors.cpu.fill_(0.5)
    transfers = swap._transfers(bench, tensors)
    assert list(transfers) == ["auto", "dma", "call_a_run"]
    assert [len(copiers) for copiers in links] == [2, 2, 0], "a call a run is what a link does by itself"
    assert notes[:2] == ["hardware.copies=auto: in: best for auto.", "hardware.copies=dma: in: best for dma."]
    assert "triton" in notes[2]
    for transfer in transfers.values():
        tensors.gpu.zero_()
        assert swap._held_ms(transfer, tensors.layers, Copy(0, (0, 2), (2, 0))) > 0
        assert (tensors.gpu[:, [0, 2]] == 0.5).all() and not tensors.gpu[:, 1].any()
        transfer.close()


def test_the_ways_of_copying_are_held_against_each_other_beside_compute(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way copies the same blocks, none beside another, and the forward finds them: with the stand-in for streams."""
    bench = make_bench("swap", tmp_path, repeats=2)
    links: list[ThreadLink] = []
    used: list[Copier] = []

    def link(device: torch.device) -> ThreadLink:
        links.append(ThreadLink(copy=lambda piece: (used.append(links[0].inward.copier), copy_runs(piece))[1]))
        return links[0]

    auto, dma = CallCopier(), CallCopier()
    ways = {"auto": Copying(auto, auto, "", {}), "dma": Copying(dma, dma, "", {})}
    monkeypatch.setattr(swap, "CudaLink", link)
    monkeypatch.setattr(swap, "ways_of_copying", lambda bench, tensors: ways)
    swap._beside_compute(bench, model, 128)
    case = bench.results[0].case
    assert [m.backend for m in bench.results[0].measured] == ["auto", "dma"] and bench.gaps == []
    assert case.label == "restore 128 scattered, compute 512" and case.floor is not None and case.floor > 0
    # Three rounds, the first for warming up: auto with compute and alone, dma with compute.
    assert (used.count(auto), used.count(dma)) == (3 * 2 * model.spec.layers, 3 * model.spec.layers)
