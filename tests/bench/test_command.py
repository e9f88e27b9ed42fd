import sys
from contextlib import nullcontext
from types import ModuleType

import pytest

from pensieve.errors import ConfigError, HardwareMissing
from pensieve.lab.bench.case import Case, Measured
from pensieve.lab.bench.session import TARGETS, run_target
from pensieve.lab.compose.conf import read_option
from pensieve.lab.results.store import open_store

CASE = Case("decode 8 over 512, all layers of the model", 1.0, "bytes over bandwidth", "time_ms")
OURS, PEER = Measured("ours", [1.5, 1.6]), Measured("a peer with a long name", [3.0], version="2.13.0+cpu")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.setattr("pensieve.lab.bench.session.device_lock", lambda *_: nullcontext())
    bench = {"repeats": None, "model": "auto"}
    hardware = {**read_option("hardware", "cpu"), "threads": 1}
    return {"target": "kernel", "bench": bench, "hardware": hardware, "tracking": read_option("tracking", "local")}


def target_that(monkeypatch, name, run):
    module = ModuleType(name)
    module.run = run
    monkeypatch.setitem(sys.modules, f"pensieve.lab.bench.{name}", module)
    monkeypatch.setattr(sys.modules["pensieve.lab.bench"], name, module, raising=False)
    monkeypatch.setitem(TARGETS, name, f"{name}:run")


@pytest.mark.parametrize(("peers", "status", "said"), [([PEER], 0, ""), ([], 1, "no peer ran beside it")])
def test_without_a_peer_the_status_is_not_zero(peers, status, said, config, tmp_path, monkeypatch, capsys):
    target_that(monkeypatch, "kernel", lambda bench: bench.record(CASE, [OURS, *peers]))
    assert run_target(config, {"target": "kernel"}) == status
    printed = capsys.readouterr()
    assert said in printed.err
    lines = printed.out.splitlines()
    assert "1.5 " in printed.out and max(map(len, lines[:-1])) <= 100  # the last one names the database
    store = open_store(tmp_path)
    assert store.sweep(1).status == ("failed" if status else "completed")


def test_the_targets_of_all_run_though_one_fails(config, monkeypatch, capsys):
    ran = []

    def works(bench):
        ran.append(bench.target)
        bench.record(CASE, [OURS, PEER])

    def fails(bench):
        raise HardwareMissing("This machine has no such thing.")

    def lacks(bench):
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    for name, run in {"kernel": works, "swap": fails, "decode": lacks, "prefill": works, "serve": works}.items():
        target_that(monkeypatch, name, run)
    assert run_target({**config, "target": "all"}, {}) == 1
    assert ran == ["kernel", "prefill", "serve"]
    said = capsys.readouterr().err
    assert "swap: This machine has no such thing." in said
    assert "decode: the Python package accelerate is not installed" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": "kernels"}, "no target 'kernels'"),
        ({"bench": {"model": "x"}}, "no model 'x'"),
        ({"hardware": read_option("hardware", "sim_h100")}, "is simulated"),
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(given, said, config):
    changed = {**config, **given, "bench": {**config["bench"], **given.get("bench", {})}}
    with pytest.raises((ConfigError, HardwareMissing), match=said):
        run_target(changed, {})
