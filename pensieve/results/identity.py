"""When are two trials the same trial? Digests of configuration, code and platform, and the sentence on what differs."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pensieve
from pensieve.results.schema import Trial

NOT_CONFIG = ("tracking", "hydra", "force", "resume", "trial", "experiment", "experiment_name", "sweep")
"""Top-level fields that say how a trial is run, named and kept, not what it measures."""

NOT_SWEEP = ("force", "resume", "hydra", "trial", "tracking")
"""Overrides that do not make another sweep: the same jobs run, only elsewhere, again or otherwise guarded."""

INPUT_FIELDS = ("path", "weights", "profile", "file")
"""Last parts of field names whose text, where it names something on this disk, stands for its content."""

NOT_PATHS = ("", "hub", "random")  # a folder that happens to be called random is not what model.weights=random means

NOT_CODE = ("results", "server", "conf")
"""Folders of the package that cannot change a measurement; conf/ counts through the resolved configuration."""

WHOLE_BYTES = 64 * 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 2**18


@dataclass(frozen=True, slots=True)
class Identity:
    """What a completed trial must share with a new one to be taken for it."""

    config_hash: str
    code_hash: str
    platform: str

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.config_hash, self.code_hash, self.platform)


def identify(config: Mapping[str, Any], simulated: bool, device: Mapping[str, Any]) -> Identity:
    """config: resolved. device: see platform_of."""
    return Identity(config_hash(config), code_hash(config), platform_of(simulated, device))


def fingerprint(config_hash: str, code_hash: str, platform: str) -> str:
    return _sha256(json.dumps([config_hash, code_hash, platform]))


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a resolved configuration without NOT_CONFIG, input paths replaced by a hash of their content."""
    kept = {key: value for key, value in config.items() if key not in NOT_CONFIG}
    return _sha256(json.dumps(_with_contents(kept), sort_keys=True, default=str))


def input_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Of every field that names a file or folder on this disk (see INPUT_FIELDS): its dotted name and content's hash."""
    return dict(_inputs({key: value for key, value in config.items() if key not in NOT_CONFIG}))


def _inputs(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _inputs(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        told = _with_contents(value, name.rpartition(".")[2].partition("[")[0])
        if told != value:
            yield name, told
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for index, inner in enumerate(value):
            yield from _inputs(inner, f"{name}[{index}]")


def code_hash(config: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of the package's files but NOT_CODE, and of the module of every `_target_` outside the package.

    Data files of the package count: conversations that ship with it are input. Nothing is imported to find a module.
    """
    digest = hashlib.sha256(_package_hash().encode())
    for module in sorted(_foreign_modules(config or {})):
        digest.update(f"{module.name} {content_hash(module)}\n".encode())
    return digest.hexdigest()


def platform_of(simulated: bool, device: Mapping[str, Any]) -> str:
    """ "sim", or the device and the versions that a real measurement depends on, in a line of `key=value; ...`.

    device: name, count, threads, and, for an outside engine, `packages`: the distributions that it consists of.
    """
    if simulated:
        return "sim"
    facts = {"device": device.get("name"), "count": device.get("count", 1), "threads": device.get("threads")}
    for package in ("torch", "transformers", "triton", *sorted(device.get("packages", ()))):
        facts[package] = _version(package)
    return "; ".join(f"{key}={value}" for key, value in facts.items() if value is not None)


def sweep_key(overrides: Iterable[str], axes: Mapping[str, object]) -> str:
    """overrides: `key=value` as typed, in any order. axes: what each swept field runs through, outermost first."""
    typed = [text.lstrip("+") for text in overrides]
    kept = sorted(text for text in typed if _first_part(text) not in NOT_SWEEP)
    return _sha256(json.dumps([kept, [(key, str(value)) for key, value in axes.items()]]))


def explain_difference(old: Trial, new: Identity) -> str:
    """One line on why a completed trial of the same configuration does not count for the new one."""
    changes = []
    if old.config_hash != new.config_hash:
        changes.append("the configuration")
    if old.code_hash != new.code_hash:
        changes.append("the code")
    if old.platform != new.platform:
        changes.append(_platform_change(old.platform, new.platform))
    if not changes:
        return f"Trial {old.id} is the same trial: nothing changed."
    return f"Runs again, because {' and '.join(changes)} changed since trial {old.id} (resume=config accepts that one)."


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, or of all files of a folder with their names.

    Of a file above 64 MiB: of its size and 64 samples of 256 KiB spread evenly from first byte to last, since reading
    the weights of a large model whole would take longer than a trial.
    """
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and ".git" not in p.relative_to(path).parts)
        return _sha256("\n".join(f"{p.relative_to(path).as_posix()} {content_hash(p)}" for p in files))
    stat = path.stat()
    return _file_hash(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, size: int, _mtime_ns: int) -> str:
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def _with_contents(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_contents(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, str):
        is_input = (name in INPUT_FIELDS or name.endswith("_path")) and value not in NOT_PATHS
        path = Path(value).expanduser() if is_input else None
        return f"sha256:{content_hash(path)}" if path is not None and path.exists() else value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_with_contents(inner, name) for inner in value]
    return value


@functools.lru_cache(maxsize=1)
def _package_hash() -> str:
    """Of the files as they were when first asked for: a running process does not load later changes either."""
    root = Path(pensieve.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden and parts[0] not in NOT_CODE:
            digest.update(f"{'/'.join(parts)} {content_hash(path)}\n".encode())
    return digest.hexdigest()


def _foreign_modules(config: Any) -> set[Path]:
    targets = (target for target in _targets(config) if target.split(".")[0] != "pensieve")
    return {path for path in map(_module_file, targets) if path is not None}


def _targets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        target = value.get("_target_")
        if isinstance(target, str):
            yield target
        for inner in value.values():
            yield from _targets(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in value:
            yield from _targets(inner)


def _module_file(target: str) -> Path | None:
    """The source file of the deepest module on the dotted path, found without importing it; None: a built-in."""
    folders: Sequence[str] | None = None
    name, found = "", None
    for part in target.split("."):
        name = f"{name}.{part}" if name else part
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        if spec is None:
            break
        if spec.origin and Path(spec.origin).is_file():
            found = Path(spec.origin)
        folders = spec.submodule_search_locations
        if folders is None:
            break
    return found


def _first_part(override: str) -> str:
    key = override.split("=", 1)[0].lstrip("~")
    return key.split("/")[0].split(".")[0]


def _platform_change(old: str, new: str) -> str:
    before, after = (dict(part.partition("=")[::2] for part in text.split("; ")) for text in (old, new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    changes = [
        f"{key} {before.get(key) or '(not there)'} -> {after.get(key) or '(not there)'}" for key in keys if key != "sim"
    ]
    return f"the platform ({', '.join(changes)})" if changes else "the platform"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
