"""The attention backends: what attention_backend= means, what each of them needs, and how it is loaded.

Imports no torch before one is loaded: a trial's identity asks which can be expected to serve. What only a start can tell
(does the compiler compile, does the kernel pass the self-check) is decided in device.choice.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from pensieve.compiler import find_compiler
from pensieve.errors import ConfigError, EngineMissing

if TYPE_CHECKING:
    import torch

    from pensieve.device.kernels.base import AttentionBackend


BACKENDS = ("reference", "native", "triton", "triton_pointers")
ON_CPU = ("native", "reference")  # best first
ON_CUDA = ("triton", "triton_pointers", "reference")
CAPTURING = frozenset({"triton", "triton_pointers"})
"""Backends whose launches may be recorded in a CUDA graph."""


def candidates(choice: str, kind: str) -> tuple[str, ...]:
    """What attention_backend=`choice` means on a device of this kind (cpu, cuda): backends to try, best first.

    Raises ConfigError for an unknown name.
    """
    if choice == "auto":
        return ON_CUDA if kind == "cuda" else ON_CPU
    if choice not in BACKENDS:
        raise ConfigError(f"attention_backend={choice} is unknown; use auto, {', '.join(BACKENDS)}.")
    return (choice,)


def expected(choice: str, kind: str, chunk_tokens: int) -> str:
    """The first candidate for which nothing is known to be missing; the last one where something is for each."""
    names = candidates(choice, kind)
    for name in names:
        try:
            require(name, kind, chunk_tokens)
        except EngineMissing:
            continue
        return name
    return names[-1]


def require(name: str, kind: str, chunk_tokens: int) -> None:
    """Raises EngineMissing, in one sentence, for a backend that cannot run here."""
    if name == "native":
        _require_native(kind)
    elif name in ("triton", "triton_pointers"):
        _require_triton(name, kind, chunk_tokens)


def load_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> AttentionBackend:
    """Raises EngineMissing, in one sentence, where it cannot run here."""
    require(name, device.type, chunk_tokens)
    if name == "reference":
        from pensieve.device.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "native":
        from pensieve.device.kernels.native import NativeBackend

        return NativeBackend(head_dim, dtype)
    from pensieve.device.kernels.triton_backend import TritonBackend, TritonPointersBackend

    return TritonBackend() if name == "triton" else TritonPointersBackend()


def _require_native(kind: str) -> None:
    if kind != "cpu":
        raise EngineMissing("attention_backend=native runs on a CPU only; use auto or triton on a GPU.")
    find_compiler()


def _require_triton(name: str, kind: str, chunk_tokens: int) -> None:
    if importlib.util.find_spec("triton") is None:
        raise EngineMissing(
            f"attention_backend={name} needs the package triton (pip install 'pensieve-lab[triton]'); or use auto."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kind == "cpu" and not interpreted:
        raise EngineMissing(
            f"attention_backend={name} needs a GPU; use auto on a CPU, or set TRITON_INTERPRET=1 to run the kernel in "
            "Triton's interpreter (slow, for tests)."
        )
    if kind == "cuda" and interpreted:
        raise EngineMissing("TRITON_INTERPRET=1 is set, which is for tests without a GPU; unset it.")
    if chunk_tokens & (chunk_tokens - 1):
        raise EngineMissing(
            f"attention_backend={name} takes blocks of a power of two of tokens, and cache.chunk_tokens={chunk_tokens}; use "
            "another size, or attention_backend=reference."
        )
