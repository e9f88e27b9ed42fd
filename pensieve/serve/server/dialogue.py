"""From what a client says to a turn of the right conversation: by its name, by a response, or by what was said before."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pensieve.core.request import Free, Sampling, text_of, tokens_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError
from pensieve.serve.server.api import Server
from pensieve.serve.server.conversations import Asked, Conversation, Mark, Message, message_keys, session_name
from pensieve.serve.server.turn import Turn

Tools = Sequence[Mapping[str, Any]]
_LEAST_SHARED = 32  # tokens: below, a conversation of its own computes them as fast as it would find them
_PLAIN_STOPS = ("\nUser:",)  # where a model without a template begins to speak for the user


@dataclass(frozen=True, slots=True)
class Wish:
    """How a reply is to be generated, and for how long its conversation is wanted. fits: as Turn's."""

    output: Free
    sampling: Sampling
    fits: bool = False
    keep_alive_s: float | None = None
    tools: Tools | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of Turn, such as on_event."""


class Dialogue:
    """The same conversation goes on where its last turn ended; from anywhere else, or while it is busy, another begins as it
    did (a fork). Nothing here waits; turns begin in the order of the calls."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._conversations = server.conversations
        self.template = server.template

    # -- chat -----------------------------------------------------------------------------------------------------------

    def chat(self, tenant: str, name: str | None, messages: list[Message], whole: bool | None, wish: Wish) -> Turn:
        """name: of the conversation; None: the one that began with these messages, or a new one. whole: the messages are the
        whole history; None: they are if the assistant speaks in them, or if they come without a name."""
        if name is None:
            return self._whole(tenant, messages, self._known(tenant, messages, wish), wish)
        if whole is None:
            whole = any(message.get("role") == "assistant" for message in messages)
        with self._conversations.lock:
            conversation = self._named(tenant, name)
            if whole:
                keys = message_keys(messages, wish.tools)
                said = message_keys(conversation.messages or (), wish.tools)
                same = next((i for i, pair in enumerate(zip(keys, said, strict=False)) if pair[0] != pair[1]), None)
                count = min(len(keys), len(said)) if same is None else same
                replies = {place: ids for place, ids in conversation.replies.items() if place < count}
                asked = self._asked(messages, replies, wish)
                return self._begin(self._unclaimed(conversation, asked), lambda _: asked, wish)
            return self._begin(conversation, lambda held: self._more(held, messages, wish), wish)

    def respond(
        self, tenant: str, previous: tuple[Conversation, Mark] | None, messages: list[Message], wish: Wish
    ) -> Turn:
        """previous: where to go on, messages being the whole history all the same; None: a new conversation."""
        known = None if previous is None else (*previous, previous[1].messages)
        return self._whole(tenant, messages, known, wish)

    def respond_with(
        self, conversation: Conversation, mark: Mark, messages: list[Message], replies: dict[int, list[int]], wish: Wish
    ) -> Turn:
        """Go on from a mark with messages whose replies are the caller's to tell."""
        return self._continue(conversation, mark, self._asked(messages, replies, wish), wish)

    def _known(self, tenant: str, messages: list[Message], wish: Wish) -> tuple[Conversation, Mark, int] | None:
        return self._conversations.by_messages(tenant, message_keys(messages, wish.tools))

    def _whole(
        self, tenant: str, messages: list[Message], known: tuple[Conversation, Mark, int] | None, wish: Wish
    ) -> Turn:
        if known is None:
            return self._nearest(tenant, self._asked(messages, {}, wish), wish)
        conversation, mark, count = known
        replies = {place: ids for place, ids in list(conversation.replies.items()) if place < count}
        return self._continue(conversation, mark, self._asked(messages, replies, wish), wish)

    def _asked(self, messages: list[Message], replies: dict[int, list[int]], wish: Wish) -> Asked:
        prompt = self.template.prompt(messages, replies, tools=wish.tools)
        return Asked(array("i", prompt.ids), messages, replies)

    def _more(self, held: Conversation, messages: list[Message], wish: Wish) -> Asked:
        """What the conversation holds, and new messages."""
        if held.messages is None and held.tokens:  # raw text so far
            if len(messages) != 1 or messages[0].get("role") != "user":
                raise ConfigError(
                    "This session holds raw text, so it takes one message of the user at a time, or a whole history."
                )
            following = self.template.following(str(messages[0]["content"]), held.tokens[-1])
            return Asked(held.tokens + array("i", following))
        return self._asked([*(held.messages or ()), *messages], dict(held.replies), wish)

    # -- text -----------------------------------------------------------------------------------------------------------

    def complete(self, tenant: str, name: str | None, prompt: str | Sequence[int], whole: bool, wish: Wish) -> Turn:
        """A prompt without roles. With a name it is appended to what the conversation holds, unless it is all of it."""
        begin = array("i", self._server.tokenizer.begin)
        if not isinstance(prompt, str):
            text, ids, begin = None, tokens_of(prompt, self._server.vocab), array("i")
        else:
            text, ids = prompt, array("i", self._server.tokenizer.encode(text_of(prompt, "prompt")))
        if name is not None:
            with self._conversations.lock:
                conversation = self._named(tenant, name)
                if whole:
                    asked = Asked(begin + ids)
                    return self._begin(self._unclaimed(conversation, asked), lambda _: asked, wish)
                return self._begin(conversation, lambda held: Asked((held.tokens or begin) + ids), wish)
        asked = Asked(begin + ids)
        return self._nearest(tenant, asked, wish, text)

    # -- where ----------------------------------------------------------------------------------------------------------

    def _named(self, tenant: str, name: str) -> Conversation:
        return self._conversations.find(tenant, session_name(name)) or self._conversations.open(tenant, name)

    def _unclaimed(self, conversation: Conversation, asked: Asked) -> Conversation:
        """The conversation, or in its place one that may be changed from where this prompt leaves it."""
        shared = common_prefix(conversation.tokens, asked.prompt)
        if conversation.idle and shared < conversation.claimed():
            return self._conversations.rename_fork(conversation, shared)
        return conversation

    def _continue(self, conversation: Conversation, mark: Mark, asked: Asked, wish: Wish) -> Turn:
        with self._conversations.lock:
            gone = self._conversations.find(conversation.tenant, conversation.id) is not conversation
            if gone:
                return self._begin(self._conversations.open(conversation.tenant), lambda _: asked, wish)
            last = bool(conversation.marks) and conversation.marks[-1] is mark
            shared = common_prefix(conversation.tokens, asked.prompt)
            if conversation.idle and last and shared >= conversation.claimed():
                return self._begin(conversation, lambda _: asked, wish)
            return self._begin(self._conversations.fork(conversation, shared), lambda _: asked, wish)

    def _nearest(self, tenant: str, asked: Asked, wish: Wish, text: str | None = None) -> Turn:
        """In the conversation that the prompt goes on from, a fork of the one that shares most with it, or a new one."""
        with self._conversations.lock:
            found = self._conversations.by_tokens(tenant, asked.prompt)
            if found is not None:
                conversation, shared = found
                held = conversation.tokens
                if text is not None and _LEAST_SHARED <= shared < len(held):
                    asked = self._as_held(conversation, text) or asked
                    shared = common_prefix(held, asked.prompt)
                if shared == len(held) and conversation.idle:
                    return self._begin(conversation, lambda _: asked, wish)
                if shared >= _LEAST_SHARED:
                    return self._begin(self._conversations.fork(conversation, shared), lambda _: asked, wish)
            return self._begin(self._conversations.open(tenant), lambda _: asked, wish)

    def _as_held(self, conversation: Conversation, text: str) -> Asked | None:
        """A text may begin with all that was said and still encode to other tokens: then those that were said are taken."""
        said = self._server.tokenizer.decode(conversation.tokens)
        if not said or not text.startswith(said):
            return None
        return Asked(conversation.tokens + array("i", self._server.tokenizer.encode(text[len(said) :])))

    def _begin(self, conversation: Conversation, ask: Callable[[Conversation], Asked], wish: Wish) -> Turn:
        if wish.keep_alive_s is not None:
            conversation.keep_alive_s = wish.keep_alive_s
        turn = self._server.turn(
            conversation, ask, wish.output, wish.sampling, tools=wish.tools, fits=wish.fits, **wish.options
        )
        self._server.begin(turn)
        return turn

    def stops(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """Of a chat: those of the client, and where the model would go on for the user."""
        return stops + _PLAIN_STOPS if self.template.plain else stops
