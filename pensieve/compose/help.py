"""What --help lists: the options of each group, and a clause an experiment from the first comment of its file."""

from __future__ import annotations

import re
from itertools import takewhile
from textwrap import fill

from pensieve.compose.folder import conf_folder, options

GROUPS = ("model", "cache", "eviction", "scheduler", "baseline", "workload", "hardware", "scale", "tracking", "sweep")
FOLDERS = {
    "": "start here",
    "paper": "the paper, and what it left out",
    "users": "many users, and conversations that grow",
    "peers": "prefixes, and other engines",
    "agents": "agents, and recorded loads",
    "cluster": "replicas",
    "machine": "the machine, and simulations of it",
}
"""Folders of conf/experiment and their headings, in the order of the page."""
_WIDTH = 120


def choices(*groups: str) -> str:
    """${choices:} or ${choices:model,cache} in hydra.help.template: the options of these groups; without any, of all that runners/run.py has, and its experiments."""
    lines = [
        fill(f"{group}: {', '.join(options(group))}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
        for group in groups or GROUPS
    ]
    if groups:
        return "\n".join(lines)
    names = options("experiment")
    width = max(map(len, names)) + 2
    for folder, heading in FOLDERS.items():
        lines += ["", f"Experiments: {heading}"]
        lines += [f"  {name:<{width}}{clause(name)}" for name in names if name.rpartition("/")[0] == folder]
    return "\n".join(lines)


def clause(experiment: str) -> str:
    """What an experiment shows: the first sentence of its comment, which follows the command."""
    lines = (conf_folder() / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    _package, _command, *comment = takewhile(lambda line: line.startswith("#"), lines)
    return re.split(r"[.;?](?:\s|$)", " ".join(line.removeprefix("# ") for line in comment), maxsplit=1)[0]
