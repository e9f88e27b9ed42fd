from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.errors import PensieveError
from pensieve.lab.bench import cpu_path
from pensieve.lab.bench.cpu_path import Step, Timing
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_model


@pytest.mark.parametrize("step", [Step("prefill", 1, 0, 40), Step("decode", 3, 70, 1, scattered=True)])
def test_every_figure_stands_beside_its_floor_and_its_peer(step: Step) -> None:
    model, fallback = tiny_model("llama"), tiny_model("llama", fused=False)
    timing = cpu_path.measure(model, fallback, step, rounds=3)
    for times in (timing.floor, timing.ours, timing.fallback, timing.peer):
        assert len(times) == 3
        assert min(times) > 0
    ours, plain, peer = cpu_path._backends(timing, model, fallback, goal=2.0)
    assert [one.backend for one in (ours, plain, peer)] == ["ours", "plain_modules", "transformers"]
    assert ours.figures[0].value == min(timing.ours) / min(timing.floor) and ours.figures[0].limit == 2.0
    assert cpu_path._case(step, timing).floor == min(timing.floor)


@pytest.mark.parametrize("scattered", [False, True])
def test_ours_and_the_peer_compute_the_same(scattered: bool) -> None:
    """The last logits of a prefill, by both timed functions."""
    model = tiny_model("llama")
    step = Step("prefill", 1, 0, 90, scattered=scattered)
    with torch.inference_mode():
        ours: Any = cpu_path._paged(model, step)()
        run = cpu_path._transformers(model.module, step, model.spec.vocab)
        model.module.set_attn_implementation("sdpa")
        output: Any = run()
    assert torch.allclose(ours, output.logits[0], atol=1e-4)


def test_the_ratio_is_of_the_best_rounds_with_its_quartiles() -> None:
    timing = Timing(floor=[2.0, 1.0, 4.0, 1.0], ours=[2.0, 3.0, 8.0, 4.0], fallback=[], peer=[])
    assert timing.ratio(timing.ours) == (2.0, 2.0, 4.0)


def test_without_a_fused_forward_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = tiny_model("llama", fused=False)
    monkeypatch.setattr(cpu_path, "load_both", lambda *_: (plain, plain))
    with pytest.raises(PensieveError, match="no fused forward to measure"):
        cpu_path.run(make_bench("cpu_path", tmp_path))
