import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from analysis import figures, style
from pensieve.errors import MissingSeries, ResultsError
from pensieve.lab.results.export import bundle_sweep
from pensieve.lab.results.store import open_store
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

CHECKOUT = Path(__file__).resolve().parents[2]


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
def test_a_bundle_redraws_its_figures(swept, tmp_path, monkeypatch):
    path = bundle_sweep(swept, 1, CHECKOUT, tmp_path / "bundle" / "sweep.zip")
    folder = tmp_path / "elsewhere"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    assert sorted(p.name for p in (folder / "configs").iterdir()) == [f"trial-{i}.json" for i in (1, 2, 5)]
    assert json.loads((folder / "configs" / "trial-1.json").read_text())["key"] == "first"
    assert "sqlalchemy==" in (folder / "lock.txt").read_text()
    assert (folder / "LICENSE").read_bytes() == (CHECKOUT / "LICENSE").read_bytes()  # of the code that it holds
    copy = open_store(folder / "outputs", create=False)
    assert [(j.job, j.last.id, j.trial.id) for j in copy.trials_of_sweep(1)] == [(0, 5, 1), (1, 2, 2)]
    assert copy.turns_of(1) == swept.turns_of(1)
    assert copy.metrics_of(2) == swept.metrics_of(2)
    (tokens,) = copy.artifacts_of(1, "tokens")
    assert tokens.path.read_bytes() == swept.artifacts_of(1, "tokens")[0].path.read_bytes()
    with pytest.raises(ResultsError, match="no sweep 2"):
        copy.sweep(2)
    with (folder / "pensieve" / "__init__.py").open("a") as package:
        package.write("\nimport sys\n\nprint('from the bundle', file=sys.stderr)\n")
    done = redraw(folder, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "from the bundle" in done.stderr  # its own code, not the one that is installed here
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(swept.root))
    monkeypatch.setattr(style, "save", lambda figure, stem, *_, **__: [stem] * 3)  # only data are compared
    assert figures.main(["--sweep", "1"]) == 0
    drawn, original = (sorted(at.rglob("*.csv")) for at in (folder / "outputs" / "figures", swept.root / "figures"))
    assert [path.name for path in drawn] == [path.name for path in original]
    assert "ttft_by_turn.csv" in [path.name for path in drawn]
    for there, before in zip(drawn, original, strict=True):
        assert there.read_text() == before.read_text()
    pictures = sorted(path.stem for path in (folder / "outputs" / "figures").rglob("*.png"))
    assert "ttft_by_turn" in pictures and "speedup" not in pictures
    assert all(path.stat().st_size > 10_000 for path in (folder / "outputs" / "figures").rglob("*.png"))


def redraw(folder, **environment):
    """sh redraw.sh, as someone who has nothing of ours in the environment."""
    ours = ("PENSIEVE_OUTPUTS", "PYTHONPATH", "VIRTUAL_ENV", "PYTHON")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(["sh", "redraw.sh"], cwd=folder, env={**env, **environment}, capture_output=True, text=True)


def test_what_cannot_be_bundled_says_so(tmp_path):
    store = open_store(tmp_path)
    sweep = open_sweep(store)
    with pytest.raises(MissingSeries, match="bundle then"):
        bundle_sweep(store, sweep, CHECKOUT, tmp_path / "sweep.zip")
    add_trial(store, sweep, 0, "pensieve", conversation_turns([1.0]))
    with pytest.raises(ResultsError, match="bundle from a checkout"):
        bundle_sweep(store, sweep, tmp_path, tmp_path / "sweep.zip")
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="another file with --to"):
        bundle_sweep(store, sweep, CHECKOUT, tmp_path / "file" / "sweep.zip")
    assert not list(tmp_path.glob("*.partial"))
