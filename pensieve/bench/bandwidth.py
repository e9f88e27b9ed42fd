"""What the machine can do at best, measured now: copies within memory, and matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pensieve.bench.timer import interleaved

_COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 64 * 2**20}  # beyond any cache, and short
_SQUARE = {"cuda": 8192, "cpu": 1024}
_ROUNDS = 7


def copy_bytes_s(device: torch.device) -> float:
    """Bytes a second that a plain copy within the device's memory moves, read and written bytes both counted."""
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_s(lambda: target.copy_(source), device)


def matrix_flops_s(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of one large square product (a multiply and an add count two)."""
    n = _SQUARE[device.type]
    a = torch.randn(n, n, dtype=dtype, device=device)
    b = torch.randn(n, n, dtype=dtype, device=device)
    out = torch.empty(n, n, dtype=dtype, device=device)
    return 2 * n**3 / _best_s(lambda: torch.mm(a, b, out=out), device)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """The best round: a limit is what the machine can do undisturbed."""
    with torch.inference_mode():
        times = interleaved({"": run}, _ROUNDS, device, at_least_ms=20.0)[""]
    assert times.error is None, times.error
    return min(times.values) / 1e3
