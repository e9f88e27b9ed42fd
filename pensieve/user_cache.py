"""The folder of this user that keeps what can be made again: compiled kernels, digests of large files."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Path of the user's cache folder, which is not made here. Raises RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pensieve"
