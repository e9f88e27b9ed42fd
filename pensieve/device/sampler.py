"""Logits to tokens, wholly on the device: nothing here waits for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.core.plan import Sample

# splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers: torch multiplies and adds modulo 2^64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_TOGETHER = 16  # rows drawn at once: each takes some ten float64 vectors of the vocabulary


@dataclass(frozen=True, slots=True)
class Draws:
    """How the rows with a temperature are drawn; the others are greedy. All [draws]; rows: their places among the logits.

    starts: of the noise, see noise_starts. limited: some row has a top_k or top_p.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    temperatures: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    limited: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens [rows] int64. margins [rows] float32: the highest logit less the next one, 0 for a tie; not finite where the
    logits are not."""

    tokens: torch.Tensor
    margins: torch.Tensor


def numbers_of(samples: Sequence[Sample]) -> tuple[list[NDArray[np.int64]], bool]:
    """The fields of Draws, in their order, as integers that can travel with others (floats bit for bit), and `limited`."""
    rows = [row for row, sample in enumerate(samples) if sample.temperature > 0]
    drawn = [samples[row] for row in rows]
    starts = noise_starts([sample.key for sample in drawn], [sample.position for sample in drawn])
    floats = ([sample.temperature for sample in drawn], [sample.top_p for sample in drawn])
    temperatures, top_p = (np.array(values, dtype=np.float64).view(np.int64) for values in floats)
    places, top_k = (np.array(values, dtype=np.int64) for values in (rows, [sample.top_k for sample in drawn]))
    limited = any(sample.top_k > 0 or sample.top_p < 1.0 for sample in drawn)
    return [places, starts, temperatures, top_p, top_k], limited


def draws_of(numbers: Sequence[torch.Tensor], limited: bool) -> Draws:
    """Make Draws, on the device, of what `numbers_of` gave."""
    rows, starts, temperatures, top_p, top_k = numbers
    return Draws(rows, starts, temperatures.view(torch.float64), top_p.view(torch.float64), top_k, limited)


def draw(logits: torch.Tensor, draws: Draws | None) -> Drawn:
    """A token for every row of `logits` [rows, vocab].

    The Gumbel maximum: argmax(logits / temperature + noise) is a draw from softmax(logits / temperature). The noise is
    a function of (key, position) and the token alone, so a row's token is the same in any batch, on any baseline.
    """
    scores = logits.float()
    tokens = greedy(scores)
    top = torch.topk(scores, min(2, scores.shape[-1]), dim=-1).values
    margins = top[:, 0] - top[:, -1]
    if draws is not None:
        for first in range(0, len(draws.rows), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            rows = draws.rows[some]
            chosen = scores.index_select(0, rows)
            wanted = chosen.double() / draws.temperatures[some, None]
            if draws.limited:
                wanted = _keep(wanted, chosen, draws.top_p[some, None], draws.top_k[some, None])
            wanted += gumbel_noise(draws.starts[some], wanted.shape[1])
            tokens.index_copy_(0, rows, greedy(wanted))
    return Drawn(tokens, margins)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The token [...] that temperature 0 takes of logits [..., vocab]: the highest, and of equal ones the lowest id. This is
    the one definition. torch.topk promises no order of equal values; 16-bit logits are often equal."""
    return torch.argmax(logits, dim=-1)


def noise_starts(keys: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """Where the noise of each draw begins: a function of its key and position, [draws]."""
    unsigned = np.array([key & (2**64 - 1) for key in keys], dtype=np.uint64)
    mixed = _mix(torch.from_numpy(unsigned.view(np.int64)) + _GAMMA) ^ torch.tensor(positions, dtype=torch.int64)
    return _mix(mixed + _GAMMA).numpy()


def gumbel_noise(starts: torch.Tensor, vocab: int) -> torch.Tensor:
    """[rows, vocab] float64, Gumbel(0, 1): counter-based, so there is no state to keep and nothing to seed."""
    counters = torch.arange(1, vocab + 1, dtype=torch.int64, device=starts.device) * _GAMMA + starts[:, None]
    bits = _shift(_mix(counters), 11)  # 53 of them: every value is exact in float64
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _keep(scores: torch.Tensor, keys: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Minus infinity outside each row's top_k scores and outside the smallest set whose probability reaches its top_p.

    scores [rows, vocab]; top_p, top_k [rows, 1]. keys: float32, in the order of the scores (the logits they are made of):
    half as wide to sort. Ties are broken by token id (the sort is stable), so that exactly as many remain on every device.
    Nothing is selected by a mask of unknown size, which would wait for the device.
    """
    nothing = float("-inf")
    ids = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    ordered = scores.gather(1, ids)
    place = torch.arange(scores.shape[1], device=scores.device)[None, :]
    ordered = ordered.masked_fill((top_k > 0) & (place >= top_k), nothing)
    probabilities = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probabilities, dim=-1) - probabilities
    beyond = (top_p < 1.0) & (before >= top_p) & (place > 0)  # top_p = 0 still leaves the best
    return torch.empty_like(scores).scatter_(1, ids, ordered.masked_fill(beyond, nothing))


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
