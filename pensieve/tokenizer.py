"""Text to token ids and back, without torch: bytes that need no download, or a model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pensieve.errors import WeightsMissing

SPECIALS = ("<bos>", "<eos>", "<pad>")


class Tokenizer(Protocol):
    """Text to the ids of one model and back.

    name: recorded. vocab_size: ids are in [0, vocab_size). begin: ids that stand before the first token of a text, where the
    model wants some (BOS). eos_ids: each of them ends a reply. chat_template: the model's own, in Jinja; None where it has
    none. special_tokens: their texts by name (bos_token, eos_token, ...), for the template.
    """

    name: str
    vocab_size: int
    begin: tuple[int, ...]
    eos_ids: frozenset[int]
    chat_template: str | None
    special_tokens: Mapping[str, str]

    def encode(self, text: str) -> list[int]:
        """Adds no special tokens; those that the text spells out become their ids."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Leaves special tokens out."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255, then <bos>, <eos>, <pad>.

    Any byte sequence decodes: what is not UTF-8 becomes the replacement character, and ids from 256 on become nothing,
    because a model with random weights may emit any id of its vocabulary.
    """

    name = "bytes"
    vocab_size = 256 + len(SPECIALS)
    begin: tuple[int, ...] = ()
    eos_ids: frozenset[int] = frozenset({257})
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class HubTokenizer:
    """The tokenizer of a model folder, run by the `tokenizers` library.

    backend: a tokenizers.Tokenizer; None: read from the folder's tokenizer.json. eos_ids: that the model's configuration
    names; what the tokenizer itself calls its end of sequence is added. Raises WeightsMissing for a malformed file.
    """

    def __init__(self, folder: Path, eos_ids: Iterable[int] = (), backend: Any = None) -> None:
        self._backend = backend or _read_backend(folder / "tokenizer.json")
        self.name = folder.name
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        settings = _read_settings(folder)
        self.special_tokens: Mapping[str, str] = _special_tokens(settings)
        self.chat_template = _chat_template(folder, settings)
        own = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = frozenset(eos_ids) | (frozenset() if own is None else {int(own)})
        self.begin = self._begin()

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def _begin(self) -> tuple[int, ...]:
        """What the tokenizer's own post-processor puts before a text."""
        bare, full = (self._backend.encode("a", add_special_tokens=add).ids for add in (False, True))
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return tuple(full[:start])


def _read_backend(file: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise WeightsMissing(f"{file} is not a readable tokenizer: {error}.") from error


def _read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, which older models have their special tokens in."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                settings |= json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError) as error:
                raise WeightsMissing(f"{folder / name} is not readable: {error}.") from error
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, Mapping) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json says; of several, the one called default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    said = settings.get("chat_template")
    if isinstance(said, list):
        named = {str(one.get("name")): one.get("template") for one in said if isinstance(one, Mapping)}
        said = named.get("default")
    return said if isinstance(said, str) else None


def find_tokenizer_file(source: str, revision: str | None = None, download: bool = False) -> Path | None:
    """tokenizer.json of a folder, or of a hub id in the local hub cache; from the hub itself only with `download`."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        file = folder / "tokenizer.json"
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for local_only in (True, False) if download else (True,):
        try:
            found = hf_hub_download(source, "tokenizer.json", revision=revision, local_files_only=local_only)
            return Path(found)
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
            continue
    return None


def load_tokenizer(
    sources: Sequence[str],
    revision: str | None,
    eos_ids: Iterable[int],
    vocab: int,
    random_weights: bool,
    download: bool = False,
) -> Tokenizer:
    """The first tokenizer.json among `sources` (folders and hub ids).

    With random weights, whose text means nothing anyway, the byte tokenizer stands in where none can be had and the
    vocabulary has room for it. Raises WeightsMissing otherwise.
    """
    for source in sources:
        file = find_tokenizer_file(source, revision, download)
        if file is not None:
            return HubTokenizer(file.parent, eos_ids)
    if random_weights and vocab >= ByteTokenizer.vocab_size:
        return ByteTokenizer()
    where = " or ".join(sources) if sources else "the model's folder"
    raise WeightsMissing(
        f"There is no tokenizer.json in {where}, and the hub cannot be reached for it; "
        "use model.weights=random (same speed, meaningless text) or model.tokenizer=bytes."
    )
