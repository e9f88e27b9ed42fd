from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pensieve.core.plan import swap_in
from pensieve.device.asked import ModelAsked
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import load_model
from pensieve.device.transfers.copies import CallCopier
from pensieve.lab.bench import swap
from pensieve.plugins.device.thread_link import ThreadLink
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_spec
from tests.worker.torch.transfers.named import Named


@pytest.fixture(scope="module")
def model():
    spec = tiny_spec("llama", vocab_size=300, max_position_embeddings=2048)
    return load_model(ModelAsked(spec, threads=1))


def test_blocks_lie_in_runs_of_the_length_asked_for():
    assert swap.scattered(6, 2) == (0, 1, 4, 5, 8, 9)
    assert swap.scattered(4, 4) == (0, 1, 2, 3)
    assert max(swap.scattered(128, 8)) < 256


def test_every_figure_stands_beside_its_limit_and_its_peer(model, tmp_path, monkeypatch):
    bench = make_bench("swap", tmp_path, repeats=1)
    monkeypatch.setattr(swap, "load", lambda bench: model)
    monkeypatch.setitem(swap._RESTORED, "cpu", 256)
    monkeypatch.setattr(swap, "_FRAGMENT_BLOCKS", (1,))
    swap.run(bench)
    assert bench.gaps == []
    results = bench.results["swap"]
    backends = {one.label.split(" of ")[0].split(",")[0]: [m.backend for m in one.measured] for one in results}
    assert backends["swap in"] == ["ours", "plain_copy"]
    assert backends["restore 256"] == ["pipelined", "sequential"]
    assert all(m.values for result in results for m in result.measured)
    pipelined = next(m for result in results for m in result.measured if m.backend == "pipelined")
    assert [*pipelined.figures] == ["speedup", "overlap_pct", "transfer_ms", "compute_ms"]


def test_on_a_gpu_what_serves_is_measured_beside_a_call_a_run(monkeypatch):
    """With the ways and links of a machine that has none: names, notes, and that each brings what it is timed for."""
    links = []

    def link(device, *copiers):
        links.append(copiers)
        return ThreadLink()

    monkeypatch.setattr(swap, "choose_copier", lambda tensors: (chosen, "best"))
    monkeypatch.setattr(swap, "CudaLink", link)
    notes = []
    bench = SimpleNamespace(on_gpu=True, device=torch.device("cpu"), note=notes.append)
    tensors = KvTensors(tiny_spec("llama"), 32, 8, 8, torch.device("cpu"), torch.float32)
    chosen = CallCopier()
    assert list(swap._transfers(bench, tensors)) == ["ours"], "nothing is timed twice"
    chosen = Named("another")
    tensors.cpu.fill_(0.5)
    transfers = swap._transfers(bench, tensors)
    assert list(transfers) == ["ours", "call_a_run"] and links[1] == (chosen,)
    assert notes == 2 * ["Copies between the tiers: best."]
    for transfer in transfers.values():
        tensors.gpu.zero_()
        swap._swap_in(transfer, tensors.layers, swap_in(0, (0, 2), (2, 0)))
        transfer.finish()
        assert (tensors.gpu[:, [0, 2]] == 0.5).all() and not tensors.gpu[:, 1].any()
        transfer.close()
