"""What --help prints: the options of each group, a clause an experiment from the comment of its file, every field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from string import Template
from textwrap import fill

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from pensieve.lab.compose.folder import conf_folder, options

GROUPS = ("model", "cache", "eviction", "scheduler", "baseline", "workload", "hardware", "scale", "tracking", "sweep")
_WIDTH = 120


def page(config_name: str, overrides: Sequence[str]) -> str:
    """hydra.help.template of conf/`config_name`.yaml, filled in. Hydra's own --help lists all groups again for each group,
    which takes longer than the rest of the command."""
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
