from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.bench import swap
from pensieve.bench.returning import Returning
from pensieve.bench.unused_tier import UnusedTier
from pensieve.worker.torch.model import LoadedModel, load_model
from pensieve.worker.torch.thread_link import ThreadLink
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_spec


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    spec = tiny_spec("llama", vocab_size=300, max_position_embeddings=2048)
    return load_model(spec, "random", None, None, 0, "cpu", threads=1)


def test_blocks_lie_in_runs_of_the_length_asked_for() -> None:
    assert swap._scattered(6, 2) == (0, 1, 4, 5, 8, 9)
    assert swap._scattered(4, 4) == (0, 1, 2, 3)
    assert max(swap._scattered(128, 8)) < 256


def test_a_conversation_returns_from_the_cpu_as_often_as_it_is_asked(model: LoadedModel) -> None:
    link = ThreadLink()
    returning = Returning(model, 256, 8, 64, link)
    returning.fill()
    link.throttle(returning.tokens * model.spec.kv_bytes_per_token / 0.2)
    returning.weigh()
    split = returning.split()
    assert split.load_s == pytest.approx(0.2, rel=0.3), "the profile measures the link as it is"
    assert split.predicted_s <= min(split.load_s, split.recompute_s)
    assert returning.ttft_ms("load") > 150
    assert returning.ttft_ms("hybrid") > 0 and returning.ttft_ms("recompute") > 0
    assert returning.hit_ms() > 0
    returning.close()


def test_the_tier_that_is_unused_is_there_and_unused(model: LoadedModel) -> None:
    for with_tier in (True, False):
        tier = UnusedTier(model, 2, 40, with_tier)
        assert bool(tier.engine.cache.cpu_blocks) is with_tier
        assert tier.step_ms() > 0 and tier.step_ms() > 0
        tier.close()


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
    assert backends["swap in"] == ["ours", "gathered", "plain_copy"]
    assert backends["restore 256"] == ["pipelined", "sequential"]
    assert backends["hit on CPU"] == ["load", "recompute"]
    assert backends["hybrid restore"] == ["hybrid", "load", "recompute"]
    assert backends["decode 8 over 256"] == ["tier_unused", "no_tier"]
    assert all(m.values for result in bench.results for m in result.measured)
    pipelined = next(m for result in bench.results for m in result.measured if m.backend == "pipelined")
    assert [figure.name for figure in pipelined.figures] == ["speedup", "overlap_pct", "transfer_ms", "compute_ms"]
