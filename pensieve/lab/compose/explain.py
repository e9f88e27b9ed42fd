"""Explain an error of Hydra, or of the system, in one sentence; HYDRA_FULL_ERROR=1 shows its whole trace."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from pensieve.errors import PensieveError
from pensieve.lab.compose.conf import ended, meant, nearest, options

_KEY = re.compile(r"[Cc]ould not (?:override|append to config|delete from config)[^']*'\+?~?([^'=@]+)")
_NOT_THE_USERS = (
    Path(__file__).resolve().parents[2],
    *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
)
_PLAIN = {
    "Only one of --run, --multirun": "write group=option, group.field=value or -m alone",
    "Config group override must be a string": "write group=option",
    "Unknown plugin class": "hydra/launcher and hydra/sweeper need packages: pip install 'pensieve-lab[launchers]'",
}
"""What to do, by the beginning of what Hydra raises as a plain ValueError or RuntimeError."""


def explain(error: BaseException) -> str:
    """One sentence for the terminal."""
    return explain_known(error) or f"{type(error).__name__}: {_first_line(error)}"


def explain_known(error: BaseException) -> str | None:
    """As `explain`; None for what nobody but the authors can mend."""
    if isinstance(error, PensieveError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, MissingConfigException):
        return _no_such_option(error)
    if isinstance(error, OSError):
        where = os.fsdecode(error.filename) if error.filename else "A file"
        reason = error.strerror or str(error)
        return f"{where} cannot be written or read: {reason}; free the disk, or set PENSIEVE_OUTPUTS to another folder."
    if isinstance(error, ModuleNotFoundError):
        return f"The Python package {error.name} is not installed; install it and run again."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _composition(error)
    for beginning, remedy in _PLAIN.items():
        if str(error).startswith(beginning):
            return f"{_first_line(error)}; {remedy}."
    return _of_the_users(error)


def explain_crash(error: BaseException) -> str:
    """As `explain`, for what a trial died of: names the file and line where code of the user's own raised it."""
    return _of_the_users(error) or explain(error)


def _of_the_users(error: BaseException | None) -> str | None:
    """Where code of neither this package nor an installed one raised the error, or one of its causes."""
    while error is not None:
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            file = Path(frame.f_code.co_filename)
            own = file.is_absolute() and not any(file.is_relative_to(folder) for folder in _NOT_THE_USERS)
            if own and not isinstance(error, PensieveError):  # which says itself what to do
                place = f"{file}, line {line} ({frame.f_code.co_name}),"
                return f"{place} raised {type(error).__name__}: {_first_line(error)}; mend it and run again."
        error = error.__cause__
    return None


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if equals and re.search(r"[^\w./+-]", value, flags=re.ASCII):
        inner = value.strip("'\"").replace('"', '\\"')
        return f"The value of {key} must be quoted twice, once for the shell: '{key}=\"{inner}\"'."
    return f"{override!r} is no override; write group=option or group.field=value (--help lists them)."


def _no_such_option(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    if (named := missing.removeprefix("model/")) != missing and "/" in named:  # as the API takes it
        return f"There is no option {named!r} of model; a folder or a hub id is given as model=hf model.hub_id={named}."
    group, _, option = missing.rpartition("/")
    return ended(f"There is no {group or 'configuration'} {option!r}{nearest(option, options(group) if group else ())}")


def _composition(error: BaseException) -> str:
    said = _first_line(error)
    if said.startswith("Ambiguous value for argument"):
        return f"{said}: several values are a sweep; add -m to run one trial for each of them."
    found = _KEY.search(f"{error}\n{error.__cause__}")
    if isinstance(error, ConfigCompositionException) and found:
        return ended(f"There is no field or group {found[1]!r}{meant(found[1])}")
    return f"{said}."


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).strip().splitlines() if line.strip()), "no reason given").rstrip(".")
