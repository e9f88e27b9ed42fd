"""Which attention backend serves: what attention_backend= says, on this device, with what is installed."""

from __future__ import annotations

import importlib.util
import os

import torch

from pensieve.errors import ConfigError, EngineMissing
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kernels.reference import ReferenceBackend

ON_CPU = ("native", "reference")  # best first
BACKENDS = ("reference", "native", "triton", "varlen", "flashinfer")


def order(choice: str, device: torch.device) -> tuple[str, ...]:
    """The backends to try, best first: one, but for auto. Raises ConfigError for an unknown name."""
    if choice == "auto":
        return ("triton", "varlen", "reference") if device.type == "cuda" else ON_CPU
    if choice not in BACKENDS:
        raise ConfigError(f"attention_backend={choice} is unknown; use auto, {', '.join(BACKENDS)}.")
    return (choice,)


def load_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> AttentionBackend:
    """Raises EngineMissing, in one sentence, where it cannot run here."""
    if name == "reference":
        return ReferenceBackend()
    if name == "native":
        from pensieve.worker.torch.kernels.native import NativeBackend

        return NativeBackend(device, dtype, head_dim)
    if name == "triton":
        return _triton(device, chunk_tokens)
    if name == "varlen":
        from pensieve.worker.torch.kernels.varlen import VarlenBackend

        return VarlenBackend(device, dtype, head_dim, chunk_tokens)
    assert name == "flashinfer", name
    from pensieve.worker.torch.kernels.flashinfer import FlashInferBackend

    return FlashInferBackend(device, dtype)


def _triton(device: torch.device, chunk_tokens: int) -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        raise EngineMissing(
            "attention_backend=triton needs the package triton (pip install 'pensieve[triton]'); or use auto."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu" and not interpreted:
        raise EngineMissing(
            "attention_backend=triton needs a GPU; use auto on a CPU, or set TRITON_INTERPRET=1 to run the kernel in "
            "Triton's interpreter (slow, for tests)."
        )
    if device.type == "cuda" and interpreted:
        raise EngineMissing("TRITON_INTERPRET=1 is set, which is for tests without a GPU; unset it.")
    if chunk_tokens & (chunk_tokens - 1):
        raise EngineMissing(
            f"attention_backend=triton takes blocks of a power of two of tokens, and cache.chunk_tokens={chunk_tokens}; use "
            "another size, or attention_backend=reference."
        )
    from pensieve.worker.torch.kernels.triton_backend import TritonBackend

    return TritonBackend()
