"""Seconds measured on the device that serves: the cost model of real hardware (paper section 4.3.1).

The time P(l) of a prefill of l tokens is measured at powers of two and fitted by a + b l + q l^2 with no negative term:
a is what a step costs anyway, b the linear layers, q attention. The marginal chunk that ends at context l then costs its
share of b and of q. Differences of neighbouring measurements would carry their noise straight into the retention value;
a lone forward of 32 tokens would measure weight loading and turn it into LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

SHORTEST = 128  # tokens; below, matrix products are too small to tell what a marginal chunk costs
_ROUNDS = 4
_LONG_S = 0.2  # a run this long is repeated once, shorter ones in every round


@dataclass(frozen=True)
class Profile:
    """prefill_s: context length -> seconds, ascending. load_chunk_s: one chunk from CPU to GPU, 0 where there is no CPU tier.

    where: device, threads, dtype and versions.
    """

    chunk_tokens: int
    prefill_s: Mapping[int, float]
    load_chunk_s: float
    where: Mapping[str, Any]

    @cached_property
    def terms(self) -> tuple[float, float, float]:
        """a [s], b [s/token], q [s/token^2]."""
        return _fit(self.prefill_s)

    def recompute_s(self, context_tokens: int) -> float:
        """One chunk that ends at this context: non-decreasing in it."""
        _, linear, quadratic = self.terms
        context = max(context_tokens, self.chunk_tokens)
        return self.chunk_tokens * (linear + quadratic * (2 * context - self.chunk_tokens))

    def step_s(self) -> float:
        return self.terms[0]

    def load_s(self) -> float:
        return self.load_chunk_s

    def describe(self) -> dict[str, Any]:
        step, linear, quadratic = self.terms
        fitted = {"step_s": step, "linear_s_per_token": linear, "attention_s_per_token2": quadratic}
        return {"kind": "profile", **asdict(self), **fitted}


def measure(prefill: Callable[[int], float], chunk_tokens: int, longest: int, where: Mapping[str, Any]) -> Profile:
    """Profile a device through `prefill(tokens) -> seconds`; the fastest run counts, since noise only adds."""
    lengths = [1 << power for power in range(longest.bit_length()) if SHORTEST <= 1 << power <= longest] or [longest]
    fastest = {length: prefill(length) for length in lengths}
    for repeat in range(_ROUNDS):
        for length in lengths:
            if repeat == 0 or fastest[length] < _LONG_S:
                fastest[length] = min(fastest[length], prefill(length))
    return Profile(chunk_tokens=chunk_tokens, prefill_s=fastest, load_chunk_s=0.0, where=dict(where))


def _fit(prefill_s: Mapping[int, float]) -> tuple[float, float, float]:
    """Least squares of the relative errors under a, b, q >= 0 with b > 0: the best of the few sets of terms that may be
    zero, which for three terms is exact."""
    lengths = np.array(list(prefill_s), dtype=float)
    seconds = np.array(list(prefill_s.values()), dtype=float)
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / seconds[:, None]
    best, least = (0.0, float(np.mean(seconds / lengths)), 0.0), float("inf")
    for others in ((), (0,), (2,), (0, 2)):
        chosen = sorted((1, *others))
        if len(chosen) > len(lengths):
            continue
        found, *_ = np.linalg.lstsq(columns[:, chosen], np.ones_like(seconds), rcond=None)
        error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
        if (found > 0).all() and error < least:
            terms = [0.0, 0.0, 0.0]
            for index, value in zip(chosen, found, strict=True):
                terms[index] = float(value)
            best, least = (terms[0], terms[1], terms[2]), error
    return best
