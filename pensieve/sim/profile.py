"""Seconds measured on the device that serves: the cost model of real hardware (paper section 4.3.1).

An iteration that computes positions [i, l) takes a + max(w, b (l - i)) + q (l^2 - i^2): a is what it costs anyway, w the
reading of the weights, b the linear layers' arithmetic, q attention. No term is negative. Short iterations are bound by w
and long ones by b: one fit over both would read the hinge between them as attention. The marginal chunk of a longer
prefill that ends at context l costs its share of b and of q. Differences of neighbouring measurements would carry their
noise straight into the retention value; a lone forward of 32 tokens would measure w and turn it into LRU.

Up to WHOLE tokens, prefills from position 0 are measured. At longer contexts an iteration computes the last TAIL tokens
only, as a server does: its time tells q, and it needs neither the time nor the memory of a prefill of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from pensieve.errors import WorkerError

SHORTEST = 32  # tokens: where a machine is bound by its weights, some lengths must show it
WHOLE = 1024
TAIL = 512
_ROUNDS = 4
_LONG_S = 0.2  # a run this long is repeated once at most, shorter ones in every round
_BUDGET_S = 8.0  # of measured time, to see every length once; those up to _ALWAYS are seen whatever they take
_ALWAYS = 128
_REPEATS_S = 4.0  # nothing is repeated beyond so much measured time
_EXACT = 1e-12  # sums of squared relative errors that differ by less are equal: the fit of fewer terms is taken


@dataclass(frozen=True, slots=True)
class Terms:
    """step_s: a. weights_s: w. linear_s: b, a token. attention_s: q, by squared tokens of context."""

    step_s: float
    weights_s: float
    linear_s: float
    attention_s: float

    def iteration_s(self, start: int, stop: int) -> float:
        linear = max(self.weights_s, self.linear_s * (stop - start))
        return self.step_s + linear + self.attention_s * (stop**2 - start**2)


@dataclass(frozen=True)
class Profile:
    """prefill_s: context length -> seconds of a prefill of it in one iteration, ascending. load_chunk_s: one chunk from CPU
    to GPU, 0 where there is no CPU tier.

    where: device, threads, dtype and versions. tail_s: context length -> seconds of an iteration over its last
    `tail_tokens`.
    """

    chunk_tokens: int
    prefill_s: Mapping[int, float]
    load_chunk_s: float
    where: Mapping[str, Any]
    tail_s: Mapping[int, float] = field(default_factory=dict)
    tail_tokens: int = TAIL

    @cached_property
    def terms(self) -> Terms:
        return fit(self._measured())

    def recompute_s(self, context_tokens: int) -> float:
        """One chunk that ends at this context: non-decreasing in it."""
        terms, context = self.terms, max(context_tokens, self.chunk_tokens)
        return self.chunk_tokens * (terms.linear_s + terms.attention_s * (2 * context - self.chunk_tokens))

    def step_s(self) -> float:
        return self.terms.step_s

    def weights_s(self) -> float:
        return self.terms.weights_s

    def load_s(self) -> float:
        return self.load_chunk_s

    def describe(self) -> dict[str, Any]:
        return {"kind": "profile", **asdict(self), "terms": asdict(self.terms)}

    def _measured(self) -> list[_Measured]:
        whole = [(0, length, seconds) for length, seconds in self.prefill_s.items()]
        return whole + [(length - self.tail_tokens, length, seconds) for length, seconds in self.tail_s.items()]


_Measured = tuple[int, int, float]  # first position, end, seconds


def measure(
    iteration: Callable[[int, int], float],
    chunk_tokens: int,
    longest: int,
    where: Mapping[str, Any],
    most: int = WHOLE,
) -> Profile:
    """Profile a device through `iteration(start, stop) -> seconds` at the powers of two up to `longest`, the context that
    its pools hold; the fastest run counts, of a context or of a longer one, since noise only adds.

    most: positions of one iteration, at most: there is memory for no more. Raises WorkerError where a prefill fails; where a
    longer context does, which may need more memory than there is, or would take too long, the profile ends before it.
    """
    lengths = list(powers_of_two(SHORTEST, longest)) or [longest]
    whole, tail = min(WHOLE, most), min(TAIL, most)
    fastest: dict[int, float] = {}
    spent = 0.0

    def run(length: int) -> float:
        return iteration(0 if length <= whole else length - tail, length)

    for index, length in enumerate(lengths):
        # A prefill of twice the length takes twice as long, an iteration over as many tokens much as long, but for attention.
        if length > _ALWAYS and spent + fastest[lengths[index - 1]] * (2 if length <= whole else 1) > _BUDGET_S:
            break
        try:
            fastest[length] = run(length)
        except WorkerError:
            if length <= whole or not index:
                raise
            break
        spent += fastest[length]
    for repeat in range(_ROUNDS):
        for length, least in fastest.items():
            if (repeat == 0 or least < _LONG_S) and spent + least <= _REPEATS_S:
                seconds = run(length)
                spent += seconds
                fastest[length] = min(least, seconds)
    return Profile(
        chunk_tokens=chunk_tokens,
        prefill_s=_rising({length: seconds for length, seconds in fastest.items() if length <= whole}),
        load_chunk_s=0.0,
        where=dict(where),
        tail_s=_rising({length: seconds for length, seconds in fastest.items() if length > whole}),
        tail_tokens=tail,
    )


def _rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """None above a longer one's: a shorter iteration takes no longer, so what it took beyond that was noise."""
    values = np.array(list(seconds.values()))
    return dict(zip(seconds, np.minimum.accumulate(values[::-1])[::-1].tolist(), strict=True))


