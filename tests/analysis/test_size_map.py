"""The map of sizes as a picture: its cells, the knee, the objective's border."""

import csv

import pytest

from analysis.figures import draw_all
from analysis.sweep import Source
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.size_map import SETTINGS, Question
from tests.analysis.sweeps import answered
from tests.results.trials import trial_fields

GPU, CPU = ("1GB", "2GB", "4GB"), ("0GB", "8GB", "16GB")
FOUND = {(0, 0): 0.2, (0, 2): 0.5, (2, 0): 0.69, (2, 2): 0.7, (1, 1): 0.6}


def mapped(store, found=FOUND, slo=500.0, **more):
    """A map of one seed; the first token takes a second less 700 ms a share found."""
    question = Question(gpu=GPU, cpu=CPU, seeds=(0,), slo_ttft_ms=slo, knee=0.95, **more)
    overrides = {"cache.gpu": f"choice({','.join(GPU)})", SETTINGS: question.model_dump_json()}
    sweep = store.open_sweep("key", "size", None, "python runners/size.py", overrides, 0, "host", None)
    for place, share in found.items():
        number = question.jobs.index((place, 0))
        engine = {"budget_gpu_tokens": 1000 * (place[0] + 1), "budget_cpu_tokens": 1000 * place[1]}
        config = {"cache": dict(zip(("gpu", "cpu"), question.sizes(place), strict=True))}
        fields = trial_fields(fingerprint=f"print {number}", engine=engine, kv_bytes_per_token=2**20, config=config)
        trial = store.begin_trial({**fields, "seed": 0})
        store.link(sweep, trial, number, reused=False)
        store.add_turns(trial, [answered("a", 1, 5.0)])
        values = {
            "miss_rate": 1 - share,
            "ttft_ms_p90": 1000 - 700 * share,
            "ttft_ms_p50": 100.0,
            "bound_hit_rate": 0.9,
        }
        store.add_metrics(trial, [MetricValue(name, value) for name, value in values.items()])
        store.finish_trial(trial, "completed")
    return Source(store, store.sweep(sweep))


def test_the_map_shows_what_ran_and_the_border_of_each_question(store, drawn, tmp_path):
    source = mapped(store, slo=600.0)
    drawings, problems = draw_all(source, tmp_path)
    assert not problems
    assert [one.name for one in drawings] == ["size_map"], "no picture a cell beside it"
    picture = drawn["size_map"]
    assert not picture.clipped
    # 0.69 of 0.70 and more reach 95 %: the smallest such cell is (2, 0).
    assert picture.lines["knee/chosen"] == [(0.0, 2.0)]
    assert picture.lines["knee"] == [(-0.5, 2.5), (-0.5, 1.5), (2.5, 1.5)]
    # 580 ms at (1, 1), 517 at (2, 0): two smallest cells, and the one with less GPU memory is named.
    assert picture.lines["objective"] == [(-0.5, 2.5), (-0.5, 1.5), (0.5, 0.5), (2.5, 0.5)], "corners of steps"
    assert picture.lines["objective/chosen"] == [(1.0, 1.0)]
    assert picture.caption.count("Of those that ran 2 GB of GPU and 8 GB of CPU KV") == 1
    with (tmp_path / "size_map.csv").open() as file:
        rows = {(row["cache.gpu"], row["cache.cpu"]): row for row in csv.DictReader(file)}
    assert len(rows) == 9
    assert (rows["1GB", "8GB"]["run"], rows["1GB", "8GB"]["found"], rows["1GB", "8GB"]["trials"]) == ("False", "", "")
    assert float(rows["2GB", "8GB"]["found"]) == pytest.approx(0.6)


def test_a_map_in_one_pass_shows_what_is_found_and_says_how_it_was_made(store, drawn, tmp_path):
    shares = (((0.1, 0.2, 0.3), (0.2, 0.3, 0.4), (0.3, 0.4, 0.5)),)
    _, problems = draw_all(mapped(store, {}, slo=None, reuse=shares), tmp_path)
    picture = drawn["size_map"]
    assert not problems and not picture.clipped
    assert "open loop" in picture.caption and "open loop" in picture.figure.axes[0].get_title(loc="left")
    assert "COMPUTED, without a trial" in picture.caption
    assert len(picture.figure.axes) == 1, "nobody knows a time"
