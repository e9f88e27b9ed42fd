"""Digests of the whole content of files and folders.

Reading tens of gigabytes of weights takes longer than many trials, so the digest of a large file is cached in the user's
cache folder until the file's device, inode, size, mtime or ctime changes; a program can set the mtime back, but not the
ctime.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

from pensieve.user_cache import user_cache

CACHED_BYTES = 64 * 2**20
"""From this size on a file's digest is cached."""

Version = tuple[int, int, int, int, int]


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, or of all files of a folder with their names."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and ".git" not in p.relative_to(path).parts)
        return text_hash("\n".join(f"{p.relative_to(path).as_posix()} {content_hash(p)}" for p in files))
    return _file_hash(path.resolve(), version_of(path))


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def version_of(path: Path) -> Version:
    """Changes whenever the file is written to."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def cached(name: str, version: str, compute: Callable[[], str]) -> str:
    """The digest stored for this name and version, else compute(), which is then stored in place of older versions."""
    try:
        file = user_cache() / "digests" / f"{text_hash(name)}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] == version:
            return str(found["digest"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        pass  # not there yet, not readable, or somebody's edit: computed anew
    digest = compute()
    _store(name, version, digest)
    return digest


def _store(name: str, version: str, digest: str) -> None:
    """Replace the file at once, since other processes read it; a cache that cannot be written only costs time."""
    try:
        folder = user_cache() / "digests"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump({"name": name, "version": version, "digest": digest}, file)
        os.replace(file.name, folder / f"{text_hash(name)}.json")
    except (OSError, RuntimeError):
        pass


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, version: Version) -> str:
    size = version[2]
    return _digest(path) if size < CACHED_BYTES else cached(str(path), repr(version), functools.partial(_digest, path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
