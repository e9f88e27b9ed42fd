"""Text to token ids and back, without torch: bytes that need no download, or a model's own tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pensieve.errors import WeightsMissing

SPECIALS = ("<bos>", "<eos>", "<pad>")
REPLY_EDGE = "\ufdd0"
"""Around marks of replies in rendered templates; no character, so seldom in a text. `literal` replaces those that are."""
_EDGE = "\ufdd1"  # the same, around marks of special tokens
_UNDECIDED = "\ufffd"
_WINDOW = 16  # tokens at the end that are decoded anew with each one
_TRIES = 8  # places where the text may be cut, since not every place will do


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

    def encode(self, text: str, marked: bool = False) -> list[int]:
        """Adds no special tokens; those that the text spells out become their ids. marked: parts of it are `literal`."""
        ...

    def literal(self, text: str) -> str:
        """The text with a mark in place of each special token that it spells out: encoded as marked, it has none. Any other
        text stays as it is."""
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

    def encode(self, text: str, marked: bool = False) -> list[int]:
        return list(text.encode("utf-8"))

    def literal(self, text: str) -> str:
        return text

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class HubTokenizer:
    """The tokenizer of a model folder, run by the `tokenizers` library.

    eos_ids: that the model's configuration names; those of generation_config.json beside the tokenizer, and what the
    tokenizer itself calls its end of sequence, are added. backend: a tokenizers.Tokenizer with its special tokens, for a
    folder without tokenizer.json. Raises WeightsMissing for a malformed file.
    """

    def __init__(
        self,
        folder: Path,
        eos_ids: Iterable[int] = (),
        name: str | None = None,
        backend: tuple[Any, Mapping[str, str]] | None = None,
    ) -> None:
        settings = _read_settings(folder)
        self._backend, self.special_tokens = backend or (_read_backend(folder), special_tokens_of(settings))
        self.name = name or folder.name
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self.chat_template = _chat_template(folder, settings)
        own = self._id_of("eos_token")
        self.eos_ids = frozenset((*eos_ids, *_generation_eos(folder), *(() if own is None else (own,))))
        self.begin = self._begin(settings.get("add_bos_token"))
        self._mark_specials()

    def encode(self, text: str, marked: bool = False) -> list[int]:
        if _EDGE not in text:
            return self._ids(text)
        ids = self._ids(text if marked else text.replace(_EDGE, self._marks[_EDGE]))
        return [token for one in ids for token in self._spelled.get(one, (one,))]

    def literal(self, text: str) -> str:
        return self._specials.sub(lambda found: self._marks[found[0]], text)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._backend.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _mark_specials(self) -> None:
        """Make a mark for each special token, an added token: what stands beside it is encoded as beside a special token. The
        ids of marks are beyond the vocabulary and in no prompt."""
        from tokenizers import AddedToken

        added = self._backend.get_added_tokens_decoder().values()
        texts = list({_EDGE, REPLY_EDGE, *(token.content for token in added if token.special)} - {""})
        self._marks = {text: f"{_EDGE}{number}{_EDGE}" for number, text in enumerate(texts)}
        longest_first = sorted(texts, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)))
        self._backend.add_tokens([AddedToken(mark, normalized=False) for mark in self._marks.values()])
        self._backend.encode_special_tokens = True  # as text; behind a mark, or some tokenizers put a space before it
        self._spelled = {
            self._backend.token_to_id(mark): self._ids(mark + text)[1:] for text, mark in self._marks.items()
        }
        self._backend.encode_special_tokens = False

    def _id_of(self, name: str) -> int | None:
        found = self._backend.token_to_id(self.special_tokens.get(name, ""))
        return None if found is None else int(found)

    def _begin(self, add_bos: bool | None) -> tuple[int, ...]:
        """BOS as tokenizer_config.json asks for it (add_bos_token), else what the post-processor puts before a text."""
        bos = self._id_of("bos_token")
        if add_bos is not None and bos is not None:
            return (bos,) if add_bos else ()
        bare, full = (self._backend.encode("a", add_special_tokens=add).ids for add in (False, True))
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return tuple(full[:start])


def eos_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config.json or generation_config.json: none, one or several."""
    said = config.get("eos_token_id")
    ids = said if isinstance(said, list | tuple) else () if said is None else (said,)
    if not all(isinstance(one, int) for one in ids):
        raise WeightsMissing(f"eos_token_id={said!r} names no token ids; correct the model's configuration.")
    return tuple(ids)


