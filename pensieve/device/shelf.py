"""What the trials of one process share while a shelf is open: the model loaded last, and pinned memory.

A sweep opens one in each process that runs more than one of its trials, and a benchmark for its targets. Nothing on it may
change what a trial computes: a model is the same one only where all that decides its weights, the forward and the attention
is the same, and pinned memory is zeroed before it is given out again. torch is imported once something is loaded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.device.asked import ModelAsked
from pensieve.hub import commit

if TYPE_CHECKING:
    from pensieve.device.kv_tensors import Kept
    from pensieve.device.model import LoadedModel

_READ = ("*.safetensors", "*.json")  # of a folder: what the model is made of


_open: list[dict[object, LoadedModel]] = []
"""The models of each shelf, at most one; the last shelf is in use."""


@contextmanager
def open_shelf() -> Iterator[None]:
    """While it is open, a model that is asked for again is the one from before; at most one is kept. A shelf inside another
    keeps its own."""
    _open.append({})
    try:
        yield
    finally:
        empty()
        _open.pop()


def empty() -> None:
    """Return the memory of what is kept, so that something else may have it; the shelf stays open."""
    if not _open:
        return
    had = bool(_open[-1])
    _open[-1].clear()
    if (pinned := _pinned()) is not None:
        pinned.clear()
    if had:
        _release()


def kept_host_bytes() -> int:
    """RAM that is kept here and that the next trial uses, or gets: a model on the CPU, and pinned memory."""
    if not _open:
        return 0
    modules = (model.module for model in _open[-1].values() if model.device.type == "cpu")
    weights = sum(tensor.nbytes for one in modules for tensor in (*one.parameters(), *one.buffers()))
    return weights + (0 if (pinned := _pinned()) is None else pinned.nbytes)


def _pinned() -> Kept | None:
    """Page-locked memory that workers gave back; None where nothing has loaded torch yet."""
    module = sys.modules.get("pensieve.device.kv_tensors")
    return None if module is None else module.kept


def take_model(asked: ModelAsked) -> LoadedModel:
    """What load_model gives, or gave before for the same question and files where a shelf is open; then it is `reused`.

    Without a shelf each call loads its own. Raises what load_model raises.
    """
    import torch

    from pensieve.device.kv_tensors import kept
    from pensieve.device.model import load_model

    kept.keeps = lambda: bool(_open)
    if not _open:
        return load_model(asked)
    key, models = (asked, _files(asked.weights, asked.hub_id, asked.revision)), _open[-1]
    if key in models:
        torch.set_num_threads(models[key].threads)  # as load_model does: something else may have run since
        return replace(models[key], reused=True)
    if models:
        models.clear()  # before the next one needs the memory
        _release()
    models[key] = load_model(asked)
    return models[key]


def _files(weights: str, hub_id: str | None, revision: str | None) -> object:
    """What tells whether the files of the weights are those of before: of a folder, its files with size and time."""
    if weights == "random":
        return None
    if weights == "hub":
        return commit(hub_id, revision) if hub_id else None
    found = sorted(path for pattern in _READ for path in Path(weights).expanduser().glob(pattern))
    return tuple((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in found)


def _release() -> None:
    import torch

    gc.collect()  # the frame in which transformers was imported first stays, in a circle, and with it its model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
