"""A C source of this package as a loaded library, compiled once for this machine and kept in the user's cache."""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pensieve.errors import EngineMissing
from pensieve.hub import user_cache

_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# Never -ffast-math: linking with it makes the whole process flush denormal numbers to zero.
_ATTEMPTS = (("-march=native", "-fopenmp"), ("-march=native", "-fopenmp-simd"), ("-fopenmp-simd",))
_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Library:
    """compiler: its name and version. threads: was it compiled with OpenMP, so that it can use several?"""

    functions: ctypes.CDLL
    compiler: str
    threads: bool


@cache
def load_library(source: Path, definitions: tuple[str, ...]) -> Library:
    """Compile `source` with -D`definitions`, or take what was compiled before. Raises EngineMissing without a compiler."""
    compiler = find_compiler()
    version = compiler_version(compiler)
    said = ""
    for attempt in _ATTEMPTS:
        parallel = attempt[-1] == "-fopenmp"
        runtime = openmp_runtime() if parallel else None
        if parallel and runtime is None:
            continue
        command = [*compiler, *_FLAGS, *attempt, *(f"-D{text}" for text in definitions), str(source)]
        command += [*([runtime] if runtime else []), "-lm"]
        try:
            return Library(_compiled(command, source, version), version, parallel)
        except (OSError, subprocess.SubprocessError) as error:  # OSError: what it made does not load
            said = _complaint(error)
    raise EngineMissing(
        f"attention_backend=native: {version} cannot compile {source.name} ({said}); use attention_backend=reference, or "
        "name another compiler in CC."
    )


def find_compiler() -> list[str]:
    """What CC says, else the first of cc, gcc, clang. Raises EngineMissing."""
    given = os.environ.get("CC")
    for command in [shlex.split(given)] if given else [["cc"], ["gcc"], ["clang"]]:
        if command and shutil.which(command[0]):
            return command
    raise EngineMissing(
        f"attention_backend=native needs a C compiler, and {f'CC={given} is not one' if given else 'there is none'} (install "
        "gcc or clang); attention_backend=reference needs none."
    )


def compiler_version(command: Sequence[str]) -> str:
    """The first line of what it says of itself."""
    ask = [*command, "--version"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return command[0]
    return (done.stdout.splitlines() or [command[0]])[0].strip()


def openmp_runtime() -> str | None:
    """The OpenMP library that torch has loaded: a second one would bring threads of its own, which wait by spinning."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return next((path for path in sorted(paths) if Path(path).name.startswith(("libgomp", "libiomp5"))), None)


def _compiled(command: Sequence[str], source: Path, version: str) -> ctypes.CDLL:
    """Raises OSError and SubprocessError. Processes that compile at the same time each put a whole file in place."""
    parts = (*_texts(source), shlex.join(command), version, platform.machine(), processor())
    name = f"{source.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.so"
    try:
        folder = user_cache() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / name).exists():
            with TemporaryDirectory(dir=folder) as scratch:
                _compile(command, Path(scratch) / name).rename(folder / name)
    except (OSError, RuntimeError):  # no home, or it cannot be written to
        with TemporaryDirectory(prefix="pensieve-") as scratch:
            return ctypes.CDLL(str(_compile(command, Path(scratch) / name)))
    return ctypes.CDLL(str(folder / name))


def _texts(source: Path) -> list[str]:
    """Of a source, and of the files beside it that it includes."""
    text = source.read_text()
    return [text, *((source.parent / name).read_text() for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE))]


def _compile(command: Sequence[str], target: Path) -> Path:
    done = [*command, "-o", str(target)]
    subprocess.run(done, check=True, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    return target


def _complaint(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in (text or "").splitlines() if "error" in line.lower()] or (text or "").splitlines()
    return lines[0].strip() if lines else type(error).__name__


def processor() -> str:
    """What code for `native` depends on: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    )
