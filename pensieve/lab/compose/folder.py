"""Find conf/ (beside the package in a checkout, in its share/ in an installed wheel), its options, and the outputs folder."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError

BASES = ("base", "base_sim")
"""Files of a group that hold what its options share."""


def conf_folder() -> Path:
    """The folder of config.yaml."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package.parent / "conf", package / "share" / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"There is no conf/config.yaml beside {package} or in its share/; install pensieve again.")


def outputs_folder() -> Path:
    """Where results go: PENSIEVE_OUTPUTS, else outputs/ of the checkout, else outputs/ of the current folder."""
    chosen = os.environ.get("PENSIEVE_OUTPUTS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[3]
    return (checkout if (checkout / "conf" / "config.yaml").is_file() else Path.cwd()) / "outputs"


def options(group: str) -> list[str]:
    """The names of a config group's options, those in folders as folder/name, without the files that they only build on."""
    folder = conf_folder() / group
    files = (file for file in folder.rglob("*.yaml") if file.stem not in BASES)
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in files)


def read_option(group: str, option: str) -> dict[str, Any]:
    """One option's YAML merged over the files that it builds on, as plain values; for callers that do not compose with Hydra.

    Raises ConfigError for an unknown option.
    """
    if option not in options(group):
        raise ConfigError(ended(f"There is no {group} {option!r}{nearest(option, options(group))}"))
    content = _merged(group, option)
    return {str(key): value for key, value in content.items()}


def _merged(group: str, name: str) -> dict[Any, Any]:
    """A file merged over those that its `defaults` name, which are of the same group."""
    from omegaconf import OmegaConf

    own = OmegaConf.to_container(OmegaConf.load(conf_folder() / group / f"{name}.yaml"), resolve=True)
    assert isinstance(own, dict)
    below = [_merged(group, above) for above in own.pop("defaults", ()) if above != "_self_"]
    merged = OmegaConf.to_container(OmegaConf.merge(*below, own))
    assert isinstance(merged, dict)
    return merged


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the one that was probably meant, or else all names."""
    known = sorted(set(names))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are: {', '.join(known)}" if known else ""


def ended(sentence: str) -> str:
    """The sentence with a full stop, unless it ends with one or with a question mark."""
    return sentence if sentence.endswith(("?", ".")) else sentence + "."
