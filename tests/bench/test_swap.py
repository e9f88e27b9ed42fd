import pytest

from pensieve.device.asked import ModelAsked
from pensieve.device.model import load_model
from pensieve.lab.bench import swap
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_spec


@pytest.fixture(scope="module")
def model():
    spec = tiny_spec("llama", vocab_size=300, max_position_embeddings=2048)
    return load_model(ModelAsked(spec, threads=1))


def test_every_figure_stands_beside_its_limit_and_its_peer(model, tmp_path, monkeypatch):
    bench = make_bench("swap", tmp_path, repeats=1)
    monkeypatch.setattr(swap, "load", lambda bench: model)
    monkeypatch.setattr(swap, "_NEW", 64)
    monkeypatch.setattr(swap, "_FRAGMENT_BLOCKS", (1,))
    swap.run(bench)
    swap._pipelined(bench, model, 256)  # as on a GPU
    assert bench.gaps == []
    results = bench.results["swap"]
    backends = {one.label.split(" of ")[0].split(",")[0]: [m.backend for m in one.measured] for one in results}
    assert backends["swap in"] == ["ours", "plain_copy"]
    assert backends["restore 256"] == ["pipelined", "sequential"]
    assert all(m.values for result in results for m in result.measured)
    pipelined = next(m for result in results for m in result.measured if m.backend == "pipelined")
    assert [*pipelined.figures] == ["speedup", "overlap_pct", "transfer_ms", "compute_ms"]
