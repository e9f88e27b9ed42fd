"""Explain an error of Hydra, or of the system, in one sentence; HYDRA_FULL_ERROR=1 shows its whole trace."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pensieve.errors import PensieveError
from pensieve.lab.compose.conf import BASES, conf_folder, ended, nearest, options

_KEY = re.compile(r"[Cc]ould not (?:override|append to config|delete from config)[^']*'\+?~?([^'=@]+)")

_NOT_THE_USERS = (
    Path(__file__).resolve().parents[2],
    *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
)
_OF_HYDRA = ("Only one of --run, --multirun", "Config group override must be a string")
"""Beginnings of plain ValueErrors for what was typed."""
_SEVERAL = re.compile(r"Ambiguous value for argument '([^']*)'")


def explain(error: BaseException, arguments: Sequence[str] = (), config_name: str = "config") -> str:
    """One sentence for the terminal. arguments: the command line's overrides, to find the field of `config_name` that was
    probably meant."""
    return explain_known(error, arguments, config_name) or f"{type(error).__name__}: {_first_line(error)}"


def explain_known(error: BaseException, arguments: Sequence[str], config_name: str) -> str | None:
    """As `explain`; None for what nobody but the authors can mend."""
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
        return _composition(error, arguments, config_name)
    if isinstance(error, ValueError) and str(error).startswith(_OF_HYDRA):
        return (
            f"{_first_line(error).rstrip('.')}; write group=option, group.field=value or -m alone (--help lists them)."
        )
    return _of_the_users(error)


def explain_crash(error: BaseException) -> str:
    """As `explain`, for what a trial died of: names the file and line where code of the user's own raised it."""
    return _of_the_users(error) or explain(error)


def _of_the_users(error: BaseException) -> str | None:
    """The sentence where a policy, workload or baseline that is not of this package raised it, or one of its causes."""
    place = _line_of_the_user(error)
    if place:
        return f"{place} raised {type(error).__name__}: {_first_line(error).rstrip('.')}; mend it and run again."
    return None if error.__cause__ is None else _of_the_users(error.__cause__)


def _line_of_the_user(error: BaseException) -> str | None:
    """`file, line N` of the innermost frame that belongs neither to this package nor to an installed one."""
    if isinstance(error, PensieveError):
        return None  # says itself what to do; its cause may still be the user's
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.is_absolute() and not any(file.is_relative_to(folder) for folder in _NOT_THE_USERS):
            found = f"{file}, line {line} ({frame.f_code.co_name}),"
    return found


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is no override; write group=option or group.field=value (--help lists them)."
    if re.search(r"[^\w./+-]", value, flags=re.ASCII):
        inner = value.strip("'\"").replace('"', '\\"')
        return f"The value of {key} must be quoted twice, once for the shell: '{key}=\"{inner}\"'."
    return f"The override {override!r} cannot be read; write group=option or group.field=value."


def _no_such_option(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    if (named := missing.removeprefix("model/")) != missing and "/" in named:  # as the API takes it
        return f"There is no option {named!r} of model; a folder or a hub id is given as model=hf model.hub_id={named}."
    group, _, option = missing.rpartition("/")
    if error.options and group:
        known = {str(one) for one in error.options} - set(BASES)
        known |= set(options(group))  # Hydra knows those of this very folder
        return ended(f"There is no {group} {option!r}{nearest(option, known)}")
    return f"There is no configuration {missing!r}; --help lists the groups and their options."


def _composition(error: BaseException, arguments: Sequence[str], config_name: str) -> str:
    several = _SEVERAL.search(str(error))
    if several:
        return f"{several[1]} names several values, which are a sweep; add -m to run one trial for each of them."
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    found = _KEY.search(text)
    if isinstance(error, ConfigCompositionException) and found:
        key = found[1]
        known = _known_keys(key, arguments, config_name)
        if within := [name for name in known if name.endswith(f".{key}")]:
            return f"There is no field or group {key!r}; did you mean {' or '.join(within)}?"
        beside = (name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0])
        return ended(f"There is no field or group {key!r}{nearest(key, beside)}")
    return _first_line(error).rstrip(".") + "."


def _known_keys(key: str, arguments: Sequence[str], config_name: str) -> list[str]:
    """The fields that exist with the options that the command line chose."""
    chosen = [a for a in arguments if re.fullmatch(r"[a-z_]+=[\w-]+", a) and not a.startswith(key + "=")]
    begun = GlobalHydra().is_initialized()
    with nullcontext() if begun else initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
        for overrides in (chosen, []):
            with suppress(HydraException, OmegaConfBaseException):
                return list(_names(OmegaConf.to_container(compose(config_name=config_name, overrides=overrides))))
    return []


def _names(node: Any, under: str = "") -> Iterator[str]:
    for name, value in node.items() if isinstance(node, dict) else ():
        if not str(name).startswith("_"):
            yield f"{under}{name}"
            yield from _names(value, f"{under}{name}.")


def _system(error: OSError) -> str:
    where = os.fsdecode(error.filename) if error.filename else "A file"
    reason = error.strerror or str(error)
    return f"{where} cannot be written or read: {reason}; free the disk, or set PENSIEVE_OUTPUTS to a folder you may write."


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
