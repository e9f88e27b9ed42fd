"""Text to token ids and back, without torch: bytes that need no download, or a model's own tokenizer. And messages to token
ids by a model's own chat template, so that each turn extends the one before token for token.

A chat model reads a conversation as text in its own markup. Rendering the whole list of messages again at every turn, and
encoding it, would change history: a tokenizer seldom gives the very ids that the model sampled. So the template is rendered
over the messages with a mark in place of each reply, and the reply's own ids stand where its mark is.

Special tokens come from the template alone: those that a message, a tool's result or a tool's schema spells out are encoded
as any other text, or they would begin and end messages.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pensieve.errors import ConfigError, WeightsMissing

SPECIALS = ("<bos>", "<eos>", "<pad>")
_REPLY_EDGE = "\ufdd0"  # around marks of replies in rendered templates; no character, so seldom in a text
_MARK = f"{_REPLY_EDGE}{{}}{_REPLY_EDGE}"  # no template strips it
_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_EDGE = "\ufdd1"  # the same, around marks of special tokens
_UNDECIDED = "\ufffd"
_WINDOW = 16  # tokens at the end that are decoded anew with each one
_TRIES = 8  # places where the text may be cut, since not every place will do


Message = Mapping[str, Any]
"""role and content (a string), and whatever else the template knows, such as tool_calls. ids: of what the model itself said,
its own tokens, with the end-of-sequence token it may have sampled."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As who asks and templates know them: without `ids`."""
    return [{name: value for name, value in message.items() if name != "ids"} for message in messages]


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
        # Older models have their special tokens in special_tokens_map.json.
        settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        self._backend, self.special_tokens = backend or (_read_backend(folder), special_tokens_of(settings))
        self.name = name or folder.name
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self.chat_template = _chat_template(folder, settings)
        own = self._id_of("eos_token")
        self.eos_ids = frozenset(
            (*eos_ids, *eos_of(_read_json(folder / "generation_config.json")), *(() if own is None else (own,)))
        )
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
        texts = list({_EDGE, _REPLY_EDGE, *(token.content for token in added if token.special)} - {""})
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


