"""Logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pensieve.plan import Sample

# splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers: torch multiplies and adds modulo 2^64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, slots=True)
class Drawn:
    """One entry a sampled row. margin: the row's highest logit less its second highest."""

    tokens: list[int]
    margins: list[float]


def draw(logits: torch.Tensor, samples: Sequence[Sample]) -> Drawn:
    """A token for every row of `logits` [rows, vocab].

    The Gumbel maximum: argmax(logits / temperature + noise) is a draw from softmax(logits / temperature). The noise is
    a function of (key, position) and the token alone, so a row's token is the same in any batch, on any baseline.
    """
    assert len(logits) == len(samples)
    scores = logits.float()
    top = torch.topk(scores, min(2, scores.shape[-1]), dim=-1)
    chosen = top.indices[:, 0].clone()
    for index, sample in enumerate(samples):
        if sample.temperature > 0:
            kept = _keep(scores[index].double() / sample.temperature, sample.top_p, sample.top_k)
            chosen[index] = torch.argmax(kept + gumbel_noise(sample.key, sample.position, kept.shape[0], kept.device))
    margins = top.values[:, 0] - top.values[:, -1]
    return Drawn(chosen.tolist(), margins.tolist())


def gumbel_noise(key: int, position: int, vocab: int, device: torch.device) -> torch.Tensor:
    """[vocab] float64, Gumbel(0, 1): counter-based, so there is no state to keep and nothing to seed."""
    start = _mix_int(_mix_int(key) ^ (position & (2**64 - 1)))
    counters = torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _GAMMA + _signed(start)
    bits = _shift(_mix(counters), 11)  # 53 of them: every value is exact in float64
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _keep(scores: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Minus infinity outside the top_k scores and outside the smallest set whose probability reaches top_p.

    Ties are broken by token id (the sort is stable), so that exactly as many remain on every device.
    """
    if top_k <= 0 and top_p >= 1.0:
        return scores
    ordered, ids = torch.sort(scores, descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered, ids = ordered[:top_k], ids[:top_k]
    if top_p < 1.0:
        probabilities = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probabilities, dim=-1) - probabilities
        within = before < top_p
        within[0] = True  # top_p = 0 still leaves the best
        ordered, ids = ordered[within], ids[within]
    return torch.full_like(scores, float("-inf")).index_copy_(0, ids, ordered)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """The same function, of one Python integer; unsigned."""
    mask = 2**64 - 1
    x = (x + _GAMMA) & mask
    x = ((x ^ (x >> 30)) * _MIX_1) & mask
    x = ((x ^ (x >> 27)) * _MIX_2) & mask
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
