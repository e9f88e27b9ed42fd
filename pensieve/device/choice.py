"""Which forward serves, with which attention backend: the first of each that passes the self-check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pensieve.device.asked import ModelAsked
from pensieve.device.attention import Forward, TransformersForward
from pensieve.device.fused import build_fused
from pensieve.device.kernels.backends import ON_CPU, candidates, load_backend
from pensieve.device.kernels.base import AttentionBackend
from pensieve.device.kernels.reference import ReferenceBackend
from pensieve.device.self_check import SelfCheck, check_against_eager
from pensieve.errors import EngineMissing, UnsupportedModel

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Choice:
    """forward_note: why not the fused one; attention_note: why not a better backend; "" where there is nothing to say.

    fell_back: a backend or a forward was refused by its self-check, or the reference serves in place of a kernel.
    """

    forward: Forward
    forward_note: str
    attention: AttentionBackend
    attention_note: str
    fell_back: bool
    check: SelfCheck


def choose(module: Any, asked: ModelAsked, device: torch.device, backends: Sequence[str]) -> Choice:
    """Try the attention backends in order, and warn of a fall-back. Raises what the last one raises: EngineMissing,
    UnsupportedModel."""

    def serve(backend: AttentionBackend) -> tuple[AttentionBackend, _Found]:
        return backend, _forward(module, asked, device, dtype, backend)

    spec, dtype = asked.spec, getattr(torch, asked.spec.dtype)
    name, (backend, found), note, refused = _first(backends, device, dtype, spec.head_dim, asked.chunk_tokens, serve)
    fell_back = refused or found.refused or _instead(name, backends)
    chosen = Choice(found.forward, found.note, backend, note, fell_back, found.check)
    if fell_back:
        _log.warning(
            "%s is served by attention_backend=%s and the %s forward, since something better was refused or is missing. %s",
            spec.name, name, found.forward.name, " ".join(filter(None, (note, found.note))),
        )  # fmt: skip
    return chosen


def attention_here(
    asked: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> tuple[str, str, bool]:
    """What serves a model that passes its self-check: the backend's name, why no better one, and whether the reference
    serves in place of a kernel. Raises EngineMissing where what was asked for cannot run, ConfigError for an unknown name.
    """
    backends = candidates(asked, device.type)
    name, _, note, _ = _first(backends, device, dtype, head_dim, chunk_tokens, lambda backend: backend)
    return name, note, _instead(name, backends)


def _first(
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    chunk_tokens: int,
    serve: Callable[[AttentionBackend], _T],
) -> tuple[str, _T, str, bool]:
    """The first backend that loads and serves: its name, what `serve` made of it, why not the ones before, and whether
    `serve` refused one of them. Raises what the last one raises."""
    notes: list[str] = []
    refused = False
    for name in names:
        try:
            backend = load_backend(name, device, dtype, head_dim, chunk_tokens)
            return name, serve(backend), " ".join(notes), refused
        except (EngineMissing, UnsupportedModel) as error:
            if name == names[-1]:
                raise
            refused = refused or isinstance(error, UnsupportedModel)
            notes.append(f"Not {name}: {error}")
    raise AssertionError("there is always a backend to try")


def _instead(name: str, backends: Sequence[str]) -> bool:
    return name == ReferenceBackend.name != backends[0]


@dataclass(frozen=True, slots=True)
class _Found:
    """The forward that serves, with its check. note: why it is not the fused one. refused: the fused one failed its check."""

    forward: Forward
    note: str
    check: SelfCheck
    refused: bool = False


def _forward(
    module: Any, asked: ModelAsked, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> _Found:
    """Raises UnsupportedModel if no forward passes its check."""

    def check(forward: Forward) -> SelfCheck:
        if backend.name in ON_CPU:  # they take any size: small blocks check more in less time
            return check_against_eager(module, forward, asked.spec, device, dtype, backend)
        return check_against_eager(module, forward, asked.spec, device, dtype, backend, asked.chunk_tokens)

    plain = TransformersForward(module)
    if not asked.fused:
        return _Found(plain, "asked for", check(plain))
    built = build_fused(module, memory_bytes=asked.memory_bytes)
    if isinstance(built, str):
        return _Found(plain, f"no fused forward: {built}", check(plain))
    try:
        return _Found(built, "", check(built))
    except UnsupportedModel as error:
        return _Found(plain, f"the fused forward was refused: {error}", check(plain), refused=True)
