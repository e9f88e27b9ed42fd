"""Explain an error of Hydra, or of the system, in one sentence; HYDRA_FULL_ERROR=1 shows its whole trace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pensieve.compose.folder import BASES, conf_folder, ended, nearest
from pensieve.errors import PensieveError

_KEY = re.compile(r"[Cc]ould not (?:override|append to config|delete from config)[^']*'\+?~?([^'=@]+)")


def explain(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """One sentence for the terminal. arguments: the command line's overrides, to find the field that was probably meant."""
    if isinstance(error, PensieveError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, MissingConfigException):
        return _no_such_option(error)
    if isinstance(error, OSError):
        return _system(error)
    if isinstance(error, ModuleNotFoundError):
        return f"The Python package {error.name} is not installed; install it and run again."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _composition(error, arguments)
    return f"{type(error).__name__}: {_first_line(error)}"


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is no override; write group=option or group.field=value (--help lists them)."
    if re.search(r"[=,{}\[\]()\s:'\"\\]", value):
        inner = value.strip("'\"")
        return f"The value of {key} must be quoted twice, once for the shell: '{key}=\"{inner}\"'."
    return f"The override {override!r} cannot be read; write group=option or group.field=value."


def _no_such_option(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/")
    if error.options and group:
        return ended(f"There is no {group} {option!r}{nearest(option, {str(o) for o in error.options} - set(BASES))}")
    return f"There is no configuration {missing!r}; --help lists the groups and their options."


def _composition(error: BaseException, arguments: Sequence[str]) -> str:
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    found = _KEY.search(text)
    if isinstance(error, ConfigCompositionException) and found:
        key = found[1]
        return ended(f"There is no field or group {key!r}{nearest(key, _known_keys(key, arguments))}")
    return _first_line(error).rstrip(".") + "."


def _known_keys(key: str, arguments: Sequence[str]) -> list[str]:
    """The fields next to `key` that exist with the options that the command line chose."""
    chosen = [a for a in arguments if re.fullmatch(r"[a-z_]+=[\w-]+", a) and not a.startswith(key + "=")]
    for overrides in (chosen, []):
        try:
            return list(_field_names(_compose(overrides), key))
        except (HydraException, OmegaConfBaseException):
            continue
    return []


def _compose(overrides: list[str]) -> DictConfig:
    if GlobalHydra().is_initialized():
        return _plain(compose(config_name="config", overrides=overrides))
    with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
        return _plain(compose(config_name="config", overrides=overrides))


def _plain(cfg: object) -> DictConfig:
    assert isinstance(cfg, DictConfig)
    return cfg


def _field_names(cfg: DictConfig, key: str) -> Iterator[str]:
    parent = key.rpartition(".")[0]
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(node, DictConfig):
        node, parent = cfg, ""
    for name in map(str, node):
        if not name.startswith("_"):
            yield f"{parent}.{name}" if parent else name


def _system(error: OSError) -> str:
    where = os.fsdecode(error.filename) if error.filename else "A file"
    reason = error.strerror or str(error)
    return f"{where} cannot be written or read: {reason}; free the disk, or set PENSIEVE_OUTPUTS to a folder you may write."


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
