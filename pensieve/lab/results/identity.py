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
| code     | of the package and the user's own modules: what the     | the rest of the package; comments, docstrings,        |
|          | module that runs the trial, and each that `_target_` or | layout; NOT_CODE (what records and shows a     |
|          | scheduler.composition names, can import        | trial); the version of Python; installed packages:    |
|          |                                                         | the platform names those that matter                  |
| platform | real: device and count, dtype, attention backend and    | simulated: anything; the platform is "sim"            |
|          | its compiler, graphs, copy_ahead, depth,                |                                                       |
|          | threads, OMP_WAIT_POLICY (on a CPU), versions of torch, |                                                       |
|          | transformers, triton and any outside engine; what a     |                                                       |
|          | server that somebody else started says of itself        |                                                       |

What `auto` means is in the platform as it resolves before anything is loaded (trial.identity): with the C compiler gone,
attention_backend=auto is another backend and the trial another trial. One thing only a start can tell: whether the kernel
passes its self-check, else the next backend serves. What came out is in the trial's `engine` (attention_backend,
attention_note, graphs, copies, copy_ahead). It needs no comparison
when a trial is reused: all that decides it, save the noise of a measurement, is in the platform and the code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

import pensieve
from pensieve.hub import user_cache

if TYPE_CHECKING:  # the schema needs SQLAlchemy, and a mistake in a configuration is told before that is imported
    from pensieve.lab.results.schema import Trial

RUNS_TRIALS = "pensieve.lab.trial.run"

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

    unstated: why the platform does not say all that ran, in a sentence; such a trial is not reused. code: the files behind
    code_hash, with a short hash of each.
    """

    config_hash: str
    code_hash: str
    platform: str
    unstated: str | None = None
    code: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        return text_hash(json.dumps([self.config_hash, self.code_hash, self.platform]))


def identify(
    config: Mapping[str, Any],
    simulated: bool,
    device: Mapping[str, Any],
    marks: Mapping[str, Any] | None = None,
    entry: str = RUNS_TRIALS,
) -> Identity:
    """Compute the identity. config: resolved. device: see platform_of. marks: further fields that are hashed with it. entry:
    the module that runs the trial."""
    code = code_of(config, entry)
    files = {name: digest[:12] for name, digest in code.items()}
    counted = config_hash({**config, **(marks or {})})
    return Identity(counted, hash_of(code), platform_of(simulated, device), device.get(UNSTATED), files)


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
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _by_value(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_by_value(inner) for inner in value]
    return value


def counts_for_sweep(override: str) -> bool:
    """Whether an override (`key=value`, or its key) makes another sweep."""
    key = override.partition("=")[0].lstrip("+~")
    return key.split("/")[0].split(".")[0] not in NOT_SWEEP


def explain_difference(old: Trial, new: Identity) -> str:
    """One line on why a completed trial of the same configuration is not reused for the new one."""
    if new.unstated is not None:
        return f"Runs again: {new.unstated} (resume=config accepts trial {old.id})."
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


def _platform_change(old: str, new: str) -> str:
    before, after = (dict(part.partition("=")[::2] for part in text.split("; ")) for text in (old, new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    changes = [
        f"{key} {before.get(key) or '(not there)'} -> {after.get(key) or '(not there)'}" for key in keys if key != "sim"
    ]
    return f"the platform ({', '.join(changes)})" if changes else "the platform"


# Digests of files, and of the code that a trial ran
#
# The code of a trial is what it can reach by import statements: from the module that runs it (RUNS_TRIALS, or a server's or a
# benchmark's) and from each class and function that its configuration names, in the package and in the user's own modules.
# Files that are no Python count with the modules of their folder and of those above it. Python is hashed as a syntax tree
# without docstrings, all else byte by byte. Modules are found without importing them.

NOT_CODE = (
    "lazy.py",
    "lab/results/",
    "lab/compose/conf.py",
    "lab/compose/explain.py",
    "lab/trial/job.py",
    "lab/trial/terminal.py",
)
"""Files and folders of the package that a trial imports and that cannot change a measurement: they record it, show it, or
guard its process. What they import counts only where something else imports it too."""

NOT_SIMULATED = ("plugins/replicas/", "plugins/device/", "device/", "compiler.py")
"""What a trial on simulated hardware imports and does not use."""

NAMES_CODE = ("_target_", "composition")
"""Last parts of field names whose text is the dotted path of a class or function."""

CACHED_BYTES = 64 * 2**20
"""From this size on a file's digest is cached."""

