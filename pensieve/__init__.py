"""A laboratory for stateful LLM serving: Pensieve (EuroSys 2025) and its baselines, on real or simulated hardware.

The public names are resolved on first use, so that importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "create_server": "pensieve.server.api",
    "Server": "pensieve.server.api",
    "Generation": "pensieve.server.api",
    "PensieveError": "pensieve.errors",
}
__all__ = ["Generation", "PensieveError", "Server", "create_server"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pensieve' has no attribute {name!r}")
