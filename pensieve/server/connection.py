"""One client's connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_READ_BYTES = 16_384


class Connection(H11Protocol):
    """Uvicorn's over h11, which limits the bytes of headers (httptools, its first choice where it is installed, does not).

    asyncio reads into a buffer of 256 KiB, of which a request leaves a few hundred bytes in use: each such hole is one in the
    heap. A long body comes in more reads.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # uvloop's has none
            made: Any = transport
            made.max_size = _READ_BYTES
        super().connection_made(transport)
