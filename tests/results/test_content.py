from __future__ import annotations

import os
from pathlib import Path

import pytest

from pensieve.results import content
from pensieve.results.content import cached, content_hash


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pensieve" / "digests"


def test_every_byte_of_a_large_file_counts(tmp_path: Path, cache: Path) -> None:
    """Samples of it, 64 of 256 KiB, do not see the byte after the first of them."""
    path = tmp_path / "trace.jsonl"
    size = content.CACHED_BYTES + 2**20
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
    monkeypatch.setattr(content, "CACHED_BYTES", 10)
    read: list[Path] = []
    digest = content._digest

    def counted(path: Path) -> str:
        read.append(path)
        return digest(path)

    monkeypatch.setattr(content, "_digest", counted)
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)

    def ask() -> str:
        content._file_hash.cache_clear()  # as another process would
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
