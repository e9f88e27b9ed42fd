"""What Hydra does again each time that it composes, done once in a process: most of the time of most tests that compose.

Files of conf/ are read once, and the options that were chosen together are looked up and merged once; fields that are
overridden are set each time. A file is another one when its time or its size is.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

State = tuple[int, int, int] | None

_reads: list[tuple[str, State]] = []
"""Files that were asked for, with what they were then."""


@dataclass
class _Chosen:
    """What a choice of options came to. files: that it was read from. merged: the configuration, pickled."""

    found: Any
    files: tuple[tuple[str, State], ...]
    merged: bytes | None = field(default=None)


class _Defaults(list[Any]):
    """Hydra's list of what is merged, which knows its choice."""

    def __init__(self, chosen: _Chosen) -> None:
        super().__init__(chosen.found.defaults)
        self.chosen = chosen


@contextmanager
def composing_once() -> Iterator[None]:
    Plugins.instance()  # registers the sources
    with pytest.MonkeyPatch.context() as patch:
        for scheme in ("file", "pkg"):
            source = SourcesRegistry.instance().resolve(scheme)
            patch.setattr(source, "load_config", _reading_once(source.load_config))
        patch.setattr(OmegaConf, "load", staticmethod(_loading_once(OmegaConf.load)))
        name, merge = "create_defaults_list", "_compose_config_from_defaults_list"
        patch.setattr(config_loader_impl, name, _choosing_once(getattr(config_loader_impl, name)))
        patch.setattr(ConfigLoaderImpl, merge, _merging_once(getattr(ConfigLoaderImpl, merge)))
        yield


def _state(file: str) -> State:
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
        state = _state(file)
        _reads.append((file, state))
        key = (self.provider, file, state)
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


def _choosing_once(create: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[object, _Chosen] = {}

    @functools.wraps(create)
    def create_defaults_list(repo: Any, config_name: str | None, overrides_list: list[Any], **how: bool) -> Any:
        fields, others = [], []
        for one in overrides_list:
            (fields if _sets_a_field(one, repo) else others).append(one)
        options = tuple(one.input_line for one in others)
        places = tuple((source.provider, source.path) for source in repo.get_sources())
        key = (config_name, options, places, tuple(sorted(how.items())))
        chosen = known.get(key)
        if chosen is None or any(_state(file) != state for file, state in chosen.files):
            _reads.clear()
            found = create(repo=repo, config_name=config_name, overrides_list=others, **how)
            chosen = known[key] = _Chosen(found, tuple(_reads))
        return replace(chosen.found, defaults=_Defaults(chosen), config_overrides=fields)

    return create_defaults_list


def _sets_a_field(override: Any, repo: Any) -> bool:
    """Rather than choose an option, as Hydra tells them apart."""
    if override.is_sweep_override():
        return False
    return isinstance(override.value(), dict) or not repo.group_exists(override.key_or_group)


def _merging_once(compose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compose)
    def compose_config(self: Any, defaults: list[Any], repo: Any) -> Any:
        if not isinstance(defaults, _Defaults):
            return compose(self, defaults=defaults, repo=repo)
        chosen = defaults.chosen
        if chosen.merged is None:
            chosen.merged = pickle.dumps(compose(self, defaults=defaults, repo=repo))
        return pickle.loads(chosen.merged)

    return compose_config
