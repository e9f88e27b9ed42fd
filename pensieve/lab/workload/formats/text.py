"""Conversations as texts: ShareGPT and UltraChat, OpenAI's messages, MT-Bench-101, and agents' sessions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import AliasChoices, Field

from pensieve.core.session import common_prefix
from pensieve.lab.workload.formats.reading import Entry, Reader, Said
from pensieve.lab.workload.playback import Begun
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

USERS = ("human", "user")
MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


class Talk(Entry):
    """An entry that is a conversation. unnamed: what the one at a place is called without a name of its own. empty: the fact
    that counts entries without a turn."""

    rule: ClassVar[str]
    empty: ClassVar[str] = ""
    unnamed: ClassVar[str] = "conversation.{}"

    name: str = Field("", validation_alias=AliasChoices("id", "prompt_id"))

    def calls(self) -> Iterable[Call]:
        """Raises ValueError."""
        raise NotImplementedError

    @classmethod
    def read(cls, reader: Reader) -> Recording:
        return cls.recording(reader.entries(cls.named))

    @classmethod
    def named(cls, row: Any) -> tuple[str, tuple[Call, ...]]:
        entry = cls.of(row)
        return entry.name, tuple(entry.calls())

    @classmethod
    def recording(cls, found: Iterable[tuple[str, tuple[Call, ...]]]) -> Recording:
        """What `named` found in each entry, in the order of the file."""
        conversations: dict[str, Conversation] = {}
        empty = 0
        for place, (name, calls) in enumerate(found):
            if not calls:
                empty += 1
                continue
            again = f"{name}.{place}" if name else cls.unnamed.format(place)
            unique = again if not name or name in conversations else name
            conversations[unique] = Conversation(unique, calls)
        return Recording(tuple(conversations.values()), cls.rule, {cls.empty: empty} if cls.empty else {})


class _Message(Entry):
    role: str = Field(validation_alias=AliasChoices("from", "role"))
    text: str = Field(validation_alias=AliasChoices("value", "content"))

    def answered_by(self, answer: _Message) -> bool:
        asked = self.role.lower() in USERS and answer.role.lower() in MODELS
        return asked and bool(self.text.strip() and answer.text.strip())


class ShareGPT(Talk):
    """Messages of {from, value} or {role, content}, or `data`, a list of texts that take turns."""

    rule = (
        "A turn is a person's message and the model's answer right after it. What comes before the first such pair, or after "
        "the first break of the alternation, is left out. So are conversations without a pair."
    )
    empty = "conversations_without_a_pair"

    messages: list[_Message] | None = Field(None, validation_alias=AliasChoices("conversations", "messages"))
    data: list[str] | None = None

    def calls(self) -> Iterator[Call]:
        messages = self.messages
        if messages is None:
            if self.data is None:
                raise ValueError("it has none of conversations, messages and data")
            roles = (USERS[0], MODELS[0])
            messages = [_Message(role=roles[place % 2], text=text) for place, text in enumerate(self.data)]
        pairs = list(pairwise(messages))
        place = next((at for at, (asked, answer) in enumerate(pairs) if asked.answered_by(answer)), len(pairs))
        while place < len(pairs) and pairs[place][0].answered_by(pairs[place][1]):
            asked, answer = pairs[place]
            yield Call(Text(asked.text), Text(answer.text))
            place += 2


class _Spoken(Entry):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None

    @property
    def said(self) -> str:
        """Its content, a text or parts of which those of text count, and the tools it calls."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
        if content is None and not self.tool_calls:
            raise ValueError("a message has no content")
        return "\n".join(filter(None, (content, json.dumps(self.tool_calls) if self.tool_calls else "")))


class OpenAI(Talk):
    rule = (
        "A line is a conversation. A turn is a reply of the assistant and all messages since the reply before it: system, "
        "user and tool messages are its new text. Messages without a reply are left out."
    )
    empty = "conversations_without_a_reply"

    messages: list[_Spoken]

    def calls(self) -> Iterator[Call]:
        asked: list[str] = []
        for message in self.messages:
            if message.role.lower() not in MODELS:
                asked.append(message.said)
            elif asked:
                yield Call(Text("\n".join(asked)), Text(message.said))
                asked = []


class _Turn(Entry):
    user: Said
    bot: str


class MTBench101(Talk):
    rule = "A line is a conversation, its turns in the order of its history."
    unnamed = "mt_bench_101-{}"

    name: str = ""
    history: list[_Turn] = Field(min_length=1)

    def calls(self) -> Iterator[Call]:
        return (Call(Text(turn.user), Text(turn.bot)) for turn in self.history)


# Sessions of agents, as LMCache publishes them: JSON lines with the whole text of each call, and the reply.

AGENTS = (
    "Calls with one session id are a session, the shortest input first. Recorded times are unreliable and not used. Each "
    "role in it, such as an agent and the model that plays its user, is a conversation of its own. A call continues the "
    "conversation with the earlier input that it shares the longest prefix with. If that is less than half of that input, "
    "the call begins another conversation, after a reply of the session's first one. Every call carries its whole prompt. "
    "Recorded replies are not part of later inputs."
)
CONTINUES = 0.5
"""Share of the best earlier input that a call has to begin with; less is another role's."""


class AgentCall(Entry):
    session_id: str
    input: Said
    output: str


def agents(reader: Reader) -> Recording:
    """The path is one file, or a folder of them."""
    calls: dict[str, list[AgentCall]] = {}
    for file in reader.files("*.jsonl"):
        for call in reader.entries(AgentCall.of, file):
            calls.setdefault(call.session_id, []).append(call)
    conversations = tuple(one for session, each in calls.items() for one in _roles(f"agent-{session}", each))
    return Recording(conversations, AGENTS, {"sessions_in_file": len(calls)})


def _roles(session: str, calls: list[AgentCall]) -> list[Conversation]:
    """The conversations of a session, the one with the shortest input first; it began the others."""
    roles: list[list[AgentCall]] = []
    begun: list[Begun | None] = []
    earlier: list[tuple[str, int]] = []  # inputs, and whose they are
    for call in sorted(calls, key=lambda call: len(call.input)):
        alike = [common_prefix(before, call.input) for before, _ in earlier]
        best = max(range(len(earlier)), key=lambda place: alike[place], default=None)
        if best is not None and alike[best] >= CONTINUES * len(earlier[best][0]):
            role = earlier[best][1]
        else:
            role = len(roles)
            begun.append(Begun(session, len(roles[0])) if roles else None)
            roles.append([])
        roles[role].append(call)
        earlier.append((call.input, role))
    return [
        Conversation(
            f"{session}/{place}" if place else session,
            tuple(Call(Text(call.input), Text(call.output), continues=False) for call in role),
            begun[place],
        )
        for place, role in enumerate(roles)
    ]
