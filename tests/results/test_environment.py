from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pensieve.lab.results import environment as environment_module
from pensieve.lab.results.environment import _git


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_torch_is_not_imported_for_it_but_asked_when_there() -> None:
    code = (
        "import sys, json; from pensieve.lab.results.environment import environment; e = environment();"
        "assert 'torch' not in sys.modules and 'mlflow' not in sys.modules; assert e['torch_threads'] is None;"
        "import types; t = types.ModuleType('torch'); t.get_num_threads = lambda: 7; sys.modules['torch'] = t;"
        "print(environment()['torch_threads'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"


def test_git_tells_commit_and_difference(tmp_path: Path) -> None:
    assert _git(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "init", "-q")
    assert _git(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert _git(tmp_path) == clean
    (tmp_path / "new").write_text("1")
    assert _git(tmp_path) == {**clean, "dirty": True}


def test_an_nvidia_device_is_described_as_far_as_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class NvmlError(Exception):
        pass

    def refuses(*_: object) -> None:
        raise NvmlError("Not Supported")

    def clock(_device: object, which: str) -> int:
        return {"sm": 1980, "mem": 2619}[which]

    fake = SimpleNamespace(
        NVMLError=NvmlError, NVML_CLOCK_SM="sm", NVML_CLOCK_MEM="mem",
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1,
        nvmlSystemGetDriverVersion=lambda: "570.1", nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: "H100", nvmlDeviceGetUUID=lambda _: "GPU-1",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80), nvmlDeviceGetEnforcedPowerLimit=lambda _: 700_000,
        nvmlDeviceGetClockInfo=clock, nvmlDeviceGetMaxClockInfo=refuses,
        nvmlDeviceGetCurrPcieLinkGeneration=lambda _: 5, nvmlDeviceGetCurrPcieLinkWidth=refuses,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert environment_module.gpus() == [
        {
            "name": "H100", "uuid": "GPU-1", "memory_bytes": 80, "driver": "570.1", "sm_mhz": 1980, "sm_mhz_max": None,
            "memory_mhz": 2619, "memory_mhz_max": None, "power_limit_w": 700.0, "pcie_generation": 5, "pcie_width": None,
        }
    ]  # fmt: skip
