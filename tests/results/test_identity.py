"""What a trial is, by its content, and what is written down of the machine it ran on."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pensieve
from pensieve.lab.results import environment as surroundings
from pensieve.lab.results import identity as code
from pensieve.lab.results.environment import _git
from pensieve.lab.results.identity import (
    Identity,
    code_hash,
    config_hash,
    content_hash,
    counts_for_sweep,
    identify,
    input_files,
    platform_change,
    platform_of,
    sweep_key,
)

CONFIG: dict[str, Any] = {
    "seed": 0,
    "repeat": 0,
    "model": {"name": "tiny", "weights": "random"},
    "workload": {"name": "chat", "path": None, "pressure": 2.0},
    "tracking": {"mlflow": True},
    "hydra": {"job": {"num": 1}},
    "force": False,
    "resume": "fingerprint",
    "trial": {"retries": 0},
    "experiment_name": "pensieve",
    "slo": {"ttft_ms": None, "tpot_ms": None},
    "hardware": {"name": "cpu", "source": "a data sheet"},
}


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        (
            {"tracking": {"mlflow": False}, "hydra": {}, "force": True, "resume": "config", "trial": {"retries": 3}},
            False,
        ),
        ({"experiment_name": "other", "slo": {"ttft_ms": 200.0}}, False),
        ({"hardware": {"name": "cpu", "source": "another data sheet"}}, False),
        ({"repeat": 1}, True),
        ({"workload": {"name": "chat", "path": None, "pressure": 1.0}}, True),
        ({"extra": None}, True),
        ({"hardware": {"name": "cuda", "source": "a data sheet"}}, True),
    ],
)
def test_what_a_trial_measures_is_its_identity_and_not_how_it_is_run_and_kept(
    changed: dict[str, Any], counts: bool
) -> None:
    assert (config_hash({**changed, **dict(reversed(CONFIG.items())), **changed}) != config_hash(CONFIG)) is counts


def test_a_number_is_its_value_however_it_is_written() -> None:
    other = {**CONFIG, "seed": 0.0, "workload": {**CONFIG["workload"], "pressure": 2, "lengths": [1.0, 2.5]}}
    same = {**CONFIG, "workload": {**CONFIG["workload"], "lengths": [1, 2.5]}}
    assert config_hash(other) == config_hash(same) != config_hash(CONFIG)
    assert config_hash({**CONFIG, "force": True, "seed": False}) != config_hash(CONFIG), "false is no number"
    key = sweep_key(["workload.pressure=3"], {"workload.users": "2,30", "cache.gpu": "4GiB,1.5GiB"})
    assert key == sweep_key(["workload.pressure=3.0"], {"workload.users": "2.0,3e1", "cache.gpu": "4GiB,1.5GiB"})
    assert key != sweep_key(["workload.pressure=3.5"], {"workload.users": "2,30", "cache.gpu": "4GiB,1.5GiB"})


def test_input_files_are_listed_with_their_hashes(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("hello")
    digest = content_hash(tmp_path / "trace.jsonl")
    config = {
        "workload": {"path": str(tmp_path / "trace.jsonl"), "name": str(tmp_path / "trace.jsonl"), "file": "missing"},
        "model": {"weights": "random", "name": "tiny"},
        "parts": [{"some_path": [str(tmp_path / "trace.jsonl")]}],
        "tracking": {"path": str(tmp_path / "trace.jsonl")},
    }
    assert input_files(config) == {"workload.path": f"sha256:{digest}", "parts[0].some_path[0]": f"sha256:{digest}"}
    assert input_files(CONFIG) == {}


def test_weights_in_a_folder_count_by_names_and_content_also_behind_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, folder = tmp_path / "blobs", tmp_path / "random"
    (folder / "deep").mkdir(parents=True)
    behind.mkdir()
    (behind / "model.safetensors").write_bytes(b"1")
    (folder / "weights").symlink_to(behind)
    (folder / "deep" / "again").symlink_to(folder)  # which holds itself
    (tmp_path / "link").symlink_to(folder)

    def hashes() -> set[str]:
        return {config_hash({"model": {"weights": str(tmp_path / name)}}) for name in ("random", "link")}

    seen = [hashes()]
    (behind / "model.safetensors").write_bytes(b"2")
    seen.append(hashes())
    (folder / "config.json").write_text("{}")
    seen.append(hashes())
    assert list(map(len, seen)) == [1, 1, 1] and len(set().union(*seen)) == 3
    monkeypatch.chdir(tmp_path)
    assert config_hash({"model": {"weights": "random"}}) not in set().union(*seen), "no folder is meant"


def test_platform_of_simulated_and_real_trials() -> None:
    assert platform_of(True, {"name": "anything"}) == "sim"
    used = {"threads": 8, "attention": "triton", "compiler": None, "packages": ["filelock", "no-such"]}
    real = platform_of(False, {"name": "NVIDIA H100", "count": 2, **used})
    parts = dict(part.split("=") for part in real.split("; "))
    assert (parts["device"], parts["count"], parts["threads"]) == ("NVIDIA H100", "2", "8")
    assert (parts["attention"], "compiler" in parts) == ("triton", False)
    assert {"torch", "transformers", "filelock"} <= parts.keys()
    assert "no-such" not in parts


def test_fingerprint_needs_all_three() -> None:
    assert len({Identity(*parts).fingerprint for parts in ("abc", "xbc", "axc", "abx", ("ab", "", "c"))}) == 5
    found = identify(CONFIG, simulated=True, device={})
    assert found == Identity(config_hash(CONFIG), code_hash(CONFIG), "sim")


def test_what_differs_of_two_platforms_is_named() -> None:
    old, new = "device=cpu; torch=2.12.0; threads=2", "device=cpu; torch=2.13.0"
    assert platform_change(old, new) == "torch 2.12.0 -> 2.13.0, threads 2 -> (not there)"


def test_the_same_command_and_jobs_are_the_same_sweep(tmp_path: Path) -> None:
    axes, trace = {"seed": "0,1", "baseline": "pensieve,stateless"}, tmp_path / "trace.jsonl"
    trace.write_text("one")

    def key(*typed: str, axes: dict[str, str] = axes, **changed: Any) -> str:
        jobs = [{**CONFIG, "workload": {"path": str(trace), "users": 3, **changed}, "seed": seed} for seed in (0, 1)]
        return sweep_key(["model=tiny", *typed], axes, jobs)

    first = key("cache=small")
    assert first == key("+cache=small", "force=true", "hydra/launcher=ray_local", "++trial.retries=2")
    others = [key(), key("cache=small", axes={**axes, "seed": "0,1,2"}), key("cache=small", users=4)]
    trace.write_text("two")
    assert first not in (*others, key("cache=small"))
    assert counts_for_sweep("+workload.users=3") and not counts_for_sweep("++trial.timeout_s=3")


# The code


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(pensieve, "__file__", str(tmp_path / "pensieve" / "__init__.py"))
    code._package.cache_clear()
    yield tmp_path / "pensieve"
    code._package.cache_clear()


@pytest.mark.parametrize(
    ("name", "simulated", "real"),
    [
        ("core/cache/two_tier.py", True, True),
        ("sim/tables/h100/rates.json", True, True),
        ("device/native.c", False, True),
        ("lab/results/store.py", False, False),
        ("serve/server/page.html", False, False),
        ("core/__pycache__/engine.pyc", False, False),
    ],
)
def test_which_files_of_the_package_count(package: Path, name: str, simulated: bool, real: bool) -> None:
    configs: list[dict[str, Any]] = [{"hardware": {"simulated": True}}, {}]
    seen = []
    for text in ("1", "2"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
        code._package.cache_clear()
        seen.append([code_hash(config) for config in configs])
    assert [before != after for before, after in zip(*seen, strict=True)] == [simulated, real]


def test_what_does_not_count_is_there() -> None:
    root = Path(pensieve.__file__).parent
    assert [name for name in (*code.NOT_CODE, *code.NOT_SIMULATED) if not (root / name).exists()] == []


@pytest.mark.parametrize("inside", ["", "my_parts"])
@pytest.mark.parametrize("key", ["_target_", "composition"])
def test_a_users_own_files_count_and_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, key: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    for name in (*(["__init__.py"] if inside else []), "my_scores.py", "my_policy.py"):
        (folder / name).write_text("raise RuntimeError('imported')")
    policy = {"_target_": "pensieve.core.policies.lru.Lru"}
    named = {"eviction": [policy, {key: ".".join(filter(None, [inside, "my_policy", "Mine"]))}]}
    hashes = [code_hash({"eviction": policy}), code_hash(named)]
    for name in ("my_policy.py", "my_scores.py"):  # the second one as the first may import it
        (folder / name).write_text("best = 2")
        hashes.append(code_hash(named))
    assert len(set(hashes)) == 4
    assert code_hash({"_target_": "no_such_module.X"}) == code_hash({"_target_": "pytest.X"}) == code_hash()


def test_a_large_file_is_read_once_until_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(code, "CACHED_BYTES", 10)
    read, of_file = list[Path](), code._digest
    monkeypatch.setattr(code, "_digest", lambda path: read.append(path) or of_file(path))
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)

    def ask() -> str:
        code._file_hash.cache_clear()  # as another process would
        return content_hash(path)

    before, times = ask(), path.stat()
    assert (ask(), len(read)) == (before, 1)
    while path.stat().st_ctime_ns == times.st_ctime_ns:  # the clock of a file system ticks some 250 times a second
        path.write_bytes(b"a" * 99 + b"b")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same size and mtime; the ctime cannot be set
    assert ask() != before
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    assert ask() != before


# The machine


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


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
    class Nvml(dict[str, object]):
        NVMLError = LookupError
        NVML_CLOCK_SM, NVML_CLOCK_MEM = "sm", "mem"

        def __getattr__(self, name: str) -> Callable[..., object]:
            return lambda *_: self[name.removeprefix("nvml")]

    told = Nvml(
        Init=None, Shutdown=None, DeviceGetCount=1, DeviceGetHandleByIndex=0, DeviceGetName="H100",
        DeviceGetMemoryInfo=SimpleNamespace(total=80), DeviceGetEnforcedPowerLimit=700_000,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", told)
    [found] = surroundings.gpus()
    known = {"name": "H100", "memory_bytes": 80, "power_limit_w": 700.0}
    assert {name: value for name, value in found.items() if value is not None} == known
