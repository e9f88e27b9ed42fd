"""Token ids that mean nothing: as many as asked for, the same for the same names, and different for others."""

from __future__ import annotations

import hashlib
from array import array
from functools import lru_cache

import numpy as np

from pensieve.core.request import TokenArray

_WIDE = 1 << 16


def filler(tokens: int, vocab: int, *names: object) -> TokenArray[int]:
    """`tokens` ids in [0, vocab), a function of the names alone; fewer tokens are the beginning of more.

    Ids are drawn from the largest power of two that the vocabulary and 16 bits hold: masking bytes is fast, and two
    fillers still have a chance of one in thousands to agree on a token.
    """
    assert tokens >= 0 and vocab >= 2
    bits = min(vocab, _WIDE).bit_length() - 1
    key = "/".join(str(name) for name in names).encode()
    if bits <= 8:
        return array("i", list(hashlib.shake_256(key).digest(tokens).translate(_mask(bits))))
    pairs = hashlib.shake_256(key).digest(2 * tokens)  # low byte, high byte
    return array("i", (np.frombuffer(pairs, "<u2") & ((1 << bits) - 1)).astype("i").tobytes())


@lru_cache(maxsize=9)
def _mask(bits: int) -> bytes:
    return bytes(value & ((1 << bits) - 1) for value in range(256))
