"""What the trials of one process share while a shelf is open: the model loaded last, and pinned memory.

A sweep opens one in each process that runs more than one of its trials, and a benchmark for its targets. Nothing on it may
change what a trial computes: a model is the same one only where all that decides its weights, the forward and the attention
is the same, and pinned memory is zeroed before it is given out again. torch is imported once something is loaded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.hub import commit
from pensieve.specs import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pensieve.worker.torch.model import LoadedModel

_READ = ("*.safetensors", "*.json")  # of a folder: what the model is made of


class ModelAsked(NamedTuple):
    """What decides a loaded model, beside its files: arguments of load_model."""

    spec: ModelSpec
    weights: str
    hub_id: str | None
    revision: str | None
    seed: int
    device: str
    threads: int | None = None
    attention: str = "auto"
    chunk_tokens: int = 32
    memory_bytes: int | None = None


_Key = tuple[ModelAsked, object]


@dataclass(slots=True)
class _Shelf:
    """models: at most one. pinned: by device, page-locked memory that nobody uses now: one piece each."""

    models: dict[_Key, LoadedModel] = field(default_factory=dict)
    pinned: dict[int, NDArray[Any]] = field(default_factory=dict)


_open: list[_Shelf] = []
"""The last one is in use."""


@contextmanager
def open_shelf() -> Iterator[None]:
    """While it is open, a model that is asked for again is the one from before; at most one is kept."""
    begin()
    try:
        yield
    finally:
        close()


def begin() -> None:
    """Open a shelf as `open_shelf` does, until `close` is called. A shelf inside another keeps its own models."""
    _open.append(_Shelf())


def close() -> None:
    """Return the memory of what is on the shelf that was opened last, if one is open."""
    if _open:
        empty()
        _open.pop()


def empty() -> None:
    """Return the memory of what is kept, so that something else may have it; the shelf stays open."""
    if not _open:
        return
    shelf, had = _open[-1], bool(_open[-1].models)
    shelf.models.clear()
    shelf.pinned.clear()
    if had:
        _release()


def kept_host_bytes() -> int:
    """RAM that is kept here and that the next trial uses, or gets: a model on the CPU, and pinned memory."""
    if not _open:
        return 0
    models = (model for model in _open[-1].models.values() if model.device.type == "cpu")
    weights = sum(tensor.nbytes for model in models for tensor in _weights(model))
    return weights + sum(memory.nbytes for memory in _open[-1].pinned.values())


def _weights(model: LoadedModel) -> Iterator[Any]:
    yield from model.module.parameters()
    yield from model.module.buffers()


def take_model(asked: ModelAsked) -> LoadedModel:
    """What load_model gives, or gave before for the same question and files where a shelf is open; then it is `reused`.

    Without a shelf each call loads its own. Raises what load_model raises.
    """
    from pensieve.worker.torch.model import load_model

    def load() -> LoadedModel:
        return load_model(**asked._asdict())

    if not _open:
        return load()
    key, models = _key(asked), _open[-1].models
    if key in models:
        return _again(models[key])
    if models:
        models.clear()  # before the next one needs the memory
        _release()
    models[key] = load()
    return models[key]


def holds_model(asked: ModelAsked) -> bool:
    """Whether take_model would load nothing."""
    return bool(_open and _open[-1].models) and _key(asked) in _open[-1].models


def _key(asked: ModelAsked) -> _Key:
    return asked, _files(asked.weights, asked.hub_id, asked.revision)


def _files(weights: str, hub_id: str | None, revision: str | None) -> object:
    """What tells whether the files of the weights are those of before: of a folder, its files with size and time."""
    if weights == "random":
        return None
    if weights == "hub":
        return commit(hub_id, revision) if hub_id else None
    found = sorted(path for pattern in _READ for path in Path(weights).expanduser().glob(pattern))
    return tuple((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in found)


def _again(model: LoadedModel) -> LoadedModel:
    import torch

    torch.set_num_threads(model.threads)  # as load_model does: something else may have run since
    return replace(model, reused=True)


def take_pinned(device: int, size: int) -> NDArray[Any] | None:
    """Memory page-locked for a device, of at least `size` bytes, that an earlier worker gave back, holding what it left
    there; None where there is none. What is too small is returned to the system: there may be no room for both."""
    memory = _open[-1].pinned.pop(device, None) if _open else None
    return memory if memory is not None and memory.nbytes >= size else None


def give_pinned(device: int, memory: NDArray[Any]) -> None:
    """Page-locked memory that nobody uses any more: kept where a shelf is open. The larger of two pieces stays."""
    if _open and ((other := _open[-1].pinned.get(device)) is None or other.nbytes < memory.nbytes):
        _open[-1].pinned[device] = memory


def _release() -> None:
    import torch

    gc.collect()  # the frame in which transformers was imported first stays, in a circle, and with it its model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