def powers_of_two(first: int, last: int) -> Sequence[int]:
    """Those in [first, last]."""
    lowest = (first - 1).bit_length()
    return tuple(1 << power for power in range(lowest, max(lowest, last.bit_length())))


_LEAST_LINEAR_S = 1e-15
"""Of a token, where no iteration tells: all of them took as long as their weights."""


def fit(measured: Sequence[_Measured]) -> Terms:
    """Least squares of the relative errors under a, w, q >= 0 and b > 0.

    For each place of the hinge, with a and without, the terms are linear in the measurements; those that then meet all of
    them best by iteration_s, which places the hinge by itself, are taken.
    """
    from scipy.optimize import nnls  # a simulation fits nothing, and starts at once

    seconds = np.array([each for _, _, each in measured])
    tokens = np.array([stop - start for start, stop, _ in measured], dtype=float)
    pairs = np.array([stop**2 - start**2 for start, stop, _ in measured], dtype=float)
    best = Terms(0.0, 0.0, float(np.mean(seconds / tokens)), 0.0)
    least = _squared_error(best, measured)
    lengths = sorted(set(tokens))
    # Two lengths at least are bound by arithmetic, or there is no hinge.
    for hinge, constant in product(lengths[: max(1, len(lengths) - 1)], (0.0, 1.0)):
        bound = tokens < hinge
        columns = np.stack([constant * np.ones_like(tokens), bound * 1.0, np.where(bound, 0.0, tokens), pairs], axis=1)
        relative = columns / seconds[:, None]
        scale = np.where(columns.any(axis=0), relative.max(axis=0), 1.0)  # tokens and their squares differ by much
        found, _ = nnls(relative / scale, np.ones_like(seconds))
        step_s, weights_s, linear_s, attention_s = (found / scale).tolist()
        terms = Terms(step_s, weights_s, max(linear_s, _LEAST_LINEAR_S), attention_s)
        error = _squared_error(terms, measured)
        if error < least - _EXACT:
            best, least = terms, error
    return best


def _squared_error(terms: Terms, measured: Sequence[_Measured]) -> float:
    return sum((terms.iteration_s(start, stop) / seconds - 1) ** 2 for start, stop, seconds in measured)
