from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pensieve
from pensieve.results import identity
from pensieve.results.identity import (
    Identity,
    code_hash,
    config_hash,
    content_hash,
    explain_difference,
    fingerprint,
    identify,
    input_files,
    platform_of,
    sweep_key,
)
from pensieve.results.store import ResultsStore
from tests.results.trials import MEMORY, trial_fields

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
}


@pytest.fixture(autouse=True)
def fresh_package_hash() -> Iterator[None]:
    identity._package_hash.cache_clear()
    yield
    identity._package_hash.cache_clear()


@pytest.mark.parametrize(
    "changed",
    [
        {"tracking": {"mlflow": False}},
        {"hydra": {}},
        {"force": True},
        {"resume": "config"},
        {"trial": {"retries": 3}},
        {"experiment_name": "other"},
    ],
)
def test_how_a_trial_is_run_and_kept_is_not_its_identity(changed: dict[str, Any]) -> None:
    assert config_hash({**CONFIG, **changed}) == config_hash(CONFIG)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"repeat": 1}, {"workload": {"name": "chat", "path": None, "pressure": 1.0}}, {"extra": None}],
)
def test_what_it_measures_is(changed: dict[str, Any]) -> None:
    assert config_hash({**CONFIG, **changed}) != config_hash(CONFIG)


def test_order_of_fields_does_not_matter() -> None:
    assert config_hash(dict(reversed(CONFIG.items()))) == config_hash(CONFIG)


def test_an_input_file_counts_by_its_content(tmp_path: Path) -> None:
    def of(path: Path) -> str:
        return config_hash({**CONFIG, "workload": {"path": str(path)}})

    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("one")
    second.write_text("one")
    assert of(first) == of(second)
    second.write_text("two!")
    assert of(first) != of(second)
    assert of(tmp_path / "missing") != of(first)


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


def test_weights_in_a_folder_count_by_names_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "random"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1")
    before = config_hash({"model": {"weights": str(folder)}})
    (folder / "config.json").write_text("{}")
    assert config_hash({"model": {"weights": str(folder)}}) != before
    monkeypatch.chdir(tmp_path)
    chosen = config_hash({"model": {"weights": "random"}})
    (folder / "more").touch()
    assert config_hash({"model": {"weights": "random"}}) == chosen


def test_a_large_file_is_sampled_from_first_to_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_SAMPLE_BYTES", 10)
    path = tmp_path / "weights"
    hashes = set()
    for at in (None, 0, 99_999):
        content = bytearray(100_000)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        identity._file_hash.cache_clear()
        hashes.add(content_hash(path))
    assert len(hashes) == 3


def made_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = root / "pensieve"
    for name in ("engine.py", "results/store.py", "server/api.py", "workload/talk.jsonl", "__pycache__/engine.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    monkeypatch.setattr(pensieve, "__file__", str(package / "__init__.py"))
    return package


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("engine.py", True),
        ("workload/talk.jsonl", True),
        ("results/store.py", False),
        ("server/api.py", False),
        ("__pycache__/engine.pyc", False),
    ],
)
def test_which_files_of_the_package_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, counts: bool
) -> None:
    package = made_package(tmp_path, monkeypatch)
    before = code_hash()
    (package / name).write_text("changed")
    identity._package_hash.cache_clear()
    assert (code_hash() != before) is counts


def test_a_users_own_module_counts_and_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_policy_module.py"
    module.write_text("raise RuntimeError('imported')")
    config = {
        "eviction": {"list": [{"_target_": "my_policy_module.MyPolicy"}], "_target_": "pensieve.eviction.lru.Lru"}
    }
    before = code_hash(config)
    assert before != code_hash() == code_hash({"eviction": {"_target_": "pensieve.eviction.lru.Lru"}})
    module.write_text("class MyPolicy: ...")
    assert code_hash(config) != before
    assert "my_policy_module" not in sys.modules
    assert code_hash({"_target_": "no_such_module.X"}) == code_hash()


def test_platform_of_simulated_and_real_trials() -> None:
    assert platform_of(True, {"name": "anything"}) == "sim"
    real = platform_of(False, {"name": "NVIDIA H100", "count": 2, "threads": 8, "packages": ["filelock", "no-such"]})
    parts = dict(part.split("=") for part in real.split("; "))
    assert (parts["device"], parts["count"], parts["threads"]) == ("NVIDIA H100", "2", "8")
    assert {"torch", "transformers", "filelock"} <= parts.keys()
    assert "no-such" not in parts


def test_fingerprint_needs_all_three() -> None:
    hashes = {fingerprint(*parts) for parts in ("abc", "xbc", "axc", "abx", ("ab", "", "c"))}
    assert len(hashes) == 5
    found = identify(CONFIG, simulated=True, device={})
    assert found.fingerprint == fingerprint(config_hash(CONFIG), code_hash(CONFIG), "sim")


def test_the_same_command_is_the_same_sweep() -> None:
    axes = {"seed": "0,1", "baseline": "pensieve,stateless"}
    key = sweep_key(["model=tiny", "cache=small"], axes)
    assert key == sweep_key(
        ["cache=small", "+model=tiny", "force=true", "hydra/launcher=ray_local", "trial.retries=2"], axes
    )
    assert key != sweep_key(["model=tiny"], axes)
    assert key != sweep_key(["model=tiny", "cache=small"], {**axes, "seed": "0,1,2"})


def test_one_line_says_what_changed() -> None:
    store = ResultsStore(MEMORY)
    old = store.trial(store.begin_trial(trial_fields(platform="device=cpu; torch=2.12.0; threads=2")))
    said = explain_difference(old, Identity("c", "other code", "device=cpu; torch=2.13.0; threads=2"))
    assert said == (
        "Runs again, because the code and the platform (torch 2.12.0 -> 2.13.0) changed since trial 1 "
        "(resume=config accepts that one)."
    )
    assert "the platform (threads 2 -> (not there))" in explain_difference(
        old, Identity("c", "d", "device=cpu; torch=2.12.0")
    )
    assert "nothing changed" in explain_difference(old, Identity("c", "d", old.platform))
