import csv
import json
import zipfile

import pyarrow.parquet as pq
import pytest

from analysis import figures, style
from pensieve.errors import MissingSeries, ResultsError
from pensieve.lab.results.export import baseline_report, bundle_sweep, export_sweep
from pensieve.lab.results.store import TURN_COLUMNS, open_store
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields, turn

FIELDS = ["baseline", "model_id", "prompt_tokens", "new_tokens", "batch_size", "runs", "aggregates"]
RUN_FIELDS = [
    "run_id", "total_ms", "per_token_ms", "tokens_generated", "gpu_util_pct", "memory_bw_gbps", "host_to_device_mb",
    "device_to_host_mb", "queue_ms", "compute_ms", "transfer_ms", "sent_bytes", "received_bytes",
]  # fmt: skip


def served(session, number, admitted_s, finished_s, **changed):
    fields = {
        "intended_s": admitted_s - 0.5, "admitted_s": admitted_s, "finished_s": finished_s, "prompt_tokens": 40,
        "latency_ms": (finished_s - admitted_s + 0.5) * 1e3, "h2d_bytes": 2_000_000, "queue_ms": 500.0,
        "transfer_ms": 300.0, "sent_bytes": 4096, **changed,
    }  # fmt: skip
    return turn(session, number, tokens=(1, 2, 3, 4), **fields)


def test_a_report_has_the_fields_and_the_numbers(tmp_path):
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0,1")
    turns = [
        served("w", 1, 0, 1, phase="warmup"),
        served("a", 1, 1, 3),
        served("b", 1, 2, 4),
        served("a", 2, 3, 4, prompt_tokens=60),
        served("c", 1, 3, 9, status="timeout"),
    ]
    trial = add_trial(store, sweep, 0, "pensieve", turns, {"gpu_util_pct": 55.0})
    (job,) = store.trials_of_sweep(sweep)
    report = baseline_report(store, [job])
    assert list(report) == [*FIELDS, "notes", "simulated", "network"]
    assert list(report["notes"]) == ["memory_bw_gbps", "device_to_host_mb", "compute_ms", "received_bytes"]
    assert "never estimated" in report["notes"]["memory_bw_gbps"]
    assert [list(run) for run in report["runs"]] == [RUN_FIELDS] * 3
    assert [run["run_id"] for run in report["runs"]] == [f"{trial}/a/1", f"{trial}/b/1", f"{trial}/a/2"]
    assert report["runs"][0] == {
        "run_id": f"{trial}/a/1", "total_ms": 2500.0, "per_token_ms": 625.0, "tokens_generated": 4,
        "gpu_util_pct": 55.0, "memory_bw_gbps": None, "host_to_device_mb": 2.0, "device_to_host_mb": None,
        "queue_ms": 500.0, "compute_ms": None, "transfer_ms": 300.0, "sent_bytes": 4096, "received_bytes": None,
    }  # fmt: skip
    assert (report["baseline"], report["model_id"]) == ("pensieve", "tiny")
    assert (report["prompt_tokens"], report["new_tokens"]) == (40, 4)
    assert report["batch_size"] == 2  # a's second turn begins when its first ends
    assert report["aggregates"] == {
        "mean_total_ms": pytest.approx((2500 + 2500 + 1500) / 3), "p95_total_ms": 2500.0,
        "mean_per_token_ms": pytest.approx((625 + 625 + 375) / 3),
    }  # fmt: skip


def test_a_sweep_becomes_files(tmp_path):
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0,1", cache="demo,small")
    for job, (seed, cache) in enumerate([(0, "demo"), (1, "demo"), (0, "small"), (1, "small")]):
        config = {"model": {"name": "tiny", "hub_id": "someone/tiny"}, "cache": {"name": cache}}
        add_trial(store, sweep, job, "pensieve", conversation_turns([5.0, 6.0]), seed=seed, cache=cache, config=config)
    paths = export_sweep(store, sweep, tmp_path / "export")
    assert [path.name for path in paths] == [
        "pensieve--cache=demo.json", "pensieve--cache=small.json", "turns.csv", "turns.parquet",
    ]  # fmt: skip
    report = json.loads(paths[0].read_text())
    assert report["model_id"] == "someone/tiny"
    assert len(report["runs"]) == 2 * 6
    with paths[2].open() as file:
        rows = list(csv.DictReader(file))
    table = pq.read_table(paths[3])
    assert len(rows) == table.num_rows == 4 * 7
    assert set(TURN_COLUMNS) < set(table.column_names)
    assert {(row["h2d_bytes"], row["sent_bytes"]) for row in rows} == {("", "")}, "nobody counted"
    assert set(table.column("h2d_bytes").to_pylist()) == {None}
    assert [float(row["ttft_ms"]) for row in rows] == table["ttft_ms"].to_pylist()
    assert {row["cache"] for row in rows} == {"demo", "small"}
    assert table["prompt_tokens"].to_pylist() == [None] * 28


