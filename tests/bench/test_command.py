from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest

from pensieve.errors import ConfigError, HardwareMissing
from pensieve.lab.bench import TARGETS, run_target
from pensieve.lab.bench.case import Case, Figure, Measured
from pensieve.lab.compose import read_option
from pensieve.lab.results.store import open_store

CASES = {
    "whole": (Case("a", 1.0), [Measured("ours", [1.5, 1.6]), Measured("sdpa", [3.0])]),
    "no_peer": (Case("a", 1.0), [Measured("ours", [1.5, 1.6])]),
    "no_limit": (Case("a", None), [Measured("ours", [1.5, 1.6]), Measured("sdpa", [3.0])]),
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    bench = {"size": "auto", "repeats": None, "model": "auto", "markdown": str(tmp_path / "table.md"), "only": None}
    bench |= {"exclusive": False, "seed": 0}
    hardware = {**read_option("hardware", "cpu"), "threads": 1}
    return {"target": "kernel", "bench": bench, "hardware": hardware, "tracking": read_option("tracking", "local")}


def target_that(monkeypatch, name, run):
    module = ModuleType(name)
    module.run = run
    monkeypatch.setitem(sys.modules, f"pensieve.lab.bench.{name}", module)
    monkeypatch.setitem(TARGETS, name, (name, "run"))


@pytest.mark.parametrize(
    ("what", "status", "said"), [("whole", 0, ""), ("no_peer", 1, "no peer"), ("no_limit", 1, "no limit")]
)
def test_without_limit_or_peer_the_status_is_not_zero(what, status, said, config, tmp_path, monkeypatch, capsys):
    target_that(monkeypatch, "kernel", lambda bench: bench.record(*CASES[what]))
    assert run_target(config, {"target": "kernel"}) == status
    printed = capsys.readouterr()
    assert said in printed.err
    assert "1.5 " in printed.out
    store = open_store(tmp_path)
    assert store.sweep(1).status == ("failed" if status else "completed")
    text = (tmp_path / "table.md").read_text()
    assert "| a | ours | 1.5 | – | ms |" in text
    assert "torch " in text and "commit " in text


def test_the_targets_of_all_run_though_one_fails(config, monkeypatch, capsys):
    ran = []

    def works(bench):
        ran.append(bench.target)
        bench.record(*CASES["whole"])

    def fails(bench):
        raise HardwareMissing("This machine has no such thing.")

    def lacks(bench):
        raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")

    for name, run in {"kernel": works, "swap": fails, "decode": lacks, "prefill": works, "serve": works}.items():
        target_that(monkeypatch, name, run)
    assert run_target({**config, "target": "all"}, {}) == 1
    assert ran == ["kernel", "prefill", "serve"]
    said = capsys.readouterr().err
    assert "swap: This machine has no such thing." in said
    assert "decode: the Python package flashinfer is not installed" in said


def test_every_recorded_target_is_there():
    for module, function in TARGETS.values():
        assert callable(getattr(import_module(f"pensieve.lab.bench.{module}"), function))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": "kernels"}, "no target 'kernels'"), ({"bench": {"size": "huge"}}, r"bench\.size='huge'"),
        ({"bench": {"repeats": 0}}, r"bench\.repeats=0"), ({"bench": {"seed": "abc"}}, r"bench\.seed='abc'"),
        ({"bench": {"model": "x"}}, "no model 'x'"), ({"bench": {"model": "auto", "turns": 3}}, r"bench\.turns is unknown"),
        ({"hardware": read_option("hardware", "sim_h100")}, "is simulated"),
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(given, said, config):
    changed = {**config, **given, "bench": {**config["bench"], **given.get("bench", {})}}
    with pytest.raises((ConfigError, HardwareMissing), match=said):
        run_target(changed, {})


def test_the_table_fits_and_a_limit_that_is_beaten_gets_a_word(config, monkeypatch, capsys):
    peer = Measured("a peer with a long name", [0.5], version="2.13.0+cpu")
    ours = Measured("ours", [1.5], figures=[Figure("matrix_rate_pct", 0.25)])
    case = Case("decode 8 over 512, all layers of the model", 1.0, "bytes over bandwidth")
    target_that(monkeypatch, "kernel", lambda bench: bench.record(case, [ours, peer]))
    run_target(config, {"target": "kernel"})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 100  # the last one names the database
    text = " ".join(" ".join(lines).split())
    assert "a peer with a long name is at 0.50 of the limit (bytes over bandwidth)" in text
    assert "ours is at" not in text
    assert "ours: matrix rate pct 0.25 %" in text


def test_a_name_of_no_cell_leaves_no_record(config, tmp_path):
    config["bench"]["only"] = "zzz"
    with pytest.raises(ConfigError, match=r"bench\.only=zzz names no cell of serve"):
        run_target({**config, "target": "serve"}, {"bench.only": "zzz"})
    assert not (tmp_path / "results.db").exists()
