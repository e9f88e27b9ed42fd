"""Public names of a package, each imported with its module when it is first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def from_modules(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package (PEP 562). modules: the module of each public name."""

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return attribute
