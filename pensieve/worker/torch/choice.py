"""Which forward serves, with which attention backend: the first of each that passes the self-check."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.specs import ModelSpec
from pensieve.worker.torch.forward import Forward, TransformersForward
from pensieve.worker.torch.fused import build_fused
from pensieve.worker.torch.kernels.backends import ON_CPU, candidates, load_backend
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kernels.reference import ReferenceBackend
from pensieve.worker.torch.self_check import SelfCheck, check_against_eager

_log = logging.getLogger(__name__)


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


def choose(
    module: Any,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
    backends: Sequence[str],
    chunk_tokens: int,
    memory_bytes: int | None = None,
) -> Choice:
    """Try the attention backends in order, and warn of a fall-back. memory_bytes: see load_model. Raises what the last one
    raises: EngineMissing, UnsupportedModel."""
    notes: list[str] = []
    refused = False
    for name, backend in _loaded(backends, device, dtype, spec.head_dim, chunk_tokens):
        try:
            if isinstance(backend, EngineMissing):
                raise backend
            found = _forward(module, spec, device, dtype, fused, backend, chunk_tokens, memory_bytes)
        except (EngineMissing, UnsupportedModel) as error:
            if name == backends[-1]:
                raise
            refused = refused or isinstance(error, UnsupportedModel)
            notes.append(f"Not {name}: {error}")
        else:
            fell_back = refused or found.refused or _instead(name, backends)
            chosen = Choice(found.forward, found.note, backend, " ".join(notes), fell_back, found.check)
            _warn(spec, chosen)
            return chosen
    raise AssertionError("there is always a backend to try")


def attention_here(
    asked: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> tuple[str, str, bool]:
    """What serves a model that passes its self-check: the backend's name, why no better one, and whether the reference
    serves in place of a kernel. Raises EngineMissing where what was asked for cannot run, ConfigError for an unknown name.
    """
    notes: list[str] = []
    backends = candidates(asked, device.type)
    for name, backend in _loaded(backends, device, dtype, head_dim, chunk_tokens):
        if not isinstance(backend, EngineMissing):
            return name, " ".join(notes), _instead(name, backends)
        if name == backends[-1]:
            raise backend
        notes.append(f"Not {name}: {backend}")
    raise AssertionError("there is always a backend to try")


def _loaded(
    names: Sequence[str], device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> Iterator[tuple[str, AttentionBackend | EngineMissing]]:
    """Each backend, or why it cannot run here."""
    for name in names:
        try:
            yield name, load_backend(name, device, dtype, head_dim, chunk_tokens)
        except EngineMissing as error:
            yield name, error


def _instead(name: str, backends: Sequence[str]) -> bool:
    return name == ReferenceBackend.name and name != backends[0]


def _warn(spec: ModelSpec, chosen: Choice) -> None:
    if chosen.fell_back:
        reasons = " ".join(filter(None, (chosen.attention_note, chosen.forward_note)))
        _log.warning(
            "%s is served by attention_backend=%s and the %s forward, since something better was refused or is missing. %s",
            spec.name, chosen.attention.name, chosen.forward.name, reasons,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    """The forward that serves, with its check. note: why it is not the fused one. refused: the fused one failed its check."""

    forward: Forward
    note: str
    check: SelfCheck
    refused: bool = False


def _forward(
    module: Any,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
    backend: AttentionBackend,
    chunk_tokens: int,
    memory_bytes: int | None,
) -> _Found:
    """Raises UnsupportedModel if no forward passes its check."""

    def check(forward: Forward) -> SelfCheck:
        if backend.name in ON_CPU:  # they take any size: small blocks check more in less time
            return check_against_eager(module, forward, spec, device, dtype, backend)
        return check_against_eager(module, forward, spec, device, dtype, backend, chunk_tokens)

    plain = TransformersForward(module)
    if not fused:
        return _Found(plain, "asked for", check(plain))
    built = build_fused(module, memory_bytes=memory_bytes)
    if isinstance(built, str):
        return _Found(plain, f"no fused forward: {built}", check(plain))
    try:
        return _Found(built, "", check(built))
    except UnsupportedModel as error:
        return _Found(plain, f"the fused forward was refused: {error}", check(plain), refused=True)
