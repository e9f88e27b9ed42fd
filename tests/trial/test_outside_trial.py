"""A whole trial of an engine of others, from its configuration to its rows."""

import pytest

from pensieve.lab.results.export import baseline_report
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.tokens import compare_tokens
from tests.composed import SHORT
from tests.trial.running import run

SMALLEST = (
    "model.architecture.hidden_size=32", "model.architecture.num_hidden_layers=2", "model.architecture.head_dim=8",
    "model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=2",
    "model.architecture.intermediate_size=64", "hardware=cpu", "hardware.threads=1", "trial.exclusive=false",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ran(tracking, *overrides):
    words = (*SHORT, "workload.request_interval=0", "workload.think_time_s=0", *SMALLEST)
    outcome = run(tracking, *overrides, words=words, folder=overrides[0].replace("=", "-"))
    assert outcome.completed, outcome.error
    return tracking.store.trial(outcome.trial_id)


def whole(tracking, *overrides):
    """A trial of which the engine's server lost no request. llama.cpp's does once in a while on a busy machine, and nothing
    is ever asked twice: such a turn has failed, with no counts."""
    for repeat in range(3):
        trial = ran(tracking, *overrides, f"repeat={repeat}")
        lost = [turn.error for turn in tracking.store.turns_of(trial.id) if turn.status != "completed"]
        if not lost:
            return trial
        assert len(lost) == 1 and "The engine's server" in lost[0], lost
    pytest.fail(f"each of three trials lost a request: {lost}")


def test_llama_cpp_answers_a_workload_with_our_tokens_and_fills_its_rows(tracking):
    pytest.importorskip("xllamacpp")
    store = tracking.store
    theirs, ours = whole(tracking, "baseline=llama_cpp"), ran(tracking, "baseline=gpu_only")
    paths = [store.artifacts_of(trial.id, "tokens")[0].path for trial in (ours, theirs)]
    compared = compare_tokens(*paths)
    assert compared.turns_compared > 8 and compared.turns_differing == 0, compared
    assert theirs.engine["n_ctx"] == theirs.gpu_tokens == theirs.engine["n_parallel"] * theirs.engine["n_ctx_slot"]
    assert "xllamacpp=" in theirs.platform and "xllamacpp" not in ours.platform
    rows = {(t.session, t.turn): t for t in store.turns_of(theirs.id)}
    for turn in store.turns_of(ours.id):
        other = rows[turn.session, turn.turn]
        assert (other.prompt_tokens, other.history_tokens, other.new_tokens) == (
            turn.prompt_tokens, turn.history_tokens, turn.new_tokens,
        )  # fmt: skip
        assert other.gpu_hit_tokens + other.recomputed_tokens == other.history_tokens
        assert other.cpu_hit_tokens is None and other.admitted_s is None
    metrics = {(m.name, m.label): m.value for m in store.metrics_of(theirs.id)}
    assert metrics["ttft_ms_mean", ""] > 0
    assert metrics["cpu_hit_rate", ""] is None and metrics["swapped_in_bytes", ""] is None
    found = sum(t.gpu_hit_tokens for t in rows.values() if t.phase == "chat")
    history = sum(t.history_tokens for t in rows.values() if t.phase == "chat")
    assert metrics["gpu_hit_rate", ""] == pytest.approx(found / history)


def test_what_crosses_a_network_is_in_the_rows_the_metrics_and_the_export_and_simulated_it_says_so(tracking):
    words = ("model=llama3_8b", "cache=small", "workload=decode", "workload.iterations=3", "workload.discard=1")
    outcome = run(tracking, "baseline=semantic_blind", words=words)
    assert outcome.completed, outcome.error
    store, trial = tracking.store, tracking.store.trial(outcome.trial_id)
    assert trial.simulated and trial.engine["network"].startswith("simulated: 25 Gbps")
    rows = [turn for turn in store.turns_of(trial.id) if turn.phase == "throughput"]
    metrics = {m.name: m.value for m in store.metrics_of(trial.id) if not m.label}
    for way in ("sent_bytes", "received_bytes"):
        assert metrics[way] == sum(getattr(turn, way) for turn in rows) > 50 * 2 * 50 * 1e5
        assert metrics[f"{way}_per_token"] == pytest.approx(metrics[way] / 100)
    sweep = store.open_sweep("key", "x", None, None, {}, 1, "host", None)
    store.link(sweep, trial.id, 0, reused=True)
    report = baseline_report(Frame(store, sweep), [trial])
    assert report["simulated"] and report["network"] == trial.engine["network"]
    assert [run["sent_bytes"] for run in report["runs"]] == [turn.sent_bytes for turn in rows]
    for one in report["runs"]:
        assert one["queue_ms"] + one["compute_ms"] + one["transfer_ms"] == pytest.approx(one["total_ms"], abs=1e-3)