def _read_json(file: Path) -> dict[str, Any]:
    """Its content; empty where there is no such file."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise WeightsMissing(f"{file} is not readable: {error}.") from error


def _read_backend(folder: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise WeightsMissing(f"{file} is not a readable tokenizer: {error}.") from error


def special_tokens_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens, by names such as bos_token."""
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, Mapping) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


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

    def ends(self, token: int) -> bool:
        """The next token; returns whether the text so far holds a stop string."""
        self.push(token)
        return self.ended

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


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it; all of it where there is none."""
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))]


class ChatTemplate:
    """Conversations as one model reads them.

    A model without a template of its own gets lines, which base models go on with well enough:
    "User: Hello\\nAssistant:", and "\\nUser: ..." after the reply, behind the token that texts begin with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template

    @property
    def plain(self) -> bool:
        """The model has no template of its own."""
        return self._source is None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The token ids of `messages`, with the markup after which the assistant speaks. The model's own ids are used as
        they are, instead of a message's content and tool calls. tools: function schemas, for templates that know of them.

        Unless the template rewrites history (drops earlier thinking, for one), the prompt of turn n + 1 begins with that of
        turn n and the whole reply n. Where it does, what both have in common is kept.
        Raises ConfigError for messages that the template refuses.
        """
        own = {index: message["ids"] for index, message in enumerate(messages) if "ids" in message}
        listed, tools = self._literal(plain_messages(messages)), self._literal(tools)
        said = {index: self._literal(self._tokenizer.decode(ids)) for index, ids in own.items()}
        true = self._render(_with_replies(listed, said), tools)
        shown = self._render(_with_replies(listed, {index: _MARK.format(index) for index in own}), tools)
        segments = _split(shown, list(own))
        if segments is None:  # a reply is not shown at all, or twice
            return self._encode(true, first=True)
        ids: list[int] = []
        place = 0
        for (index, reply), segment, after in zip(own.items(), segments, segments[1:], strict=False):
            length = _length_of(said[index], true, place + len(segment), after)
            if length is None or not true.startswith(segment, place):  # the template shows another text: it is encoded
                break
            ids += self._encode(segment.removesuffix(self._joint or ""), first=not place) + self._without_end(
                list(reply)
            )
            place += len(segment) + length
        return ids + self._encode(true[place:], first=not place)

    def opening(self, text: str) -> list[int]:
        """The tokens of a conversation's first message."""
        return self.prompt([_user(text)])

    def following(self, text: str, last: int | None) -> list[int]:
        """The tokens to append for a further message of the user, where the earlier ones are not at hand.

        last: the last token of the conversation; an end-of-sequence token that the template begins with is not repeated.
        Equal to what `prompt` appends, unless the template rewrites history.
        """
        mark = _MARK.format(1)
        shown = self._render([_user("-"), {"role": "assistant", "content": mark}, _user(self._literal(text))], None)
        ids = self._encode(shown.partition(mark)[2], first=False)
        return ids[1:] if ids and ids[0] == last and last in self._tokenizer.eos_ids else ids

    # -- how --------------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, ask: bool = True) -> str:
        if self._source is None:
            return _lines(messages, ask)
        from transformers.utils.chat_template_utils import render_jinja_template  # sandboxed; imports no torch

        try:
            rendered, _ = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self._source,
                add_generation_prompt=ask,
                **self._tokenizer.special_tokens,
            )
        except Exception as error:  # a template may raise anything; raise_exception in it is its way to refuse
            raise ConfigError(
                f"The chat template of {self._tokenizer.name} refuses these messages: {str(error).rstrip('.')}."
            ) from error
        return str(rendered[0])

    @cached_property
    def _joint(self) -> str | None:
        """What a template puts between the markup that asks for a reply and a reply in history: often nothing, or a space
        that the reply's first token has already. None where that markup is not in history at all."""
        mark = _MARK.format(1)
        asked = self._render([_user("-")], None)
        head = self._render([_user("-"), {"role": "assistant", "content": mark}], None, ask=False).partition(mark)[0]
        rest = head.removeprefix(asked)
        return rest if head.startswith(asked) and not rest.strip() else None

    def _without_end(self, reply: list[int]) -> list[int]:
        """The template itself ends a reply, also one that was cut short, or that ended otherwise than the template says."""
        stop = len(reply)
        while stop and reply[stop - 1] in self._tokenizer.eos_ids:
            stop -= 1
        return reply[:stop]

    def _encode(self, text: str, first: bool) -> list[int]:
        """first: the text begins the conversation. Templates write the token that texts begin with themselves."""
        begin = list(self._tokenizer.begin) if first and self.plain else []
        return begin + self._tokenizer.encode(text, marked=True)

    def _literal(self, said: Any) -> Any:
        """The same with all its strings literal."""
        if isinstance(said, str):
            return self._tokenizer.literal(said)
        if isinstance(said, Mapping):
            return {self._literal(name): self._literal(value) for name, value in said.items()}
        return [self._literal(one) for one in said] if isinstance(said, list | tuple) else said


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _with_replies(messages: Sequence[Message], contents: Mapping[int, str]) -> list[Message]:
    return [
        {"role": "assistant", "content": contents[index]} if index in contents else message
        for index, message in enumerate(messages)
    ]


def _split(shown: str, indices: list[int]) -> list[str] | None:
    """The text between the marks; None unless each is there once, in its order."""
    segments = []
    for index in indices:
        mark = _MARK.format(index)
        before, found, shown = shown.partition(mark)
        if not found or mark in shown:
            return None
        segments.append(before)
    return [*segments, shown]


def _length_of(reply: str, text: str, place: int, after: str) -> int | None:
    """How long the reply is in `text` at `place`, where `after` follows it. Templates may strip it; None where it is another
    text."""
    for shown in (reply, reply.strip(), reply.rstrip(), reply.lstrip()):
        if text.startswith(shown + after, place):
            return len(shown)
    return None


def user_line(text: str, first: bool) -> str:
    """A user's message in plain lines: what `opening` and `following` encode for a model without a template."""
    return f"{'' if first else chr(10)}User: {text}\nAssistant:"


def _lines(messages: Sequence[Message], ask: bool) -> str:
    spoken = [f"{_ROLES.get(m['role'], m['role'])}: {str(m.get('content') or '').lstrip()}" for m in messages]
    return "\n".join([*spoken, "Assistant:"] if ask else spoken)
