"""runners/results.py as a user types it, on one sweep."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from pensieve.cli import results as results_verb
from tests.runners.sweeping import SHORT
from tests.runners.test_run import run

pytestmark = pytest.mark.slow  # the sweep, in a process of its own

ARGUMENTS = (*SHORT, "-m", "seed=0", "baseline=pensieve,stateless", "tracking.mlflow=false")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("results") / "outputs"
    done = run(outputs, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    return outputs


def results(outputs, *arguments, status=0):
    """In this process: the imports of a new one would take most of the test."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("PENSIEVE_OUTPUTS", str(outputs))
        try:
            found = results_verb(list(arguments))
        except SystemExit as left:
            found = left.code
    assert found == status, out.getvalue() + err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


def test_list_and_show(swept):
    lines = results(swept, "list").stdout.splitlines()
    assert lines[1].startswith("1      completed")
    assert [" ".join(line.split()[:3]) for line in lines[-2:]] == ["2 completed stateless", "1 completed pensieve"]
    assert "ttft_ms_p50" in results(swept, "show", "1").stdout
    assert "There is no sweep 99" in results(swept, "list", "--sweep", "99", status=1).stderr
    wrong = results(swept, "show", "99", status=1)
    assert wrong.stderr.strip().startswith("There is no trial 99")
    assert len(wrong.stderr.strip().splitlines()) == 1


def test_export(swept, tmp_path):
    paths = results(swept, "export", "--to", str(tmp_path / "export")).stdout.split()
    assert [path.rpartition("/")[2] for path in paths] == [
        "pensieve.json", "stateless.json", "turns.csv", "turns.parquet",
    ]  # fmt: skip
    assert len(results(swept, "export", "1", "--to", str(tmp_path / "c")).stdout.split()) == len(paths)
    assert results(swept, "export", "7", status=1).stderr.startswith("There is no sweep 7")
    report = json.loads((tmp_path / "export" / "stateless.json").read_text())
    assert report["baseline"] == "stateless"
    assert report["aggregates"]["mean_total_ms"] > 0


def test_two_baselines_are_compared(swept):
    shown = run(swept, "baseline=pensieve", "baseline=stateless", script="compare.py")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "ttft_ms_mean",
        "95 % interval",
        "8 conversations",
        "n = 1, no interval",
        "stateless in B",
        "One seed",
    ):
        assert text in shown.stdout, text
    assert "queue_ms" not in shown.stdout
