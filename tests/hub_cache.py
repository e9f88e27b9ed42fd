"""A hub's cache on this machine, as huggingface_hub lays it out, and a hub that counts how often it is asked."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(cache: Path, hub_id: str, files: Path | Mapping[str, object], commit: str = COMMIT) -> Path:
    """Put a repository into the cache: the files of a folder, or contents by name (a dict becomes JSON)."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    if isinstance(files, Path):
        shutil.copytree(files, snapshot, dirs_exist_ok=True)
        return snapshot
    snapshot.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (snapshot / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return snapshot


def unreachable(patch: pytest.MonkeyPatch, cache: Path, failure: Exception | None = None) -> list[str]:
    """A machine with this cache and a hub that cannot be reached; returns the list of what it is asked."""
    import huggingface_hub

    asked: list[str] = []

    def refuse(self: object, hub_id: str, **_: object) -> None:
        asked.append(hub_id)
        raise failure or ConnectionError("down")

    cache.mkdir(exist_ok=True)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    patch.setattr("pensieve.hub._answers", {})
    patch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    patch.setattr(
        "huggingface_hub.file_download.get_hf_file_metadata", lambda *_, **__: pytest.fail("the hub was asked")
    )
    return asked