def _generation_eos(folder: Path) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    return eos_of(_read_json(file)) if file.is_file() else ()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise WeightsMissing(f"{file} is not readable: {error}.") from error


def _read_backend(folder: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise WeightsMissing(f"{file} is not a readable tokenizer: {error}.") from error


def _read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, which older models have their special tokens in."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= _read_json(folder / name)
    return settings


def special_tokens_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens, by names such as bos_token."""
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
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise WeightsMissing(f"{file} is not readable: {error}.") from error
    said = settings.get("chat_template")
    if isinstance(said, list):
        named = {str(one.get("name")): one.get("template") for one in said if isinstance(one, Mapping)}
        said = named.get("default")
    return said if isinstance(said, str) else None


class TextStream:
    """Text as its tokens come, up to the first stop string, as if all of them were decoded anew with each one. `push` gives
    the text that can no longer change, `finish` the rest; ended: a stop string was found.

    A token may be half a character, whose text is then a replacement character at the end (in some tokenizers one for each
    byte since the last token that is no byte); and the text may end with the beginning of a stop string. Both are held back
    until a token decides.

    A token's text may depend on its neighbours: half a character, a space that only a first word loses. So the last tokens
    are decoded together, and their front is given up only where the text of the rest is the end of the text of both.
    Tokens without any text (special ones, ids that the tokenizer does not know) are not kept at all: however many there
    are, what stands before and behind them is next to each other.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._before = ""  # the end of the text of what was given up
        self._told = 0  # characters that were handed out, from the first of those on
        self._ids: list[int] = []
        self._cut_at = 2 * _WINDOW
        self.ended = False

    def push(self, token: int) -> str:
        """The next token; returns what can be handed out now, possibly nothing."""
        # Twice, since some tokenizers drop a single space at the start.
        if self.ended or not self._decode((token, token)):
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = self._before + text
        decided = before_stop(whole, self._stops)
        if len(decided) < len(whole):
            self.ended = True
            return self._hand_out(decided)
        decided = decided.rstrip(_UNDECIDED)
        held = max((_begun(decided, stop) for stop in self._stops), default=0)
        piece = self._hand_out(decided[: len(decided) - held])
        if len(self._ids) >= self._cut_at:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._hand_out(before_stop(self._before + self._decode(self._ids), self._stops))

    def _hand_out(self, text: str) -> str:
        piece = text[self._told :]
        self._told = max(self._told, len(text))
        return piece

    def _cut(self, text: str) -> None:
        for count in range(_WINDOW, _WINDOW + _TRIES):
            kept = self._ids[-count:]
            end = self._decode(kept)
            if end and text.endswith(end):
                before = self._before + text[: len(text) - len(end)]
                gone = min(self._told, len(before))  # what a stop string may begin with was not handed out
                self._before, self._told = before[gone:], self._told - gone
                self._ids, self._cut_at = kept, count + _WINDOW
                return
        self._cut_at = 2 * len(self._ids)


def _begun(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string may begin with."""
    return next((count for count in range(len(stop) - 1, 0, -1) if text.endswith(stop[:count])), 0)


def stop_search(decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> Callable[[int], bool]:
    """Who is told each token, and answers whether the text so far holds a stop string."""
    stream = TextStream(decode, stops)

    def ends(token: int) -> bool:
        stream.push(token)
        return stream.ended

    return ends


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it; all of it where there is none."""
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))]
