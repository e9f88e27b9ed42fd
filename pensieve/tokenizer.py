"""Text to token ids and back, without torch: bytes that need no download, or a model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pensieve.errors import WeightsMissing

SPECIALS = ("<bos>", "<eos>", "<pad>")


class Tokenizer(Protocol):
    """vocab_size: ids are in [0, vocab_size). eos_id: None where the model has no end of sequence. name: recorded."""

    name: str
    vocab_size: int
    eos_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255, then <bos>, <eos>, <pad>. Encoding adds no special tokens.

    Any byte sequence decodes: what is not UTF-8 becomes the replacement character, and ids from 256 on become nothing,
    because a model with random weights may emit any id of its vocabulary.
    """

    name = "bytes"
    vocab_size = 256 + len(SPECIALS)
    eos_id: int | None = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class HubTokenizer:
    """A tokenizer.json read by the `tokenizers` library. Encoding adds no special tokens; decoding leaves them out."""

    def __init__(self, file: Path, eos_id: int | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend: Any = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise WeightsMissing(f"{file} is not a readable tokenizer: {error}.") from error
        self.name = str(file.parent.name)
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self.eos_id = eos_id if eos_id is not None else _eos_beside(file, self._backend)

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def _eos_beside(file: Path, backend: Any) -> int | None:
    """The end-of-sequence id that tokenizer_config.json names, if it lies beside the tokenizer."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    found = backend.token_to_id(token) if isinstance(token, str) else None
    return None if found is None else int(found)


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
    eos_id: int | None,
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
            return HubTokenizer(file, eos_id)
    if random_weights and vocab >= ByteTokenizer.vocab_size:
        return ByteTokenizer()
    where = " or ".join(sources) if sources else "the model's folder"
    raise WeightsMissing(
        f"There is no tokenizer.json in {where}, and the hub cannot be reached for it; "
        "use model.weights=random (same speed, meaningless text) or model.tokenizer=bytes."
    )
