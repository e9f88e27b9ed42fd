"""From what a client says to a turn of the right conversation: by its name, by a response, or by what was said before."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from pensieve.core.request import text_of, tokens_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError
from pensieve.serve.server.api import Server
from pensieve.serve.server.conversations import Asked, Conversation, Mark, Message, message_keys, session_name
from pensieve.serve.server.turn import Turn

_LEAST_SHARED = 32  # tokens: below, a conversation of its own computes them as fast as it would find them
_PLAIN_STOPS = ("\nUser:",)  # where a model without a template begins to speak for the user


class Dialogue:
    """The same conversation goes on where its last turn ended; from anywhere else, or while it is busy, another begins as it
    did (a fork). Nothing here waits; turns begin in the order of the calls."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._conversations = server.conversations
        self.template = server.template

    # -- chat -----------------------------------------------------------------------------------------------------------

    def chat(
        self, turn: Turn, tenant: str, name: str | None, messages: list[Message], whole: bool | None = None
    ) -> None:
        """name: of the conversation; None: the one that began with these messages, or a new one. whole: the messages are the
        whole history; None: they are if the assistant speaks in them, or if they come without a name."""
        if name is None:
            known = self._conversations.by_messages(tenant, message_keys(messages, turn.tools))
            if known is None:
                self._nearest(turn, tenant, self._asked(turn, messages, {}))
            else:
                self.go_on(turn, *known[:2], messages, known[0].first_replies(known[2]))
            return
        if whole is None:
            whole = any(message.get("role") == "assistant" for message in messages)
        with self._conversations.lock:
            conversation = self._named(tenant, name)
            if whole:
                keys, said = (message_keys(all_, turn.tools) for all_ in (messages, conversation.messages or ()))
                same = next((i for i, pair in enumerate(zip(keys, said, strict=False)) if pair[0] != pair[1]), None)
                count = min(len(keys), len(said)) if same is None else same
                asked = self._asked(turn, messages, conversation.first_replies(count))
                self._begin(turn, self._unclaimed(conversation, asked), asked)
            else:
                self._begin(turn, conversation, lambda held: self._more(turn, held, messages))

    def go_on(
        self, turn: Turn, conversation: Conversation, mark: Mark, messages: list[Message], replies: dict[int, list[int]]
    ) -> None:
        """Go on from a mark with these messages, the whole history; replies: the model's own tokens of some of them."""
        asked = self._asked(turn, messages, replies)
        with self._conversations.lock:
            if self._conversations.find(conversation.tenant, conversation.id) is not conversation:  # it is gone
                self._begin(turn, self._conversations.open(conversation.tenant), asked)
                return
            last = bool(conversation.marks) and conversation.marks[-1] is mark
            shared = common_prefix(conversation.tokens, asked.prompt)
            if not (conversation.idle and last and shared >= conversation.claimed()):
                conversation = self._conversations.fork(conversation, shared)
            self._begin(turn, conversation, asked)

    def _asked(self, turn: Turn, messages: list[Message], replies: dict[int, list[int]]) -> Asked:
        return Asked(array("i", self.template.prompt(messages, replies, turn.tools)), messages, replies)

    def _more(self, turn: Turn, held: Conversation, messages: list[Message]) -> Asked:
        """What the conversation holds, and new messages."""
        if held.messages is None and held.tokens:  # raw text so far
            if len(messages) != 1 or messages[0].get("role") != "user":
                raise ConfigError(
                    "This session holds raw text, so it takes one message of the user at a time, or a whole history."
                )
            following = self.template.following(str(messages[0]["content"]), held.tokens[-1])
            return Asked(held.tokens + array("i", following))
        return self._asked(turn, [*(held.messages or ()), *messages], dict(held.replies))

    # -- text -----------------------------------------------------------------------------------------------------------

    def complete(self, turn: Turn, tenant: str, name: str | None, prompt: str | Sequence[int], whole: bool) -> None:
        """A prompt without roles. With a name it is appended to what the conversation holds, unless it is all of it."""
        if isinstance(prompt, str):
            begin = array("i", self._server.tokenizer.begin)
            ids = array("i", self._server.tokenizer.encode(text_of(prompt, "prompt")))
        else:
            begin, ids = array("i"), tokens_of(prompt, self._server.vocab)
        asked = Asked(begin + ids)
        if name is None:
            self._nearest(turn, tenant, asked, prompt if isinstance(prompt, str) else None)
            return
        with self._conversations.lock:
            conversation = self._named(tenant, name)
            if whole:
                self._begin(turn, self._unclaimed(conversation, asked), asked)
            else:
                self._begin(turn, conversation, lambda held: Asked((held.tokens or begin) + ids))

    # -- where ----------------------------------------------------------------------------------------------------------

    def _named(self, tenant: str, name: str) -> Conversation:
        return self._conversations.find(tenant, session_name(name)) or self._conversations.open(tenant, name)

    def _unclaimed(self, conversation: Conversation, asked: Asked) -> Conversation:
        """The conversation, or in its place one that may be changed from where this prompt leaves it."""
        shared = common_prefix(conversation.tokens, asked.prompt)
        if conversation.idle and shared < conversation.claimed():
            return self._conversations.rename_fork(conversation, shared)
        return conversation

    def _nearest(self, turn: Turn, tenant: str, asked: Asked, text: str | None = None) -> None:
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
                    self._begin(turn, conversation, asked)
                    return
                if shared >= _LEAST_SHARED:
                    self._begin(turn, self._conversations.fork(conversation, shared), asked)
                    return
            self._begin(turn, self._conversations.open(tenant), asked)

    def _as_held(self, conversation: Conversation, text: str) -> Asked | None:
        """A text may begin with all that was said and still encode to other tokens: then those that were said are taken."""
        said = self._server.tokenizer.decode(conversation.tokens)
        if not said or not text.startswith(said):
            return None
        return Asked(conversation.tokens + array("i", self._server.tokenizer.encode(text[len(said) :])))

    def _begin(self, turn: Turn, conversation: Conversation, ask: Asked | Callable[[Conversation], Asked]) -> None:
        turn.ask = ask
        turn.begin(conversation)

    def stops(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """Of a chat: those of the client, and where the model would go on for the user."""
        return stops + _PLAIN_STOPS if self.template.plain else stops
