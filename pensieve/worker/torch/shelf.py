"""Models that the trials of one process share: loaded once while a shelf is open."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pensieve.specs import ModelSpec
from pensieve.worker.torch.model import LoadedModel, load_model

_shelf: dict[tuple[object, ...], LoadedModel] | None = None


@contextmanager
def open_shelf() -> Iterator[None]:
    """While it is open, a model that is asked for again is the one from before; at most one is kept.

    Without it every trial loads its own, so that load times are measured and a trial that breaks a model breaks no other.
    """
    global _shelf
    before, _shelf = _shelf, {}
    try:
        yield
    finally:
        _shelf = before
        _release()


def take_model(
    spec: ModelSpec,
    weights: str,
    hub_id: str | None,
    revision: str | None,
    seed: int,
    device: str,
    threads: int | None = None,
    attention: str = "auto",
    chunk_tokens: int = 32,
) -> LoadedModel:
    """load_model, or what it gave before for the same arguments where a shelf is open. Raises what load_model raises."""

    def load() -> LoadedModel:
        return load_model(
            spec, weights, hub_id, revision, seed, device, threads, attention=attention, chunk_tokens=chunk_tokens
        )

    if _shelf is None:
        return load()
    key = (spec, weights, hub_id, revision, seed, device, threads, attention, chunk_tokens)
    if key not in _shelf:
        _shelf.clear()  # before the next one needs the memory
        _release()
        _shelf[key] = load()
    return _shelf[key]


def _release() -> None:
    gc.collect()  # the frame in which transformers was imported first stays, in a circle, and with it its model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
