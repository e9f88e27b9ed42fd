"""Messages to token ids by a model's own chat template, so that each turn extends the one before token for token.

A chat model reads a conversation as text in its own markup. Rendering the whole list of messages again at every turn, and
encoding it, would change history: a tokenizer seldom gives the very ids that the model sampled. So the template is rendered
over the messages with a mark in place of each reply, and the reply's own ids stand where its mark is.

Special tokens come from the template alone: those that a message, a tool's result or a tool's schema spells out are encoded
as any other text, or they would begin and end messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pensieve.errors import ConfigError
from pensieve.serve.tokenizer import REPLY_EDGE, Tokenizer

Message = Mapping[str, Any]
"""role and content (a string), and whatever else the template knows, such as tool_calls."""

_MARK = f"{REPLY_EDGE}{{}}{REPLY_EDGE}"  # no template strips it
_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


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

    def prompt(
        self,
        messages: Sequence[Message],
        replies: Mapping[int, Sequence[int]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of `messages`, with the markup after which the assistant speaks.

        replies: the own token ids, by their index in `messages`, of those that this model said, with the end-of-sequence
        token it may have sampled. They are used as they are, instead of the message's content and tool calls.
        tools: function schemas, for templates that know of them.

        Unless the template rewrites history (drops earlier thinking, for one), the prompt of turn n + 1 begins with that of
        turn n and the whole reply n. Where it does, what both have in common is kept.
        Raises ConfigError for messages that the template refuses.
        """
        own = dict(sorted((replies or {}).items()))
        listed, tools = self._literal(messages), self._literal(tools)
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
            ids += self._encode(self._before_reply(segment), first=not place) + self._without_end(list(reply))
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

    def _before_reply(self, segment: str) -> str:
        return segment.removesuffix(self._joint) if self._joint else segment

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
