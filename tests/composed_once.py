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
            patch.setattr(source, "load_config", _reading_once(source.load_config))
        patch.setattr(OmegaConf, "load", staticmethod(_loading_once(OmegaConf.load)))
        yield


def _state(file: str) -> tuple[int, int, int] | None:
    """None of a file that is missing, or in a package, which does not change."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _reading_once(load: Callable[..., Any]) -> Callable[..., Any]:
    read: dict[object, bytes] = {}

    @functools.wraps(load)
    def load_config(self: Any, config_path: str) -> Any:
        file = os.path.join(self.path, self._normalize_file_name(config_path))
        key = (self.provider, file, _state(file))
        if key not in read:
            read[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[key])  # Hydra takes its defaults out; a tenth of the time of a deep copy

    return load_config


def _loading_once(load: Callable[..., Any]) -> Callable[..., Any]:
    read: dict[object, bytes] = {}

    @functools.wraps(load)
    def load_file(file: Any) -> Any:
        state = _state(os.fspath(file)) if isinstance(file, str | os.PathLike) else None
        if state is None:
            return load(file)
        key = (os.fspath(file), state)
        if key not in read:
            read[key] = pickle.dumps(load(file))
        return pickle.loads(read[key])

    return load_file