@pytest.mark.parametrize(("write", "name"), [(export_sweep, "export"), (bundle_sweep, "sweep.zip")])
def test_what_cannot_be_written_says_so(tmp_path, write, name):
    store = open_store(tmp_path)
    sweep = open_sweep(store)
    with pytest.raises(MissingSeries, match="No trial of sweep 1 is completed"):
        write(store, sweep, tmp_path / name)
    add_trial(store, sweep, 0, "pensieve", conversation_turns([5.0]))
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"another f\w+ with --to"):
        write(store, sweep, tmp_path / "file" / name)


@pytest.fixture
def swept(tmp_path):
    """A store with two sweeps of two trials; the first also has a failed attempt in the end."""
    outputs = tmp_path / "outputs"
    store = open_store(outputs)
    for key in ("first", "second"):
        overrides = {"seed": "0", "baseline": "pensieve,stateless", "key": key}
        sweep = store.open_sweep(key, "chat", "pensieve", "run.py -m", overrides, 2, "host", None)
        for job, (baseline, ms) in enumerate((("pensieve", 10.0), ("stateless", 20.0))):
            turns = conversation_turns([ms, ms + 1, ms + 2])
            for one in turns:
                history = 10 * (one.turn - 1)
                one.prompt_tokens, one.new_tokens, one.history_tokens = history + 10, 10, history
                one.gpu_hit_tokens, one.cpu_hit_tokens, one.recomputed_tokens = history, 0, 0
            tokens = outputs / "runs" / key
            add_trial(store, sweep, job, baseline, turns, tokens=tokens, platform=key, config={"key": key, "seed": 0})
    failed = store.begin_trial(trial_fields("pensieve/first/{key: first, seed: 0}"))
    store.link(1, failed, 0, reused=False)
    store.finish_trial(failed, "failed", error="no")
    return store


@pytest.mark.slow
def test_the_figures_of_a_bundle_are_the_sweeps(swept, tmp_path, monkeypatch):
    path = bundle_sweep(swept, 1, tmp_path / "sweep.zip")
    folder = tmp_path / "elsewhere"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    assert sorted(p.name for p in (folder / "configs").iterdir()) == [f"trial-{i}.json" for i in (1, 2, 5)]
    assert json.loads((folder / "configs" / "trial-1.json").read_text())["key"] == "first"
    copy = open_store(folder / "outputs", create=False)
    assert [(j.job, j.last.id, j.trial.id) for j in copy.trials_of_sweep(1)] == [(0, 5, 1), (1, 2, 2)]
    assert copy.turns_of(1) == swept.turns_of(1)
    assert copy.metrics_of(2) == swept.metrics_of(2)
    (tokens,) = copy.artifacts_of(1, "tokens")
    assert tokens.path.read_bytes() == swept.artifacts_of(1, "tokens")[0].path.read_bytes()
    with pytest.raises(ResultsError, match="no sweep 2"):
        copy.sweep(2)
    monkeypatch.setattr(style, "save", lambda figure, stem, *_, **__: [stem] * 3)  # only data are compared
    drawn = []
    for outputs in (folder / "outputs", swept.root):
        monkeypatch.setenv("PENSIEVE_OUTPUTS", str(outputs))
        assert figures.main(["--sweep", "1"]) == 0
        drawn.append({path.name: path.read_text() for path in (outputs / "figures").rglob("*.csv")})
    assert drawn[0] == drawn[1] and "ttft_by_turn.csv" in drawn[0]
