"""The very weights that our engine runs, in the form that another engine reads; written once and kept in the user's cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock

from pensieve.device.asked import ModelAsked
from pensieve.lab.results.identity import content_hash, text_hash
from pensieve.plugins.engines.base import EngineSetup
from pensieve.plugins.engines.gguf_export import write_gguf
from pensieve.user_cache import user_cache


def plain_module(setup: EngineSetup) -> Any:
    """A transformers module on its own attention (sdpa), loaded as our engine loads it. Raises what load_module raises."""
    import torch

    from pensieve.device.model import resolve_device
    from pensieve.device.weights import load_module

    torch.set_num_threads(setup.threads)
    asked = ModelAsked(setup.model, setup.weights, setup.hub_id, setup.revision, setup.seed)
    module = load_module(asked, resolve_device(setup.device))
    module.set_attn_implementation("sdpa")
    return module


def gguf_file(setup: EngineSetup, file_type: str) -> Path:
    """The weights as GGUF."""
    target = _kept(f"gguf-{file_type}-{_key(setup)}") / "model.gguf"
    _once(target, lambda: write_gguf(plain_module(setup), setup.model.name, target, file_type))
    return target


def model_folder(setup: EngineSetup) -> Path:
    """The weights as save_pretrained writes them; the user's own folder where they come from one."""
    if setup.weights not in ("random", "hub"):
        return Path(setup.weights).expanduser().resolve()
    folder = _kept(f"folder-{_key(setup)}")
    _once(folder / "config.json", lambda: _save(plain_module(setup), folder))
    return folder


def _save(module: Any, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        module.save_pretrained(partial, safe_serialization=True)
    finally:
        if shown:
            logging.enable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _kept(name: str) -> Path:
    return user_cache() / "weights" / name


def _once(target: Path, write: Any) -> None:
    """Only one process writes, and a file that is there is whole."""
    if target.is_file():
        return
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent.parent / f"{target.parent.name}.lock"):
        if not target.is_file():
            write()


def _key(setup: EngineSetup) -> str:
    """Names these weights by all that they depend on; random ones also by the version of torch that draws them."""
    facts: dict[str, Any] = {
        "architecture": dict(setup.model.architecture),
        "dtype": setup.model.dtype,
        "weights": setup.weights,
        "export": content_hash(Path(__file__).with_name("gguf_export.py")),
    }
    if setup.weights == "random":
        import torch

        facts |= {"seed": setup.seed, "torch": torch.__version__, "device": setup.device.partition(":")[0]}
        facts["drawn_by"] = content_hash(Path(__file__).parents[2] / "device" / "model.py")
    elif setup.weights == "hub":
        facts |= {"hub_id": setup.hub_id, "revision": setup.revision}
    else:
        facts["weights"] = content_hash(Path(setup.weights).expanduser())
    return text_hash(json.dumps(facts, sort_keys=True, default=str))[:24]
