"""The engine as a library, and over HTTP. Names are resolved on first use: a client of one needs nothing of the other."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "create_server": "pensieve.serve.server.create",
    "Server": "pensieve.serve.server.api",
    "Stream": "pensieve.serve.server.api",
    "Generation": "pensieve.serve.server.api",
}
__all__ = ["Generation", "Server", "Stream", "create_server"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pensieve.serve.server' has no attribute {name!r}")
