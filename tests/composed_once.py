"""Files of conf/ are read once in a process: most of the time of most tests that compose. A file is another one when its
time or its size is."""

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf


@contextmanager
def composing_once() -> Iterator[None]:
    Plugins.instance()  # registers the sources
    with pytest.MonkeyPatch.context() as patch:
        for scheme in ("file", "pkg"):
            source = SourcesRegistry.instance().resolve(scheme)
            patch.setattr(source, "load_config", _once(source.load_config, _of_source))
        patch.setattr(OmegaConf, "load", staticmethod(_once(OmegaConf.load, _of_file)))
        yield


def _once(load: Callable[..., Any], key_of: Callable[..., object]) -> Callable[..., Any]:
    """key_of: of its arguments; None: load it each time."""
    read: dict[object, bytes] = {}

    @functools.wraps(load)
    def loaded(*given: Any, **named: Any) -> Any:
        key = key_of(*given, **named)
        if key is None:
            return load(*given, **named)
        if key not in read:
            read[key] = pickle.dumps(load(*given, **named))
        return pickle.loads(read[key])  # Hydra takes its defaults out; a tenth of the time of a deep copy

    return loaded


def _of_source(source: Any, config_path: str) -> object:
    file = os.path.join(source.path, source._normalize_file_name(config_path))
    return source.provider, file, _state(file)


def _of_file(file: Any) -> object:
    state = _state(os.fspath(file)) if isinstance(file, str | os.PathLike) else None
    return None if state is None else (os.fspath(file), state)


def _state(file: str) -> tuple[int, int, int] | None:
    """None of a file that is missing, or in a package, which does not change."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
