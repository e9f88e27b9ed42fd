"""The identity of a trial: digests of its configuration, its code and its platform, and a sentence on what differs.

A trial that completed is reused while all of this is equal, and runs again when any of it changed:

| part     | counts                                                  | does not count                                        |
|----------|---------------------------------------------------------|-------------------------------------------------------|
| config   | every field of the resolved configuration but those on  | NOT_CONFIG: how a trial is run, named and kept, and   |
|          | the right; seed and repeat too                          | slo.*, by which a view judges the turns;            |
|          |                                                         | TEXT_FIELDS: hardware.source                          |
| config   | on a real device trial.exclusive=false                  | every other trial.*: isolate, retries, timeout_s;     |
|          |                                                         | trial.exclusive in a simulation                       |
| config   | real: the commit of weights from the hub, where it is   | simulated: the weights, which are not loaded          |
|          | known; the content of a GGUF file                       |                                                       |
| config   | a field that names a file or folder here (INPUT_FIELDS, | where that file or folder lies                        |
|          | *_path: traces, weights, tokenizers, profiles): all its |                                                       |
|          | bytes                                                   |                                                       |
| config   | numbers by their value: 3 and 3.0 are one               | how a number is written                               |
| code     | every file of the package but those on the right, and  | NOT_CODE: what records, shows or judges a trial;      |
|          | of each module outside that a `_target_` or             | simulated: NOT_SIMULATED; the version of Python;      |
|          | scheduler.composition names: its package, or the        | installed packages: the platform names those that     |
|          | Python files beside it                                  | matter                                                |
| platform | real: device and count, dtype, attention backend and    | simulated: anything; the platform is "sim"            |
|          | its compiler, graphs, copy_ahead, depth,                |                                                       |
|          | threads, OMP_WAIT_POLICY (on a CPU), versions of torch, |                                                       |
|          | transformers, triton and any outside engine; what a     |                                                       |
|          | server that somebody else started says of itself        |                                                       |

What `auto` means is in the platform as it resolves before anything is loaded (trial.identity). What a start alone can tell,
whether the kernel passes its self-check, is in the trial's `engine`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pensieve
from pensieve.hub import user_cache

if TYPE_CHECKING:  # the schema needs SQLAlchemy, and a mistake in a configuration is told before that is imported
    from pensieve.lab.results.schema import Trial

NOT_CONFIG = ("tracking", "hydra", "force", "resume", "trial", "experiment", "experiment_name", "sweep", "slo")
"""Top-level fields that say how a trial is run, named, kept and judged, not what it measures."""

TEXT_FIELDS = ("hardware.source",)
"""Fields that inform the reader and change no measurement."""

NOT_SWEEP = ("force", "resume", "hydra", "trial", "tracking")
"""Overrides that leave the sweep the same: they say how its jobs are run and recorded, not which. force=true begins another
one of the same jobs, so that an older one goes on showing its trials."""

INPUT_FIELDS = ("path", "weights", "profile", "file", "gguf_file", "tokenizer")
"""Last parts of the names of fields that hold paths: where the path exists, its content is hashed instead."""

UNSTATED = "unstated"
"""Of a device's facts: a sentence on what of an engine could not be told. See Identity."""

_NUMBER = re.compile(r"(?<![\w.+-])[-+]?\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.])")
"""With a point or an exponent; whole numbers are written in one way as they are."""

NOT_PATHS = ("", "hub", "random", "gguf", "bytes")
"""A folder that happens to be called random is not what weights=random means."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A completed trial is reused for a new one of the same identity.

    unstated: why the platform does not say all that ran, in a sentence; such a trial is not reused.
    """

    config_hash: str
    code_hash: str
    platform: str
    unstated: str | None = None

    @property
    def fingerprint(self) -> str:
        return text_hash(json.dumps([self.config_hash, self.code_hash, self.platform]))


def identify(
    config: Mapping[str, Any], simulated: bool, device: Mapping[str, Any], marks: Mapping[str, Any] | None = None
) -> Identity:
    """Compute the identity. config: resolved. device: see platform_of. marks: further fields that are hashed with it."""
    counted = config_hash({**config, **(marks or {})})
    return Identity(counted, code_hash(config), platform_of(simulated, device), device.get(UNSTATED))


