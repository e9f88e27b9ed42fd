"""Which forward serves, with which attention backend: the first of each that passes the self-check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.specs import ModelSpec
from pensieve.worker.torch.forward import Forward, TransformersForward
from pensieve.worker.torch.fused import build_fused
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kernels.choose import ON_CPU, load_backend
from pensieve.worker.torch.self_check import SelfCheck, check_against_eager


@dataclass(frozen=True, slots=True)
class Choice:
    """forward_note: why not the fused one; attention_note: why not a better backend; "" where there is nothing to say."""

    forward: Forward
    forward_note: str
    attention: AttentionBackend
    attention_note: str
    check: SelfCheck


def choose(
    module: Any,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
    backends: Sequence[str],
    chunk_tokens: int,
) -> Choice:
    """Try the attention backends in order. Raises what the last one raises: EngineMissing, UnsupportedModel."""
    notes: list[str] = []
    for name in backends:
        try:
            backend = load_backend(name, device, dtype, spec.head_dim, chunk_tokens)
            forward, note, check = _forward(module, spec, device, dtype, fused, backend, chunk_tokens)
        except (EngineMissing, UnsupportedModel) as error:
            if name == backends[-1]:
                raise
            notes.append(f"Not {name}: {error}")
        else:
            return Choice(forward, note, backend, " ".join(notes), check)
    raise AssertionError("there is always a backend to try")


def _forward(
    module: Any,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
    backend: AttentionBackend,
    chunk_tokens: int,
) -> tuple[Forward, str, SelfCheck]:
    """The forward that serves, why it is not the fused one, and its check. Raises UnsupportedModel if none passes."""

    def check(forward: Forward) -> SelfCheck:
        if backend.name in ON_CPU:  # they take any size: small blocks check more in less time
            return check_against_eager(module, forward, spec, device, dtype, backend)
        return check_against_eager(module, forward, spec, device, dtype, backend, chunk_tokens)

    plain = TransformersForward(module)
    if not fused:
        return plain, "asked for", check(plain)
    built = build_fused(module)
    if isinstance(built, str):
        return plain, f"no fused forward: {built}", check(plain)
    try:
        return built, "", check(built)
    except UnsupportedModel as error:
        return plain, f"the fused forward was refused: {error}", check(plain)
