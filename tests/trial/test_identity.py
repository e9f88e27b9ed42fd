"""What `auto` comes to on this machine is part of a trial's identity, before anything is loaded."""

from dataclasses import replace

import pytest

from pensieve.lab.compose.plan import Device, plan_trial
from pensieve.lab.compose.settings import resolved
from pensieve.lab.results.identity import platform_change
from pensieve.lab.trial.job import device_facts, identity_of
from tests.composed import checked, composed

CPU = ("hardware=cpu", "model=tiny")


def identity(*words, device=None):
    plan = plan_trial(checked(*words))
    return identity_of(plan if device is None else replace(plan, device=device), resolved(composed(*words)))


def platform(found):
    return dict(part.split("=", 1) for part in found.platform.split("; "))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A C compiler that says its version, and nothing else."""
    path = tmp_path / "bin" / "mycc"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho mycc 1.0\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    return path


def test_a_real_trial_records_what_auto_resolved_to(compiler):
    found = platform(identity(*CPU, "hardware.threads=2"))
    assert {name: found[name] for name in ("attention", "dtype", "graphs", "threads", "depth")} == {
        "attention": "native", "dtype": "float32", "graphs": "off", "threads": "2", "depth": "1",
    }  # fmt: skip
    assert found["compiler"] == "mycc 1.0"


@pytest.mark.parametrize(
    ("words", "triton", "wanted"),
    [
        ((), True, {"attention": "triton", "graphs": "on", "copy_ahead": "auto", "dtype": "bfloat16"}),
        (("model.dtype=float32",), False, {"attention": "reference", "graphs": "off", "dtype": "float32"}),
        (("cache.chunk_tokens=24",), True, {"attention": "reference"}),
        (("hardware.graphs=off",), True, {"graphs": "off"}),
        (("scheduler.copy_ahead=spare",), True, {"copy_ahead": "spare"}),
        (("baseline=gpu_only",), True, {"copy_ahead": "none"}),
    ],
)
def test_on_a_gpu(words, triton, wanted, monkeypatch):
    from pensieve.device import asked as backends
    from pensieve.lab.compose import plan

    gpu = Device("cuda", "cuda:0", "GPU-1", "NVIDIA X", 1, 2**34, 2**34)
    monkeypatch.setattr(plan, "find_device", lambda hardware: gpu)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    facts = device_facts(plan_trial(checked("hardware=cpu", "model=tiny", *words)))
    assert {name: facts[name] for name in wanted} == wanted


def test_how_threads_wait_makes_another_trial(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = identity(*CPU)
    assert platform(before)["wait_policy"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert identity(*CPU).fingerprint == before.fingerprint
    outside = (*CPU, "baseline=transformers_cb")
    theirs, simulated = identity(*outside), identity("hardware=sim_h100")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    after = identity(*CPU)
    assert platform(after)["wait_policy"] == "ACTIVE" and after.fingerprint != before.fingerprint
    assert "wait_policy PASSIVE -> ACTIVE" in platform_change(before.platform, after.platform)
    assert identity(*outside).fingerprint != theirs.fingerprint
    assert identity("hardware=sim_h100").fingerprint == simulated.fingerprint


def test_a_trial_beside_others_is_not_an_exclusive_one():
    alone, beside = identity(*CPU), identity(*CPU, "trial.exclusive=false")
    assert alone.fingerprint != beside.fingerprint
    simulated = [identity("hardware=sim_h100", f"trial.exclusive={given}").fingerprint for given in ("true", "false")]
    assert simulated[0] == simulated[1]  # a simulation shares nothing
