"""The report of a sweep: what it says, where it goes, and what it leaves in the database."""

from html.parser import HTMLParser

import pytest

from analysis import registry, report
from pensieve.lab.results import mlflow_runs
from pensieve.lab.results.store import open_store
from tests.results.synthetic import recorded_claims
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

FAST = [40.0, 42.0, 44.0, 44.0, 44.0]
SLOW = [40.0, 80.0, 150.0, 200.0, 220.0]
USERS = {"workload": {"name": "chat", "users": 6}, "cache": {"name": "demo", "gpu": "4096 tokens"}, "seed": 0}


class Page(HTMLParser):
    """A page that was read: whole in one file, and what it says."""

    def __init__(self, path):
        super().__init__()
        self.html, self.text, self.tags = path.read_text(encoding="utf-8"), "", []
        self.feed(self.html)
        assert not {"script", "link", "iframe", "object", "embed", "base"} & set(self.tags)
        assert "url(" not in self.html and "@import" not in self.html
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        assert all(named[name].startswith(("#", "data:image/png;base64,")) for name in ("src", "href") if name in named)

    def handle_data(self, data):
        self.text += f"{data} "


def fill(store, ttft=None, seeds=3, **changed):
    ttft = ttft or {"pensieve": FAST, "stateless": SLOW}
    sweep = open_sweep(store, n_expected=seeds * len(ttft), seed="0,1,2", baseline=",".join(ttft))
    for seed in range(seeds):
        for place, (name, medians) in enumerate(ttft.items()):
            fields = {"seed": seed, "config": USERS, "flags": {"load": "closed"}, "device": "cpu"} | changed
            add_trial(store, sweep, seed * len(ttft) + place, name, conversation_turns(medians), **fields)
    return sweep


@pytest.fixture
def without_figures(monkeypatch):
    """They take a second each."""
    monkeypatch.setattr(registry, "FIGURES", {})


def page_of(outputs, sweep):
    return Page(outputs / "reports" / f"sweep-{sweep}.html")


def verdicts(store, sweep):
    return {row.name: row.verdict for row in recorded_claims(store, sweep)}


def test_one_command_writes_the_page_and_the_verdicts(outputs, capsys):
    store = open_store(outputs)
    sweep = fill(store, seeds=5, flags={"load": "closed", "late_sends": "A turn was late."})
    assert report.main([]) == 0
    out = capsys.readouterr().out
    path = outputs / "reports" / f"sweep-{sweep}.html"
    assert out.splitlines() == [str(path)]
    page = page_of(outputs, sweep)
    for part in (
        "10 of 10", "Random weights", "Time to first token by turn", "A turn was late. 1-10", "cache.gpu 4096 tokens",
        "python analysis/report.py --sweep 1", "pensieve against stateless, n = ",
    ):  # fmt: skip
        assert part in page.text
    assert page.tags.count("img") == 1
    assert verdicts(store, sweep)["paper_opt_13b_sharegpt"] == "not comparable"


def test_again_replaces_the_verdicts_of_the_sweep(outputs, tmp_path, without_figures):
    claims = tmp_path / "claims.yaml"
    claims.write_text(
        "- {name: faster, text: Faster, source: me, measure: speedup, arguments: {turn: 5}, of: [pensieve],"
        " against: [stateless], claimed: {low: 2}, unit: x}"
    )
    store = open_store(outputs)
    sweep = fill(store, seeds=5)
    for _ in range(2):
        assert report.main(["--sweep", str(sweep), "--claims", str(claims)]) == 0
        assert verdicts(store, sweep) == {"faster": "holds"}
    assert "1 holds, 0 fails, 0 inconclusive." in page_of(outputs, sweep).text
    assert "✓ holds Faster > 2 × 5.00 [5.00, 5.00]" in page_of(outputs, sweep).text


def test_names_from_the_database_are_escaped(outputs, without_figures):
    store = open_store(outputs)
    hostile = "<img src=x onerror=alert(1)>\"'&"
    flags, engine = {"load": hostile, "own": hostile}, {hostile: hostile}
    sweep = fill(
        store, {"pensieve": FAST, "stateless": SLOW, hostile: FAST}, device=hostile, model=hostile, flags=flags,
        engine=engine, environment={"host": hostile}, config={**USERS, "model": {"name": hostile}},
    )  # fmt: skip
    trial = store.begin_trial(trial_fields("gone", baseline=hostile, config=USERS, model=hostile))
    store.link(sweep, trial, 99, reused=False)
    store.finish_trial(trial, "failed", hostile)
    assert report.main([]) == 0
    page = page_of(outputs, sweep)
    assert "<img src=x" not in page.html
    assert page.text.count("alert(1)") > 10


@pytest.mark.slow
def test_it_goes_to_the_sweep_s_run_in_mlflow(outputs, capsys, without_figures):
    pytest.importorskip("mlflow")
    store = open_store(outputs)
    sweep = fill(store)
    assert report.main([]) == 0 and "MLflow" not in capsys.readouterr().out
    mlflow_runs.copy_sweep(outputs, store, sweep)
    run = store.sweep(sweep).mlflow_run_id
    assert report.main([]) == 0
    assert f"Logged to MLflow as report.html of run {run}." in capsys.readouterr().out
    [written] = outputs.glob(f"mlartifacts/**/{run}/artifacts/report.html")
    assert written.read_text().startswith("<!doctype html>")


def test_a_sweep_without_completed_trials_still_has_its_page(outputs, without_figures):
    store = open_store(outputs)
    sweep = open_sweep(store, n_expected=3)
    trial = store.begin_trial(trial_fields("one", config=USERS))
    store.link(sweep, trial, 0, reused=False)
    store.finish_trial(trial, "failed", "The GPU caught fire; buy another.")
    assert report.main(["--sweep", str(sweep)]) == 0
    assert "The sweep is running: 2 of 3 trials have not ended, 1 did not complete." in page_of(outputs, sweep).text
    store.set_sweep(sweep, status="failed")
    assert report.main([]) == 1, "latest is a sweep that can answer"
    assert report.main(["--sweep", str(sweep)]) == 0
    text = page_of(outputs, sweep).text
    assert "The GPU caught fire" in text
    assert "3 of 3 trials did not complete" in text
    assert "No trial of this sweep is completed" in text and "supports no figure" in text
    assert set(verdicts(store, sweep).values()) == {"not comparable"}
