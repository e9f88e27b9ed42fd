"""A laboratory for stateful LLM serving: Pensieve (EuroSys 2025) and its baselines, on real or simulated hardware.

The public names are resolved on first use, so that importing the package imports no torch.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def from_modules(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package (PEP 562): a public name's module is imported when it is first asked for. modules: by
    name."""

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return attribute


__all__ = ["Generation", "PensieveError", "Server", "create_server"]
__getattr__ = from_modules(
    __name__,
    {
        "create_server": "pensieve.serve.server.api",
        "Server": "pensieve.serve.server.api",
        "Generation": "pensieve.serve.server.api",
        "PensieveError": "pensieve.errors",
    },
)
