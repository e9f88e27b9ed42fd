from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from pensieve.lab.results import mlflow_live
from pensieve.lab.results.mlflow_runs import headline_metrics, log_trial
from pensieve.lab.results.mlflow_store import client_of
from pensieve.lab.results.mlflow_view import Series, Served, series_of, served
from pensieve.lab.results.store import ENGINE, Reading, open_store
from pensieve.lab.results.sweep_table import sweep_table
from tests.results.trials import add_trial, conversation_turns, open_sweep, turn


def done(at_s: float, number: int, ttft_ms: float, gpu: int | None, **changed: object) -> object:
    history = None if gpu is None else 100
    return turn(
        "s", number, ttft_ms, finished_s=at_s, history_tokens=history, gpu_hit_tokens=gpu, cpu_hit_tokens=20, **changed
    )  # type: ignore[arg-type]


def test_values_are_of_everything_up_to_that_second() -> None:
    turns = [done(0.5, 1, 10.0, None), done(1.5, 2, 30.0, 40), done(1.6, 2, 50.0, 60), done(2.5, 2, 70.0, 80)]
    warmup = done(0.1, 1, 900.0, 0, phase="warmup")
    failed = done(0.2, 1, 900.0, 0, status="failed")
    readings = [Reading(at, ENGINE, "gpu_blocks_used", value, "blocks") for at, value in ((0.1, 3.0), (1.2, 8.0))]
    found = dict(series_of([*turns, warmup, failed], [*readings, Reading(0.1, "cpu", "cpu_util_pct", 50.0, "%")]))
    assert found[1] == {"live/gpu_blocks_used": 3.0, "live/turns": 1.0, "live/ttft_ms_p50/turn_01": 10.0}
    assert found[2]["live/turns"] == 3.0 and found[2]["live/gpu_blocks_used"] == 8.0
    assert "live/ttft_ms_p50/turn_01" not in found[2], "it has not changed"
    assert found[2]["live/history/gpu"] == pytest.approx(0.5)
    assert found[3]["live/ttft_ms_p50/turn_02"] == 50.0
    shares = [found[3][f"live/history/{name}"] for name in ("gpu", "cpu", "missed")]
    assert shares == pytest.approx([0.6, 0.2, 0.2])


def test_a_long_trial_has_no_more_steps_than_a_short_one() -> None:
    turns = [done(float(second), 1, 10.0, None) for second in range(1, 5000)]
    steps = list(series_of(turns, []))
    assert len(steps) <= 100 and steps[-1][1]["live/turns"] == len(turns)
    assert list(series_of([], [])) == []


def test_the_headline_s_ratios_and_means_are_metrics_of_the_sweep(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0", baseline="pensieve,stateless")
    add_trial(store, sweep, 0, "pensieve", conversation_turns([10.0, 10.0]))
    add_trial(store, sweep, 1, "stateless", conversation_turns([20.0, 40.0]))
    table = sweep_table(store, sweep)
    found = headline_metrics(table)
    assert found["ttft_speedup_over/stateless"] == pytest.approx(4.0)
    assert "4.00×" in table.answers[0]
    assert found["ttft_ms_last_turn/stateless"] == pytest.approx(40.0 * (1.0 * 1.1 * 1.2) ** (1 / 3))
    assert found["ttft_ms_first_turn/pensieve"] == pytest.approx(10.0 * (1.0 * 1.1 * 1.2) ** (1 / 3))
    assert not any("over/pensieve" in name for name in found)


def test_settings_of_one_baseline_are_told_apart_by_their_values(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0", eviction="lru,fifo")
    for job, (policy, bound) in enumerate((("lru", 0.9), ("fifo", 0.8))):
        config = {"seed": 0, "eviction": {"name": policy}}
        measured = {"bound_hit_rate": bound}
        add_trial(store, sweep, job, "pensieve", conversation_turns([10.0]), measured, eviction=policy, config=config)
    table = sweep_table(store, sweep)
    found = headline_metrics(table)
    assert (found["bound_hit_rate/lru"], found["bound_hit_rate/fifo"]) == (0.9, 0.8)
    lines = table.text().splitlines()
    [head] = [line for line in lines if line.split()[:1] == ["eviction"]]
    assert head.split()[-2:] == ["%", "%"] and any("bound" in line for line in lines)
    [lru] = [line.split() for line in lines if line.split()[:1] == ["lru"]]
    assert lru[-4:] == ["50.0", "25.0", "25.0", "90.0"]  # GPU, CPU, miss, bound


@pytest.mark.slow
def test_what_is_written_live_is_completed_by_the_copy(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0")
    turns = conversation_turns([10.0, 20.0])
    trial = add_trial(store, sweep, 0, "pensieve", turns)
    row = store.trial(trial)
    tags = mlflow_live_tags(row)
    target = mlflow_live.LiveTarget(str(tmp_path), "pensieve", "live", tags, 1_000)
    told = [one for one in (served(one) for one in turns) if one is not None]
    lines = [
        mlflow_live.begin_line(target),
        mlflow_live.step_line(5, told[:2], {"gpu_blocks_used": 4.0}),
        mlflow_live.step_line(10, told[2:], {"gpu_blocks_used": 6.0}),
        "{half a li",
        mlflow_live.end_line(),
    ]
    answers = io.StringIO()
    mlflow_live.write_live(lines, answers)
    assert answers.getvalue().split() == [mlflow_live.READY, mlflow_live.ENDED]
    run_id = log_trial(tmp_path, store, trial, "pensieve")
    client = client_of(tmp_path)
    [run] = client.search_runs(["1"])
    assert run.info.run_id == run_id and run.info.status == "FINISHED"
    assert run.data.tags["status"] == "completed"
    steps = {m.step: m.value for m in client.get_metric_history(run_id, "live/gpu_blocks_used")}
    assert steps == {5: 4.0, 10: 6.0}, "the copy does not write them again"
    assert run.data.metrics["live/turns"] == len(told)


def mlflow_live_tags(row):  # type: ignore[no-untyped-def]
    from pensieve.lab.results.mlflow_view import trial_tags

    return {**trial_tags(row, None, None, reused=False), "status": "running"}


def test_a_line_says_what_came_since_the_last() -> None:
    told = json.loads(mlflow_live.step_line(5, [Served(1, 10.0, None, None, None)], {"a": 1.0}))
    series = Series()
    series.add(Served(*one) for one in told["turns"])
    assert series.values(told["gauges"]) == {"live/a": 1.0, "live/turns": 1.0, "live/ttft_ms_p50/turn_01": 10.0}
