"""Find conf/ (beside the package in a checkout, in its share/ in an installed wheel), its options, the outputs folder; what
typed overrides mean before Hydra composes them; and what --help prints.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from string import Template
from textwrap import fill
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


_SIMULATED = ("model=llama3_8b", "cache=small", "hardware=sim_a100_80g")
"""Where recorded conversations are replayed unless something is chosen: recorded pauses take no real time there."""


def as_meant(arguments: Sequence[str], config_name: str = "config") -> tuple[list[str], list[str]]:
    """The command line with what it implies, and a line for people on each change. config_name: as of `guarded`."""
    meant = [_whole(text) for text in arguments]
    notes = [f"{typed} is now {now}." for typed, now in zip(arguments, meant, strict=True) if typed != now]
    path = next((place for place, text in enumerate(meant) if _has([text], "workload.path=")), None)
    if path is not None and not _has(meant, "workload=", "experiment=", "replay="):
        added = ["workload=trace"]
        if config_name == "config" and not _has(meant, "model", "cache", "hardware"):
            added += _SIMULATED
        notes.append(f"workload.path names recorded conversations; replayed with {' '.join(added)}.")
        meant[path:path] = (
            added  # beside it: argparse wants all overrides in one piece, and `--cfg job` may end the line
        )
    return meant, notes


def _whole(text: str) -> str:
    """experiment=NAME with its folder, where it was left out (hotness) or is a prefix (paper_eviction)."""
    name = text.removeprefix("experiment=")
    if name == text or name in (known := options("experiment")):
        return text
    for option in known:
        folder, _, own = option.rpartition("/")
        if name in (own, f"{folder}_{own}", f"{folder.removesuffix('s')}_{own}"):
            return f"experiment={option}"
    return text


def _has(arguments: Sequence[str], *beginnings: str) -> bool:
    return any(text.lstrip("+").startswith(beginnings) for text in arguments)


GROUPS = ("model", "cache", "eviction", "scheduler", "baseline", "workload", "hardware", "scale", "tracking", "sweep")
_WIDTH = 120


def page(config_name: str, overrides: Sequence[str]) -> str:
    """hydra.help.template of conf/`config_name`.yaml, filled in. Hydra's own --help lists all groups again for each group,
    which takes longer than the rest of the command."""
    from hydra import compose, initialize_config_dir  # neither is where vLLM runs a policy of ours
    from omegaconf import OmegaConf, open_dict

    OmegaConf.register_new_resolver("choices", choices, replace=True)  # ${choices:} or ${choices:model,cache}
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        cfg = compose(config_name, list(overrides), return_hydra_config=True)
    template = Template(cfg.hydra.help.template)
    with open_dict(cfg):
        del cfg["hydra"]
    return template.substitute(CONFIG=OmegaConf.to_yaml(cfg))


def choices(*groups: str) -> str:
    """The options of these groups; without any, of all that runners/run.py has, and its experiments."""
    lines = [
        fill(f"{group}: {', '.join(options(group))}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
        for group in groups or GROUPS
    ]
    if groups:
        return "\n".join(lines)
    names = options("experiment")
    width = max(map(len, names)) + 2
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        lines += ["", f"Experiments: {folder or 'start here'}"]
        lines += [f"  {name:<{width}}{clause(name)}" for name in names if name.rpartition("/")[0] == folder]
    return "\n".join(lines)


def clause(experiment: str) -> str:
    """What an experiment shows: the first sentence of its comment, which follows the command."""
    lines = (conf_folder() / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    _package, _command, *comment = takewhile(lambda line: line.startswith("#"), lines)
    return re.split(r"[.;?](?:\s|$)", " ".join(line.removeprefix("# ") for line in comment), maxsplit=1)[0]