def config_hash(config: Mapping[str, Any]) -> str:
    """As plain_hash, without NOT_CONFIG, and with numbers by their value."""
    return plain_hash(_by_value(_counted(config)))


def plain_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, input paths replaced by a hash of their content."""
    return text_hash(json.dumps(_with_contents(config), sort_keys=True, default=str))


def input_files(config: Mapping[str, Any]) -> dict[str, str]:
    """The hash of the content of every field that names a file or folder on this disk (INPUT_FIELDS), by dotted name."""
    found: dict[str, str] = {}
    _with_contents(_counted(config), found=found)
    return found


def _counted(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in NOT_CONFIG}
    for group, _, name in (dotted.partition(".") for dotted in TEXT_FIELDS):
        if isinstance(kept.get(group), Mapping):
            kept[group] = {key: value for key, value in kept[group].items() if key != name}
    return kept


def platform_of(simulated: bool, device: Mapping[str, Any]) -> str:
    """ "sim", or the device and what a real measurement depends on, in a line of `key=value; ...`.

    device: name, count, whatever else is known of how it will be used (see trial.identity), and, for an outside engine,
    `packages`: the distributions that it consists of.
    """
    if simulated:
        return "sim"
    used = {key: value for key, value in device.items() if key not in ("name", "count", "packages", UNSTATED)}
    facts: dict[str, Any] = {"device": device.get("name"), "count": device.get("count", 1), **used}
    for package in ("torch", "transformers", "triton", *sorted(device.get("packages", ()))):
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return "; ".join(f"{key}={value}" for key, value in facts.items() if value is not None)


def sweep_key(overrides: Iterable[str], axes: Mapping[str, object], jobs: Iterable[Mapping[str, Any]] = ()) -> str:
    """The hash by which a sweep is found again. overrides: `key=value` as typed, in any order. axes: the values of each
    swept field, outermost first.

    jobs: the resolved configuration of each, in order. What was typed does not say all: an overlay that was edited, or a
    trace that was replaced, makes other jobs and so another sweep under the same command.
    """
    typed = [text.lstrip("+") for text in overrides]
    kept = sorted(numbers_by_value(text) for text in typed if counts_for_sweep(text))
    named = [(key, numbers_by_value(str(value))) for key, value in axes.items()]
    return text_hash(json.dumps([kept, named, [config_hash(job) for job in jobs]]))


def numbers_by_value(text: str) -> str:
    """A text in which each number that stands alone is written in one way."""
    return _NUMBER.sub(lambda found: json.dumps(_by_value(float(found[0]))), text)


def _by_value(value: Any) -> Any:
    """Plain values again, whole numbers as such."""

    def number(text: str) -> float:
        return int(found) if (found := float(text)).is_integer() else found

    return json.loads(json.dumps(value, default=str), parse_float=number)


def counts_for_sweep(override: str) -> bool:
    """Whether an override (`key=value`, or its key) makes another sweep."""
    key = override.partition("=")[0].lstrip("+~")
    return key.split("/")[0].split(".")[0] not in NOT_SWEEP


def explain_difference(old: Trial, new: Identity) -> str:
    """One line on why a completed trial of the same configuration is not reused for the new one."""
    if new.unstated is not None:
        return f"Runs again: {new.unstated} (resume=config accepts trial {old.id})."
    platform = f"the platform ({platform_change(old.platform, new.platform)})"
    parts = {"code_hash": "the code", "platform": platform}
    changes = " and ".join(said for name, said in parts.items() if getattr(old, name) != getattr(new, name))
    return f"Runs again, because {changes} changed since trial {old.id} (resume=config accepts that one)."


def platform_change(old: str, new: str) -> str:
    before, after = (dict(part.partition("=")[::2] for part in text.split("; ")) for text in (old, new))
    gone = "(not there)"
    return ", ".join(
        f"{key} {before.get(key, gone)} -> {after.get(key, gone)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    )


def _with_contents(value: Any, name: str = "", found: dict[str, str] | None = None) -> Any:
    """The value with the hash of its content for each path of an input. name: dotted. found: is told these hashes."""
    if isinstance(value, Mapping):
        return {
            str(key): _with_contents(one, f"{name}.{key}" if name else str(key), found) for key, one in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_with_contents(one, f"{name}[{index}]", found) for index, one in enumerate(value)]
    last = name.rpartition(".")[2].partition("[")[0]
    if not isinstance(value, str) or value in NOT_PATHS or not (last in INPUT_FIELDS or last.endswith("_path")):
        return value
    path = Path(value).expanduser()
    if not path.exists():
        return value
    digest = f"sha256:{content_hash(path)}"
    if found is not None:
        found[name] = digest
    return digest


# Digests of files, and of the code that a trial ran

NOT_CODE = (
    "cli.py",
    "lab/bench/",
    "lab/commands/",
    "lab/results/",
    "lab/compose/conf.py",
    "lab/compose/explain.py",
    "lab/trial/job.py",
    "lab/trial/terminal.py",
    "serve/server/",
)
"""Files and folders of the package that cannot change a measurement: they record it, show it, or guard its process."""

NOT_SIMULATED = ("plugins/replicas/", "device/", "compiler.py")
"""What a trial on simulated hardware does not use."""

NAMES_CODE = ("_target_", "composition")
"""Last parts of field names whose text is the dotted path of a class or function."""

CACHED_BYTES = 64 * 2**20
"""From this size on a file's digest is kept."""


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, or of all files of a folder with their names."""
    if path.is_dir():
        return text_hash("\n".join(f"{p.relative_to(path).as_posix()} {content_hash(p)}" for p in sorted(_files(path))))
    stat = path.stat()
    return _file_hash(path.resolve(), stat.st_size, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)


def _files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Also those behind links to folders, but for a link to a folder around it."""
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_dir() and path.name != ".git":
            yield from _files(path, (*above, real))
        elif path.is_file():
            yield path


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, *version: int) -> str:
    """version: changes whenever the file is written to. The digest of a large file is kept; where it cannot be, that costs
    only time."""
    kept = None
    if version[0] >= CACHED_BYTES:
        with suppress(OSError, RuntimeError):
            kept = user_cache() / "digests" / text_hash(f"{path} {version}")
            return kept.read_text(encoding="utf-8")
    digest = _digest(path)
    if kept is not None:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            whole = kept.with_suffix(f".{os.getpid()}")  # others read it meanwhile
            whole.write_text(digest, encoding="utf-8")
            whole.replace(kept)
    return digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_hash(config: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of the code that a trial of this configuration can use. Modules are found without importing them."""
    simulated = bool(((config or {}).get("hardware") or {}).get("simulated"))
    out = (*NOT_CODE, *NOT_SIMULATED) if simulated else NOT_CODE
    found = {name: digest for name, digest in _package().items() if not name.startswith(out)}
    for module in sorted({name.partition(".")[0] for name in outside_names(config)}):
        found |= _own_files(module)
    return text_hash("".join(f"{name} {digest}\n" for name, digest in sorted(found.items())))


def outside_names(config: Any) -> set[str]:
    """The dotted paths outside the package that a configuration names."""
    return {name for name in _dotted(config) if name.partition(".")[0] != "pensieve"}


def _dotted(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in NAMES_CODE and isinstance(inner, str):
                yield inner
            else:
                yield from _dotted(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in value:
            yield from _dotted(inner)


@functools.lru_cache(maxsize=1)
def _package() -> dict[str, str]:
    """The package's files with their hashes, read once a process: later changes of the files are not loaded either."""
    root = Path(pensieve.__file__).parent
    files = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    return {
        name.as_posix(): _digest(path)
        for name, path in files.items()
        if not any(part[0] == "." or part == "__pycache__" for part in name.parts)
    }


def _own_files(module: str) -> dict[str, str]:
    """The files of the user's package, or the Python files beside the user's module; none of what is installed."""
    spec = importlib.machinery.PathFinder.find_spec(module)
    if spec is None or spec.origin is None or spec.origin.startswith(_installed_folders()):
        return {}
    folder = Path(spec.origin).parent
    files = folder.rglob("*.py") if spec.submodule_search_locations else folder.glob("*.py")
    return {f"own {module} {path.relative_to(folder).as_posix()}": content_hash(path) for path in files}


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Of Python and of installed packages, which other parts of the identity cover."""
    paths = sysconfig.get_paths()
    return tuple(f"{paths[at]}{os.sep}" for at in ("stdlib", "platstdlib", "purelib", "platlib"))
