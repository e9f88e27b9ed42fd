"""From a sweep on simulated hardware to its figures, by the commands that a user types."""

from __future__ import annotations

import json

import pytest

from analysis import figures
from tests.typed import typed

SWEEP = (
    "hardware=sim_h100",
    "model=llama3_8b",
    "cache.gpu='2560 tokens'",
    "cache.cpu='5120 tokens'",
    "seed=0",
    "workload.users=2",
    "workload.conversations=3",
    "baseline=pensieve,stateless",
    "tracking.mlflow=false",
    "-m",
)


@pytest.mark.slow
def test_a_sweep_draws_its_figures_and_they_can_be_drawn_again(tmp_path, drawn, monkeypatch, capsys):
    """The sweep draws them in a new process; again means their data, which `drawn` does not render."""
    swept = typed("runners/run.py", *SWEEP, outputs=tmp_path, figures=True)
    assert swept.returncode == 0, swept.stderr
    names = ("ttft_by_turn", "speedup", "hit_rates")
    for name in names:
        kind, suffix, begins = ("Table", "md", b"# Speed-up") if name == "speedup" else ("Figure", "png", b"\x89PNG")
        file = tmp_path / "figures" / "sweep-1" / f"{name}.{suffix}"
        assert f"{kind}:".ljust(10) + str(file) in swept.stdout.splitlines()
        assert file.read_bytes().startswith(begins)
        told = json.loads(file.with_suffix(".json").read_text())
        assert (told["kind"], told["weights"], told["load"], told["cache_state"]) == (
            ["simulated"],
            ["none"],
            ["closed"],
            ["cold"],
        )
        assert len(told["trials"]) == 2 and told["incomplete"] == 0
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    assert figures.main(["--to", str(tmp_path / "again")]) == 0
    for name in names:
        csv = f"{name}.csv"
        assert (tmp_path / "again" / csv).read_text() == (tmp_path / "figures" / "latest" / csv).read_text()
    assert "figures need other experiments (--help names them)." in capsys.readouterr().err
