"""Salted hashes: of blocks of a prompt, of names. Whoever has no salt learns nothing of what was said."""

from __future__ import annotations

import hashlib
import os
from array import array

from pensieve.core.request import TokenArray

TOKEN_BYTES = 4
BLOCK_TOKENS, BLOCK_BYTES = 16, 64
"""A block of a recording, in tokens where these are known, else in bytes."""


class Salt:
    """A secret that is never written. key: for tests, and to give two files one salt."""

    def __init__(self, key: bytes | None = None) -> None:
        self._keyed = hashlib.blake2b(key=os.urandom(32) if key is None else key, digest_size=8)

    def blocks(self, data: bytes, size: int, first: int = 0) -> TokenArray[int]:
        """A signed number of 64 bits for each full block of `size` bytes, from block `first` on."""
        digests = bytearray()
        for start in range(first * size, len(data) - size + 1, size):
            keyed = self._keyed.copy()
            keyed.update(data[start : start + size])
            digests += keyed.digest()
        return array("q", bytes(digests))

    def number(self, one: object) -> int:
        """A number for a source's own hash."""
        return int.from_bytes(self._of(str(one)).digest(), "big", signed=True)

    def name(self, text: str) -> str:
        return self._of(text).hexdigest()

    def _of(self, text: str) -> hashlib.blake2b:
        keyed = self._keyed.copy()
        keyed.update(text.encode("utf-8", "replace"))
        return keyed
