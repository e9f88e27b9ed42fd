from __future__ import annotations

from typing import Any

import pytest
import torch

from pensieve.bench import cpu_path
from pensieve.bench.cpu_path import Case, Timing
from tests.worker.torch.driver import tiny_model


@pytest.mark.parametrize("case", [Case("prefill", 1, 0, 40), Case("decode", 3, 70, 1, scattered=True)])
def test_every_figure_stands_beside_its_floor_and_its_peer(case: Case) -> None:
    model, fallback = tiny_model("llama"), tiny_model("llama", fused=False)
    timing = cpu_path.measure(model, fallback, case, rounds=3)
    for times in (timing.floor, timing.ours, timing.fallback, timing.peer):
        assert len(times) == 3
        assert min(times) > 0
    table = cpu_path.report(model, {case: timing}, goals=True)
    assert table.row_count == 1


@pytest.mark.parametrize("scattered", [False, True])
def test_ours_and_the_peer_compute_the_same(scattered: bool) -> None:
    """The last logits of a prefill, by both timed functions."""
    model = tiny_model("llama")
    case = Case("prefill", 1, 0, 90, scattered=scattered)
    with torch.inference_mode():
        ours: Any = cpu_path._paged(model, case)()
        run = cpu_path._transformers(model.module, case, model.spec.vocab)
        model.module.set_attn_implementation("sdpa")
        output: Any = run()
    assert torch.allclose(ours, output.logits[0], atol=1e-4)


def test_the_ratio_is_of_the_best_rounds_with_its_quartiles() -> None:
    timing = Timing(floor=[2.0, 1.0, 4.0, 1.0], ours=[2.0, 3.0, 8.0, 4.0], fallback=[], peer=[])
    assert timing.ratio(timing.ours) == (2.0, 2.0, 4.0)


def test_without_a_comparison_it_exits_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(module: object, case: Case, vocab: int) -> None:
        raise ImportError("no DynamicCache")

    monkeypatch.setattr(cpu_path, "load_both", lambda *_: (tiny_model("llama"), tiny_model("llama", fused=False)))
    monkeypatch.setattr(cpu_path, "_transformers", fail)
    assert cpu_path.main([]) == 1
    assert "no DynamicCache" in capsys.readouterr().err
    plain = tiny_model("llama", fused=False)
    monkeypatch.setattr(cpu_path, "load_both", lambda *_: (plain, plain))
    assert cpu_path.main([]) == 1
    assert "no fused forward" in capsys.readouterr().err
