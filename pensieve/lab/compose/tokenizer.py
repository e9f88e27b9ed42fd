"""The tokenizer of a configured model: found in its folder or on the hub, in whichever layout it was published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pensieve.errors import ConfigError, WeightsMissing
from pensieve.hub import cached_snapshot, settings_folder
from pensieve.lab.compose.schema import ModelConfig
from pensieve.lab.compose.weights import own_folder, weights_kind
from pensieve.serve.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, eos_of, special_tokens_of

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
    place = _place(model, make=not meaningless)
    folder = None if place is None else _folder(place, model, download=not meaningless)
    if folder is not None:
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


def _place(model: ModelConfig, make: bool) -> Path | str | None:
    """The folder or hub id where the tokenizer must be."""
    if model.tokenizer != "hub":
        folder = Path(model.tokenizer).expanduser()
        return folder if folder.is_dir() else model.tokenizer
    return own_folder(model, make) or model.hub_id


def _folder(place: Path | str, model: ModelConfig, download: bool) -> Path | None:
    """The folder that has a tokenizer, None where it has none and nothing may be downloaded."""
    if isinstance(place, Path):
        return place if has_tokenizer(place) else None
    revision = model.revision if place == model.hub_id else None
    cached = cached_snapshot(place, revision)
    if cached is not None and has_tokenizer(cached):
        return cached
    return settings_folder(place, revision, has_tokenizer, "The tokenizer", _INSTEAD) if download else None


_INSTEAD = "use model.tokenizer=<a folder that has one> or model.tokenizer=bytes"
