"""Random draws that depend on names, not on the order in which they are asked for.

A think time fixed by (seed, session, turn) is the same under every baseline, however their finishes interleave.
"""

from __future__ import annotations

import hashlib
import math


def uniform(seed: int, *names: object) -> float:
    """In [0, 1), 53 bits, a function of the seed and the names alone (`hash()` would differ between processes)."""
    text = "/".join(str(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def exponential(mean: float, seed: int, *names: object) -> float:
    """Exponentially distributed with the given mean; 0 where the mean is 0."""
    return -mean * math.log1p(-uniform(seed, *names))


def between(low: int, high: int, seed: int, *names: object) -> int:
    """A whole number in [low, high], each equally likely."""
    return low + int(uniform(seed, *names) * (high - low + 1))


def shuffled(count: int, seed: int, *names: object) -> list[int]:
    """A permutation of range(count)."""
    return sorted(range(count), key=lambda index: uniform(seed, *names, index))


PART_RULE = "the first byte of the SHA-256 of the conversation's id, modulo the number of parts"


def part_of(conversation: str, parts: int) -> int:
    """Which of `parts` parts, from 1, it belongs to (PART_RULE), in whatever trace and under every seed."""
    return 1 + hashlib.sha256(conversation.encode()).digest()[0] % parts
