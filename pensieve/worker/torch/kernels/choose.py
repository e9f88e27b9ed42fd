"""Which attention backend serves: what attention_backend= says, on this device, with what is installed."""

from __future__ import annotations

from importlib import import_module

import torch

from pensieve.worker.torch.kernels.availability import BACKENDS, LIBRARIES, ON_CPU, candidates, require
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kernels.reference import ReferenceBackend

__all__ = ["BACKENDS", "ON_CPU", "load_backend", "order"]


def order(choice: str, device: torch.device) -> tuple[str, ...]:
    """The backends to try, best first: one, but for auto. Raises ConfigError for an unknown name."""
    return candidates(choice, device.type)


def load_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> AttentionBackend:
    """Raises EngineMissing, in one sentence, where it cannot run here."""
    require(name, device.type, str(dtype).removeprefix("torch."), chunk_tokens)
    if name == "reference":
        return ReferenceBackend()
    if name == "native":
        from pensieve.worker.torch.kernels.native import NativeBackend

        return NativeBackend(head_dim, dtype)
    if name == "triton":
        from pensieve.worker.torch.kernels.triton_backend import TritonBackend

        return TritonBackend()
    if name == "triton_pointers":
        from pensieve.worker.torch.kernels.triton_backend import TritonPointersBackend

        return TritonPointersBackend()
    module, _, kind = LIBRARIES[name].backend.rpartition(".")
    found: AttentionBackend = getattr(import_module(module), kind)(device, dtype, head_dim, chunk_tokens)
    return found
