"""Names for full blocks by content: a chain over the tokens from the first position on."""

from __future__ import annotations

import hashlib

from pensieve.core.request import TokenArray

BlockHash = bytes
"""Of all tokens from the first position to the end of a full block."""


class HashChain:
    """Hashes of a session's full blocks, extended as tokens come and cut as they go; each token is hashed once.

    tenant: hashes of two tenants never agree, so that none can tell by a hit what another one has asked.
    """

    def __init__(self, chunk_tokens: int, tenant: str = "") -> None:
        self._size = chunk_tokens
        self._before = hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""
        self._hashes: list[BlockHash] = []

    def upto(self, tokens: TokenArray[int], length: int) -> list[BlockHash]:
        """Return the hashes of the full blocks in [0, length)."""
        while (len(self._hashes) + 1) * self._size <= length:
            start = len(self._hashes) * self._size
            before = self._hashes[-1] if self._hashes else self._before
            block = tokens[start : start + self._size].tobytes()
            self._hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
        return self._hashes[: length // self._size]

    def known(self, index: int) -> BlockHash | None:
        """Return the hash of full block `index` if `upto` has made it, else None. Any thread may ask."""
        return self._hashes[index] if index < len(self._hashes) else None

    def cut(self, length: int) -> None:
        del self._hashes[length // self._size :]
