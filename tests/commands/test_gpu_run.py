"""One command for whoever has a GPU: steps under time limits, one zip, whatever becomes of each."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from pensieve.lab.bench import TARGETS
from pensieve.lab.commands import gpu_run
from pensieve.lab.commands.gpu_run import Step, steps_for
from tests.commands.test_doctor import __file__ as _here

CHECKOUT = Path(_here).resolve().parents[2]


def test_every_step_has_its_verdict_and_all_is_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(gpu_run, "environment", lambda checkout: {"gpu": "a GPU", "commit": "abc"})
    database = "import os, pathlib; pathlib.Path(os.environ['PENSIEVE_OUTPUTS'], 'results.db').write_text('rows')"
    steps = (
        Step("good", ("-c", f"{database}; print('all well')"), 30),
        Step("bad", ("-c", "raise SystemExit('it broke')"), 30),
        Step("endless", ("-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"), 0.5),
    )
    assert gpu_run.gpu_run(CHECKOUT, steps) == 1
    (bundle,) = (tmp_path / "gpu").glob("*.zip")
    with zipfile.ZipFile(bundle) as packed:
        assert set(packed.namelist()) == {
            "environment.json", "verdicts.json", "good.log", "bad.log", "endless.log", "results.db",
        }  # fmt: skip
        verdicts = json.loads(packed.read("verdicts.json"))
        assert json.loads(packed.read("environment.json"))["commit"] == "abc"
    assert [(one["name"], one["verdict"], one["said"]) for one in verdicts] == [
        ("good", "passed", "all well"), ("bad", "failed", "it broke"), ("endless", "out of time", ""),
    ]  # fmt: skip
    assert verdicts[2]["seconds"] < 10
    assert str(bundle) in capsys.readouterr().err.replace("\n", "")
    assert gpu_run.gpu_run(CHECKOUT, steps[:1]) == 0


@pytest.mark.parametrize(("gibibytes", "model"), [(80, "llama3_8b"), (24, "llama3_8b"), (16, "opt_350m")])
def test_the_steps_name_what_there_is_and_take_ten_minutes_at_most(gibibytes: int, model: str) -> None:
    steps = steps_for(gibibytes * 2**30)
    assert sum(step.limit_s for step in steps) <= 600
    assert [step.name for step in steps] == ["tests", *TARGETS]
    words = [word for step in steps for word in step.command]
    for word in words:
        if word.endswith(".py") or word.startswith("tests/"):
            assert (CHECKOUT / word).exists(), word
    assert {word for word in words if word.startswith("bench.model")} == {f"bench.model={model}"}
    assert (CHECKOUT / "conf" / "model" / f"{model}.yaml").exists()
