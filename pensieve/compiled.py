"""The modules in which simulated trials spend their time, compiled: the same sources as C extensions, made by mypyc.

`build` translates MODULES once and keeps the result in the user's cache under a key of the sources, of Python and of the
machine. `use` is called when the package is imported: where there is a build of this key, these modules come from it, else
they are plain Python. Results are the same to the bit.

A class of theirs that others may derive from says so by @mypyc_attr(allow_interpreted_subclasses=True), and what a subclass
may set for itself is a ClassVar. Policies of eviction, workloads and clocks stay plain Python, and may be anything.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from pensieve.errors import CannotCompile
from pensieve.user_cache import user_cache

MODULES = (
    "session", "plan", "ledger", "idle_sessions", "engine",
    "cache/base", "cache/pool", "cache/victims", "cache/tiers", "cache/two_tier", "cache/restore",
    "scheduler/scheduler", "scheduler/sequence", "scheduler/loads", "scheduler/composition",
    "cost/base", "cost/roofline", "worker/simulated",
)  # fmt: skip
"""Those that pay, where mypyc can do them: not record, since a turn that is read back from a file has no field set."""

SWITCH = "PENSIEVE_COMPILED"
"""This variable of the environment set to 0: plain Python, whatever was built."""

_ROOT = Path(__file__).parent
_READ = ("", "cache", "cost", "eviction", "scheduler", "worker")
"""Folders of all modules that MODULES import, and are compiled against."""
_SUFFIX = EXTENSION_SUFFIXES[0]
_MADE_OF = "made_of"
"""A file beside a build: the folder of the package that it was made of."""

_LIMIT_S = 900
_SCRIPT = """
import sys
from mypyc.build import mypycify
from setuptools import setup
extensions = mypycify(["--config-file=mypy.ini", *sys.argv[1:]], opt_level="2", debug_level="0")
setup(name="pensieve-compiled", packages=[], py_modules=[], ext_modules=extensions,
      script_args=["--quiet", "build_ext", "--build-lib", "built", "--build-temp", "objects"])
"""
_MYPY = """[mypy]
follow_imports = silent
ignore_missing_imports = True
"""
_LOADS = """
import sys
from importlib import import_module
for name in sys.argv[2:]:
    file = import_module("pensieve." + name.replace("/", ".")).__file__
    assert file.endswith(sys.argv[1]), f"error: {name} was not compiled: {file}"
"""


class _Built:
    """Finds the compiled modules before Python looks for their sources."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            ".".join(file.relative_to(folder).parts).removesuffix(_SUFFIX): str(file)
            for file in folder.rglob(f"*{_SUFFIX}")
        }

    def __bool__(self) -> bool:
        return bool(self._files)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file)) if file else None


def use() -> None:
    """Take MODULES from the build that fits, if there is one; to be called before any of them is imported."""
    if os.environ.get(SWITCH) == "0" or in_use():
        return
    try:
        if builds().is_dir() and (built := _Built(builds() / key())):
            sys.meta_path.insert(0, built)
    except (OSError, RuntimeError):  # the cache cannot be read, or there is no home: plain Python
        return


def in_use() -> bool:
    """Whether MODULES are compiled in this process."""
    return any(isinstance(finder, _Built) for finder in sys.meta_path)


def builds() -> Path:
    """The folder of this user's builds. Raises RuntimeError for a user without a home."""
    return user_cache() / "compiled"


def key() -> str:
    """What a build is found by: the sources that it was compiled from and against, and Python, whose suffix of extensions
    names the machine. Raises OSError."""
    digest = hashlib.sha256(f"{_SUFFIX} {sys.version} {MODULES}".encode())
    for folder in _READ:
        for file in sorted((_ROOT / folder).glob("*.py")):
            digest.update(f"\n{folder}/{file.name} ".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:24]


def build() -> Path:
    """Compile MODULES, unless a build fits already; returns its folder. Builds of earlier sources of this folder are
    deleted. Raises CannotCompile."""
    from shutil import rmtree
    from tempfile import TemporaryDirectory

    try:
        folder = builds() / key()
        if folder.is_dir():
            return folder
        _check_means()
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
            made = _compiled(Path(scratch), folder.name)
            (made / _MADE_OF).write_text(str(_ROOT))
            if not folder.is_dir():  # no other process was faster
                made.rename(folder)
        for older in folder.parent.iterdir():
            made_of = older / _MADE_OF
            if older != folder and made_of.is_file() and made_of.read_text() == str(_ROOT):
                rmtree(older, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        raise CannotCompile(f"What is compiled cannot be kept: {error}; name a folder in XDG_CACHE_HOME.") from error
    return folder


def _check_means() -> None:
    import shlex
    import shutil
    from importlib.util import find_spec
    from sysconfig import get_paths

    without = "Without it everything runs as plain Python, to the same results."
    for package in ("mypyc", "setuptools"):
        if find_spec(package) is None:
            raise CannotCompile(
                f"Compiling takes the Python package {package}, which is not installed: pip install 'pensieve[fast]' "
                f"(in a checkout: pip install -e '.[fast]'). {without}"
            )
    given = shlex.split(os.environ.get("CC", ""))[:1]
    if not any(map(shutil.which, given or ("cc", "gcc", "clang"))):
        found = f"CC={os.environ['CC']} is not one" if given else "there is none"
        raise CannotCompile(
            f"Compiling takes a C compiler, and {found}: install gcc or clang, or name one in CC. {without}"
        )
    headers = Path(get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise CannotCompile(
            f"Compiling takes the headers of Python, and there are none in {headers}: install python3-dev "
            f"(python3-devel), or use a Python that brings them, as those of uv and conda do. {without}"
        )


def _compiled(scratch: Path, name: str) -> Path:
    """Compile in an empty folder, so that nothing of the package is touched, and see that it loads."""
    (scratch / "pensieve").symlink_to(_ROOT, target_is_directory=True)
    (scratch / "mypy.ini").write_text(_MYPY)
    _run(["-c", _SCRIPT, *(f"pensieve/{module}.py" for module in MODULES)], scratch, {SWITCH: "0"})
    made = scratch / "cache" / "pensieve" / "compiled" / name
    made.parent.mkdir(parents=True)
    (scratch / "built").rename(made)
    environment = {SWITCH: "1", "XDG_CACHE_HOME": str(scratch / "cache"), "PYTHONPATH": str(_ROOT.parent)}
    _run(["-c", _LOADS, _SUFFIX, *MODULES], scratch / "cache", environment)
    return made


def _run(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    import subprocess

    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"Compiling took more than {_LIMIT_S} s, and was stopped.") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        wrong = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise CannotCompile(
            f"The modules cannot be compiled; everything goes on in plain Python. {' '.join(wrong[:3])}"
        )