Version = tuple[int, int, int, int, int]


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, or of all files of a folder with their names."""
    if path.is_dir():
        return text_hash("\n".join(f"{p.relative_to(path).as_posix()} {content_hash(p)}" for p in sorted(_files(path))))
    return _file_hash(path.resolve(), version_of(path))


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


def version_of(path: Path) -> Version:
    """Changes whenever the file is written to."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def cached(name: str, version: str, compute: Callable[[], str]) -> str:
    """The digest stored for this name and version, else compute(), which is then stored in place of older versions. A cache
    that cannot be read or written only costs time."""
    file = Path()
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):  # not there yet, or somebody's edit
        file = user_cache() / "digests" / f"{text_hash(name)}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] == version:
            return str(found["digest"])
    digest = compute()
    with suppress(OSError, RuntimeError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as whole:  # others read it meanwhile
            json.dump({"name": name, "version": version, "digest": digest}, whole)
        os.replace(whole.name, file)
    return digest


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, version: Version) -> str:
    size = version[2]
    return _digest(path) if size < CACHED_BYTES else cached(str(path), repr(version), functools.partial(_digest, path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Source(NamedTuple):
    """imports: the dotted names that a file imports, absolute. offered: those that it imports for type checkers alone, by
    the names under which a package resolves them on first use (pensieve.lazy)."""

    digest: str
    imports: list[str]
    offered: dict[str, str]


def code_hash(config: Mapping[str, Any] | None = None, entry: str = RUNS_TRIALS) -> str:
    """SHA-256 of the code that a trial of this configuration can use; what is installed beside the package does not count.
    entry: the module that runs it."""
    return hash_of(code_of(config or {}, entry))


def hash_of(code: Mapping[str, str]) -> str:
    """code: as of code_of."""
    return text_hash("".join(f"{name} {digest}\n" for name, digest in sorted(code.items())))


def code_of(config: Mapping[str, Any], entry: str = RUNS_TRIALS) -> dict[str, str]:
    """The files of that code with their hashes: the package's by their paths in it, the user's by their modules."""
    simulated = bool((config.get("hardware") or {}).get("simulated"))
    out = (*NOT_CODE, *NOT_SIMULATED) if simulated else NOT_CODE
    package = _package()
    found: dict[str, str] = {}
    asked: set[str] = set()
    waiting = [entry, *_dotted(_used(config, simulated))]
    while waiting:
        name = waiting.pop()
        if name in asked:
            continue
        asked.add(name)
        own = name.split(".")[0] == "pensieve"
        for file, source in _package_files(name, package) if own else _own_files(name):
            if file not in found and not file.startswith(out):
                found[file] = source.digest
                waiting += source.imports
        if own and (offered := _offered(name, package)) is not None:
            waiting.append(offered)
    folders = {PurePosixPath(name).parent for name in found} - {PurePosixPath()}
    for name, source in package.items():
        if not name.endswith(".py") and not name.startswith(out) and folders.intersection(PurePosixPath(name).parents):
            found[name] = source.digest
    return found


def outside_names(config: Any) -> set[str]:
    """The dotted paths outside the package that a configuration names."""
    return {name for name in _dotted(config) if name.split(".")[0] != "pensieve"}


def _used(config: Mapping[str, Any], simulated: bool) -> Mapping[str, Any]:
    """Without the one of a baseline's two engines, the real and the simulated, that does not run."""
    baseline = config.get("baseline")
    if not isinstance(baseline, Mapping):
        return config
    idle = "engine" if simulated else "simulated"
    return {**config, "baseline": {name: value for name, value in baseline.items() if name != idle}}


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
def _package() -> dict[str, Source]:
    """The package's files by their paths in it, read once a process: later changes of the files are not loaded either."""
    root = Path(pensieve.__file__).parent
    files = {
        path.relative_to(root).as_posix(): path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(one[0] == "." or one == "__pycache__" for one in path.relative_to(root).parts)
    }

    def compute() -> str:
        modules = {name: ".".join(("pensieve", *PurePosixPath(name).with_suffix("").parts)) for name in files}
        return json.dumps({name: _source(path, modules[name]) for name, path in files.items()})

    # Parsing takes seconds, which every start of the program would pay.
    state = text_hash(json.dumps([sys.version, [(name, version_of(path)) for name, path in files.items()]]))
    return {name: Source(*told) for name, told in json.loads(cached(f"{root} sources", state, compute)).items()}


def _package_files(name: str, package: Mapping[str, Source]) -> Iterator[tuple[str, Source]]:
    """The module on a dotted path and the packages around it; a path that ends in * names all modules of one."""
    place, parts = "", name.split(".")[1:]
    yield "__init__.py", package["__init__.py"]
    for part in parts:
        if part == "*":
            yield from ((file, one) for file, one in package.items() if file.rpartition("/")[0] == place.rstrip("/"))
        found = next((file for file in (f"{place}{part}.py", f"{place}{part}/__init__.py") if file in package), None)
        if found is None:
            return
        yield found, package[found]
        place += f"{part}/"


def _offered(name: str, package: Mapping[str, Source]) -> str | None:
    """Where a name of a package is that it resolves on first use."""
    above, _, last = name.rpartition(".")
    facade = package.get("/".join((*above.split(".")[1:], "__init__.py")))
    return None if facade is None else facade.offered.get(last)


def _own_files(name: str) -> Iterator[tuple[str, Source]]:
    """The user's module on a dotted path and the packages around it, found without importing them; none of what is
    installed."""
    module, folders = "", None
    for part in name.split("."):
        # A package's parts are looked up by their own name in its folder, as the path finder wants it.
        module = f"{module}.{part}" if module else part
        spec = importlib.machinery.PathFinder.find_spec(module, folders)
        if spec is None:
            return
        if spec.origin and (path := Path(spec.origin)).is_file():
            if str(path).startswith(_installed_folders()):
                return
            inside = f"{module}.__init__" if spec.submodule_search_locations is not None else module
            yield f"own {module}", _source(path, inside)
        folders = spec.submodule_search_locations
        if folders is None:
            return


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Of Python and of installed packages, which other parts of the identity cover."""
    paths = sysconfig.get_paths()
    return tuple(f"{paths[at]}{os.sep}" for at in ("stdlib", "platstdlib", "purelib", "platlib"))


def _source(path: Path, module: str) -> Source:
    """module: its dotted path, of a package with `__init__` at its end. What is no Python counts byte by byte."""
    try:
        tree = ast.parse(path.read_bytes()) if path.suffix == ".py" else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        return Source(content_hash(path), [], {})
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for_checkers = [one for one in conditions if isinstance(one.test, ast.Name) and one.test.id == "TYPE_CHECKING"]
    offered = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for block in for_checkers
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    digest = text_hash(_code_alone(tree))
    for block in for_checkers:
        block.body = []
    return Source(digest, sorted(set(_imports(tree, module, path.parent))), offered)


def _code_alone(tree: ast.Module) -> str:
    """Without comments, layout and constants that stand alone, such as docstrings."""
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            told = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = told or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _imports(tree: ast.Module, module: str, folder: Path) -> Iterator[str]:
    """Also modules that import_module is given, packages whose files are read (importlib.resources), and scripts of the same
    folder that are named: they run by their path."""
    around = module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = around[: len(around) - node.level + 1] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            if "/" not in node.value and (folder / node.value).is_file():
                yield ".".join([*around, node.value.removesuffix(".py")])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "files"):
            parts = node.args[:1]
            if parts and isinstance(parts[0], ast.JoinedStr):
                parts = parts[0].values
            if parts and isinstance(parts[0], ast.Constant) and isinstance(parts[0].value, str):
                yield parts[0].value + ("*" if len(parts) > 1 else "")
