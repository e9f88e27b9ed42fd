"""The digest of the code that a trial ran: the package's sources, and the user's own modules that the configuration names.

Python is hashed as a syntax tree without docstrings, so that comments and layout do not count; everything else (C, data
that ships with the package) byte by byte. Modules are found without importing them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pensieve
from pensieve.results.content import cached, content_hash, text_hash, version_of

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
