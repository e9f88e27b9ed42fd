"""Digests of what a trial's identity counts: of files and folders by all their content, and of the code that it ran.

Reading tens of gigabytes of weights takes longer than many trials, so the digest of a large file is cached in the user's
cache folder until the file's device, inode, size, mtime or ctime changes; a program can set the mtime back, but not the
ctime.

The code is the package's sources, and the user's own modules that the configuration names. Python is hashed as a syntax
tree without docstrings, so that comments and layout do not count; everything else (C, data that ships with the package)
byte by byte. Modules are found without importing them.
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
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pensieve
from pensieve.user_cache import user_cache

NOT_CODE = (
    "conf/",  # counts through the resolved configuration
    "cli.py",
    "commands/",
    "lazy.py",
    "results/",
    "server/",
    "progress.py",
    "compose/explain.py",
    "compose/preflight.py",
    "trial/isolate.py",
    "trial/job.py",
    "trial/jobs.py",
    "trial/liveness.py",
    "trial/mlflow.py",
    "trial/mlflow_process.py",
    "trial/start_times.py",
    "trial/summary.py",
    "trial/sweep.py",
    "trial/terminal.py",
    "trial/tracking.py",
)
"""Files and folders of the package that cannot change a measurement: they record it, show it, or run the jobs of a sweep
and guard them. A file that is new counts until somebody says that it cannot."""

BENCH = "bench/"  # changes the benchmarks' measurements only

NAMES_CODE = ("_target_", "composition")
"""Last parts of field names whose text is the dotted path of a class or function."""

CACHED_BYTES = 64 * 2**20
"""From this size on a file's digest is cached."""

Version = tuple[int, int, int, int, int]


# Files and folders


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, or of all files of a folder with their names."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and ".git" not in p.relative_to(path).parts)
        return text_hash("\n".join(f"{p.relative_to(path).as_posix()} {content_hash(p)}" for p in files))
    return _file_hash(path.resolve(), version_of(path))


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


def code_hash(config: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of the package's sources but NOT_CODE, and of the user's modules that `config` names (see outside_names).

    Of such a module, the user's own modules that it imports count too; what is installed does not.
    """
    config = config or {}
    digest = hashlib.sha256(_package_hash("bench" in config).encode())
    for module in sorted(_with_imports(outside_names(config))):
        digest.update(f"{module.name} {source_hash(module)}\n".encode())
    return digest.hexdigest()


def outside_names(config: Any) -> set[str]:
    """The dotted paths outside the package that a configuration names."""
    return {name for name in _dotted(config) if name.split(".")[0] != "pensieve"}


def source_hash(path: Path) -> str:
    """The hash of a Python file's syntax tree, or of the bytes of any other file, or of one that does not parse."""
    if path.suffix != ".py":
        return content_hash(path)
    tree = _tree(path)
    if tree is None:
        return content_hash(path)
    return text_hash(ast.dump(_Effective().visit(tree)))


class _Effective(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove constants that stand alone, such as docstrings: they do nothing."""
        return None if isinstance(node.value, ast.Constant) else node


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=2)
def _package_hash(with_bench: bool = False) -> str:
    """The hash of the package's files, read once a process: later changes of the files are not loaded either."""
    root = Path(pensieve.__file__).parent
    out = NOT_CODE if with_bench else (*NOT_CODE, BENCH)
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    counted = {name: path for name, path in files.items() if not _hidden(name) and not name.startswith(out)}

    def compute() -> str:
        return text_hash("".join(f"{name} {source_hash(path)}\n" for name, path in counted.items()))

    # Parsing takes a second, which every start of the program would pay.
    version = text_hash(json.dumps([sys.version, out, [(name, version_of(path)) for name, path in counted.items()]]))
    return cached(f"{root} {'with' if with_bench else 'without'} bench", version, compute)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


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


def _with_imports(names: set[str]) -> set[Path]:
    """The files of these modules, and of what they import that is the user's as well."""
    found: set[Path] = set()
    waiting = [path for path in map(_module_file, names) if path is not None]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [one for one in _imports(path) if not _installed(one)]
    return found


def _imports(path: Path) -> Iterator[Path]:
    tree = _tree(path) if path.suffix == ".py" else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names, folders = [alias.name for alias in node.names], None
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            folders = [str(path.parents[node.level - 1])] if node.level else None
        else:
            continue
        yield from (found for name in names if (found := _module_file(name, folders)) is not None)


def _installed(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package or to Pensieve, which other parts of the identity cover."""
    places = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.is_relative_to(place) for place in {*places, Path(pensieve.__file__).parent})


def _module_file(dotted: str, folders: Sequence[str] | None = None) -> Path | None:
    """The source file of the deepest module on the dotted path, found without importing it; None: a built-in.

    folders: where to look for its first part, by default where Python does.
    """
    name, found = "", None
    for part in dotted.split("."):
        # A package's parts are looked up by their own name in its folder, as the path finder wants it.
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
