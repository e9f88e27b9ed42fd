from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pensieve
from pensieve.results import code
from pensieve.results.code import NOT_CODE, code_hash

SOURCE = '''"""What it is."""

def double(value: int) -> int:
    """Twice as much."""
    return 2 * value  # a comment
'''


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of a package that was hashed before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code._package_hash.cache_clear()
    yield
    code._package_hash.cache_clear()


def made_package(root: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Path:
    package = root / "pensieve"
    for name in ("engine.py", *names):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(SOURCE)
    monkeypatch.setattr(pensieve, "__file__", str(package / "__init__.py"))
    return package


def changed_hash(file: Path, text: str) -> str:
    file.write_text(text)
    code._package_hash.cache_clear()
    return code_hash()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("engine.py", True),
        ("metrics.py", True),
        ("trial/run.py", True),
        ("trial/sampling.py", True),
        ("trial/unheard_of.py", True),
        ("workload/talk.jsonl", True),
        ("worker/torch/kernels/native.c", True),
        ("results/store.py", False),
        ("server/api.py", False),
        ("bench/kernel.py", False),
        ("commands/doctor.py", False),
        ("trial/sweep.py", False),
        ("__pycache__/engine.pyc", False),
    ],
)
def test_which_files_of_the_package_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, counts: bool
) -> None:
    package = made_package(tmp_path, monkeypatch, name)
    before = code_hash()
    assert (changed_hash(package / name, SOURCE.replace("2 *", "3 *")) != before) is counts


@pytest.mark.usefixtures("fresh")
def test_a_benchmark_counts_for_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = made_package(tmp_path, monkeypatch, "bench/kernel.py")
    bench = {"bench": {"target": "kernel"}}
    before, other = code_hash(bench), code_hash()
    assert changed_hash(package / "bench/kernel.py", "") == other
    assert code_hash(bench) != before


def test_what_does_not_count_is_there() -> None:
    root = Path(code.__file__).parents[1]
    assert [name for name in NOT_CODE if name != "conf/" and not (root / name).exists()] == []


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "old", "new", "counts"),
    [
        ("engine.py", "# a comment", "# another", False),
        ("engine.py", "Twice as much", "Two times", False),
        ("engine.py", "What it is", "That", False),
        ("engine.py", "2 * value", "(2\n        * value)", False),
        ("engine.py", "value: int", "value: float", True),
        ("engine.py", "-> int:", "-> int:\n    print(value)", True),
        ("engine.py", "def", "no Python", True),
        ("native.c", "# a comment", "# another", True),
    ],
)
def test_what_of_a_source_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, counts: bool
) -> None:
    package = made_package(tmp_path, monkeypatch, name)
    before = code_hash()
    assert old in SOURCE
    assert (changed_hash(package / name, SOURCE.replace(old, new)) != before) is counts


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
    changed = code_hash(config)
    assert changed != before
    module.write_text("class MyPolicy: ...  # mine")
    assert code_hash(config) == changed
    assert "my_policy_module" not in sys.modules
    assert code_hash({"_target_": "no_such_module.X"}) == code_hash()


def test_a_users_own_composition_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named by its dotted path, without a _target_."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_composition.py"
    module.write_text("def compose(): return 1")
    config = {"scheduler": {"composition": "my_composition.compose"}}
    before = code_hash(config)
    assert before != code_hash({"scheduler": {"composition": "pensieve.scheduler.composition.unified"}}) == code_hash()
    module.write_text("def compose(): return 2")
    assert code_hash(config) != before


@pytest.mark.parametrize("line", ["import my_parts.scores", "from my_parts import scores", "from .scores import best"])
def test_what_a_users_module_imports_of_the_users_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    parts = tmp_path / "my_parts"
    parts.mkdir()
    (parts / "__init__.py").touch()
    (parts / "policy.py").write_text(f"import json\n{line}\n\nclass Mine: ...")
    (parts / "scores.py").write_text("best = 1")
    config = {"_target_": "my_parts.policy.Mine"}
    before = code_hash(config)
    (parts / "scores.py").write_text("best = 2")
    assert code_hash(config) != before
