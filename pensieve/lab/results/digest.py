"""Digests of what a trial's identity counts: of files and folders by all their content, and of the code that it ran.

Reading tens of gigabytes of weights takes longer than many trials, so the digest of a large file is cached in the user's
cache folder until the file's device, inode, size, mtime or ctime changes; a program can set the mtime back, but not the
ctime.

The code of a trial is what it can reach by import statements: from the module that runs it (RUNS_TRIALS, or a server's or
a benchmark's) and from each class and function that its configuration names, in the package and in the user's own modules.
Files that are no Python count with the modules of their folder and of those above it. Python is hashed as a syntax tree
without docstrings, all else byte by byte. Modules are found without importing them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import pensieve
from pensieve.user_cache import user_cache

RUNS_TRIALS = "pensieve.lab.trial.run"

NOT_CODE = (
    "lazy.py",
    "lab/results/",
    "lab/progress.py",
    "lab/compose/explain.py",
    "lab/compose/help.py",
    "lab/compose/meant.py",
    "lab/compose/preflight.py",
    "lab/trial/isolate.py",
    "lab/trial/job.py",
    "lab/trial/liveness.py",
    "lab/trial/terminal.py",
    "lab/trial/tracking.py",
)
"""Files and folders of the package that a trial imports and that cannot change a measurement: they record it, show it, or
guard its process. What they import counts only where something else imports it too."""

NOT_SIMULATED = ("plugins/replicas/", "plugins/device/", "device/")
"""What a trial on simulated hardware imports and does not use."""

NAMES_CODE = ("_target_", "composition")
"""Last parts of field names whose text is the dotted path of a class or function."""

CACHED_BYTES = 64 * 2**20
"""From this size on a file's digest is cached."""

Version = tuple[int, int, int, int, int]


# Files and folders


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
    """The digest stored for this name and version, else compute(), which is then stored in place of older versions."""
    try:
        file = user_cache() / "digests" / f"{text_hash(name)}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] == version:
            return str(found["digest"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        pass  # not there yet, not readable, or somebody's edit: computed anew
    digest = compute()
    _store(name, version, digest)
    return digest


def _store(name: str, version: str, digest: str) -> None:
    """Replace the file at once, since other processes read it; a cache that cannot be written only costs time."""
    try:
        folder = user_cache() / "digests"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump({"name": name, "version": version, "digest": digest}, file)
        os.replace(file.name, folder / f"{text_hash(name)}.json")
    except (OSError, RuntimeError):
        pass


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, version: Version) -> str:
    size = version[2]
    return _digest(path) if size < CACHED_BYTES else cached(str(path), repr(version), functools.partial(_digest, path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Code


class Source(NamedTuple):
    """imports: the dotted names that a file imports, absolute. offered: those that it imports for type checkers alone, by
    the names under which a package resolves them on first use (pensieve.lazy)."""

    digest: str
    imports: list[str]
    offered: dict[str, str]


def code_hash(config: Mapping[str, Any] | None = None, entry: str = RUNS_TRIALS) -> str:
    """SHA-256 of the code that a trial of this configuration can use. entry: the module that runs it.

    What is installed beside the package does not count.
    """
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


# Where modules are


@functools.lru_cache(maxsize=1)
def _package() -> dict[str, Source]:
    """The package's files by their paths in it, read once a process: later changes of the files are not loaded either."""
    root = Path(pensieve.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    files = {name: path for name, path in files.items() if not _hidden(name)}

    def compute() -> str:
        return json.dumps({name: _source(path, _module_name(name)) for name, path in files.items()})

    # Parsing takes seconds, which every start of the program would pay.
    version = text_hash(json.dumps([sys.version, [(name, version_of(path)) for name, path in files.items()]]))
    return {name: Source(*told) for name, told in json.loads(cached(f"{root} sources", version, compute)).items()}


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def _module_name(file: str) -> str:
    return ".".join(("pensieve", *PurePosixPath(file).with_suffix("").parts))


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
            if _installed(path):
                return
            inside = f"{module}.__init__" if spec.submodule_search_locations is not None else module
            yield f"own {module}", _source(path, inside)
        folders = spec.submodule_search_locations
        if folders is None:
            return


def _installed(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package, which other parts of the identity cover."""
    return str(path).startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(f"{paths[at]}{os.sep}" for at in ("stdlib", "platstdlib", "purelib", "platlib"))


# What of a file counts


def _source(path: Path, module: str) -> Source:
    """module: its dotted path, of a package with `__init__` at its end."""
    tree = _tree(path) if path.suffix == ".py" else None
    if tree is None:
        return Source(content_hash(path), [], {})
    unread = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _for_type_checkers(node.test)]
    offered = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for block in unread
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    digest = text_hash(repr(_plain(tree)))
    for block in unread:
        block.body = []
    return Source(digest, sorted(set(_imports(tree, module, path.parent))), offered)


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _plain(node: Any) -> Any:
    """A syntax tree as nested tuples without constants that stand alone, such as docstrings, and without empty fields:
    ast.dump writes those that a newer Python adds."""
    if isinstance(node, ast.JoinedStr):  # Python 3.12 puts an empty text behind some of its fields
        node.values = [one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")]
    if isinstance(node, ast.AST):
        fields = ((name, _plain(value)) for name, value in ast.iter_fields(node) if name != "kind")  # u of u"text"
        return type(node).__name__, *(field for field in fields if field[1] is not None and field[1] != ())
    if isinstance(node, list):
        idle = (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in node)
        return tuple(_plain(one) for one, skipped in zip(node, idle, strict=True) if not skipped)
    return node


def _for_type_checkers(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


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
