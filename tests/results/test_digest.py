from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pensieve
from pensieve.results import digest
from pensieve.results.digest import NOT_CODE, cached, code_hash, content_hash

SOURCE = '''"""What it is."""

def double(value: int) -> int:
    """Twice as much."""
    return 2 * value  # a comment
'''


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of a package that was hashed before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest._package_hash.cache_clear()
    yield
    digest._package_hash.cache_clear()


def made_package(root: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Path:
    package = root / "pensieve"
    for name in ("engine.py", *names):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(SOURCE)
    monkeypatch.setattr(pensieve, "__file__", str(package / "__init__.py"))
    return package


def changed_hash(file: Path, text: str) -> str:
    file.write_text(text)
    digest._package_hash.cache_clear()
    return code_hash()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("engine.py", True),
        ("metrics.py", True),
        ("trial/run.py", True),
        ("trial/samples.py", True),
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
    root = Path(digest.__file__).parents[1]
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pensieve" / "digests"


def test_every_byte_of_a_large_file_counts(tmp_path: Path, cache: Path) -> None:
    """Samples of it, 64 of 256 KiB, do not see the byte after the first of them."""
    path = tmp_path / "trace.jsonl"
    size = digest.CACHED_BYTES + 2**20
    with path.open("wb") as file:
        file.truncate(size)
    hashes = {content_hash(path)}
    for at in (0, 2**18, size - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        hashes.add(content_hash(path))
    assert len(hashes) == 4


def test_a_large_file_is_read_once_until_it_is_written_to(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CACHED_BYTES", 10)
    read: list[Path] = []
    of_file = digest._digest

    def counted(path: Path) -> str:
        read.append(path)
        return of_file(path)

    monkeypatch.setattr(digest, "_digest", counted)
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)

    def ask() -> str:
        digest._file_hash.cache_clear()  # as another process would
        return content_hash(path)

    before = ask()
    assert ask() == before
    assert len(read) == 1
    times = path.stat()
    while path.stat().st_ctime_ns == times.st_ctime_ns:  # the clock of a file system ticks some 250 times a second
        path.write_bytes(b"a" * 99 + b"b")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same size and mtime; the ctime cannot be set
    assert ask() != before
    assert len(read) == 2
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_used_costs_only_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached("name", "1", lambda: "digest") == "digest"
    (file,) = cache.iterdir()
    file.write_text("[]")
    assert cached("name", "1", lambda: "another") == "another"
    assert cached("name", "1", lambda: "not asked") == "another"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    assert cached("name", "1", lambda: "computed") == "computed"
