"""Find conf/ (beside the package in a checkout, in its share/ in an installed wheel), its options, the outputs folder; what
typed overrides mean before Hydra composes them; and what --help prints.
"""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
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


def meant(key: str) -> str:
    """The end of a sentence about an unknown field or group: the one with such a name beside it."""
    above, dot, name = key.rpartition(".")
    folder, own = conf_folder() / key.partition(".")[0], conf_folder().glob("*.yaml")
    texts = [file.read_text() for file in (folder.rglob("*.yaml") if dot and folder.is_dir() else own)]
    form = r"^(?:  - )?(\w+):" if not dot else r"^ *(\w+):" if folder.is_dir() else r"^ +(\w+):"
    names = {one for text in texts for one in re.findall(form, text, re.MULTILINE)}
    close = difflib.get_close_matches(name, names - {name}, n=1, cutoff=0.65)
    return f"; did you mean {above}{dot}{close[0]}?" if close else ""


def ended(sentence: str) -> str:
    """The sentence with a full stop, unless it ends with one or with a question mark."""
    return sentence if sentence.endswith(("?", ".")) else sentence + "."


_SIMULATED = ("model=llama3_8b", "cache=small", "hardware=sim_a100_80g")
"""Where recorded conversations are replayed unless something is chosen: recorded pauses take no real time there."""


def as_meant(arguments: Sequence[str], config_name: str = "config") -> tuple[list[str], list[str]]:
    """The command line with what it implies, and a line for people on each change: an experiment's folder, where it was
    left out or is a prefix (paper_eviction), and the workload of workload.path."""
    words, notes = list[str](), list[str]()
    for text in arguments:
        name, known = text.removeprefix("experiment="), options("experiment")
        if name != text and name not in known:
            same = (
                one for one in known if name in (one.rpartition("/")[2], one.replace("/", "_"), one.replace("s/", "_"))
            )
            name = next(same, name)
            notes += [f"{text} is now experiment={name}."] if f"experiment={name}" != text else []
            text = f"experiment={name}"
        words.append(text)

    def typed(*beginnings: str) -> list[int]:
        return [place for place, text in enumerate(words) if text.lstrip("+").startswith(beginnings)]

    if (path := typed("workload.path=")) and not typed("workload=", "experiment=", "replay="):
        chosen = config_name != "config" or typed("model", "cache", "hardware")
        added = ["workload=trace", *(() if chosen else _SIMULATED)]
        notes.append(f"workload.path names recorded conversations; replayed with {' '.join(added)}.")
        words[path[0] : path[0]] = added  # beside it: argparse wants all overrides in one piece
    return words, notes


def page(config_name: str, overrides: Sequence[str]) -> str:
    """What --help prints: the head of conf/`config_name`.yaml, its groups and their options, its fields and their values.
    Hydra's own --help lists all groups again for each group, which takes longer than the rest of the command."""
    from hydra import compose, initialize_config_dir  # neither is where vLLM runs a policy of ours
    from omegaconf import OmegaConf, open_dict

    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        cfg = compose(config_name, list(overrides), return_hydra_config=True)
    groups = [group for group in cfg.hydra.runtime.choices if (conf_folder() / group).is_dir() and "/" not in group]
    with open_dict(cfg):
        del cfg["hydra"]
    return "\n".join(
        [
            *_head(config_name),
            "",
            "Choose an option of a group with group=option:",
            *choices(*(group for group in groups if group not in ("at", "experiment"))),
            *(experiments() if "experiment" in groups else ()),
            "",
            'Set a field with group.field=value (sizes: "4GiB", "2GB", "8192 tokens"; quote a value that holds = or ,).',
            f"Fields and their values (conf/{config_name}.yaml and its groups say what each means):",
            "",
            OmegaConf.to_yaml(cfg),
            "PENSIEVE_OUTPUTS moves what is kept in outputs/. HYDRA_FULL_ERROR=1 shows the whole trace of an error.",
        ]
    )


def choices(*groups: str) -> list[str]:
    """A line for each of these groups, with its options."""
    return [
        fill(f"{group}: {', '.join(options(group))}", 120, initial_indent="  ", subsequent_indent="    ")
        for group in groups
    ]


def experiments() -> list[str]:
    """A line for each experiment, by folder: its name and what it shows."""
    names = options("experiment")
    width, lines = max(map(len, names)) + 2, []
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        lines += ["", f"Experiments: {folder or 'start here'}"]
        lines += [f"  {name:<{width}}{clause(name)}" for name in names if name.rpartition("/")[0] == folder]
    return lines


def clause(experiment: str) -> str:
    """What an experiment shows: the first sentence of its comment, which follows the command."""
    _package, _command, *comment = _head(f"experiment/{experiment}")
    return re.split(r"[.;?](?:\s|$)", " ".join(comment), maxsplit=1)[0]


def _head(name: str) -> list[str]:
    """The comment that a file begins with."""
    lines = (conf_folder() / f"{name}.yaml").read_text().splitlines()
    return [line.removeprefix("#").removeprefix(" ") for line in takewhile(lambda line: line.startswith("#"), lines)]
