"""Conversations as texts: ShareGPT and UltraChat, OpenAI's messages, MT-Bench-101, and agents' sessions."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import AliasChoices, Field

from pensieve.core.session import common_prefix
from pensieve.lab.workload.formats.reading import Entry, Reader, Said
from pensieve.lab.workload.playback import Begun
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def _recording(
    found: Iterable[tuple[str, Sequence[Call]]], rule: str, empty: str = "", unnamed: str = "conversation.{}"
) -> Recording:
    """found: name and calls of each entry, in the order of the file. empty: the fact that counts entries without a call.
    unnamed: what the one at a place is called without a name of its own."""
    conversations: dict[str, Conversation] = {}
    left_out = 0
    for place, (name, calls) in enumerate(found):
        if not calls:
            left_out += 1
            continue
        again = f"{name}.{place}" if name else unnamed.format(place)
        unique = again if not name or name in conversations else name
        conversations[unique] = Conversation(unique, tuple(calls))
    return Recording(tuple(conversations.values()), rule, {empty: left_out} if empty else {})


# Messages: OpenAI's {role, content}, ShareGPT's {from, value}, or UltraChat's `data`, a list of texts that take turns.

MESSAGES_RULE = (
    "An entry is a conversation. A turn is a reply of the model and all messages since the reply before it: system, user and "
    "tool messages are its new text. Messages without a reply are left out, and so are replies that follow another one."
)


class _Message(Entry):
    role: str = Field(validation_alias=AliasChoices("from", "role"))
    content: str | list[dict[str, Any]] | None = Field(None, validation_alias=AliasChoices("value", "content"))
    tool_calls: list[Any] | None = None

    @property
    def said(self) -> str:
        """Its content, a text or parts of which those of text count, and the tools it calls. Raises ValueError."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
        if content is None and not self.tool_calls:
            raise ValueError("a message has no content")
        return "\n".join(filter(None, (content, json.dumps(self.tool_calls) if self.tool_calls else "")))


class Messages(Entry):
    name: str = Field("", validation_alias=AliasChoices("id", "prompt_id"))
    messages: list[_Message] | None = Field(None, validation_alias=AliasChoices("conversations", "messages"))
    data: list[str] | None = None

    def turns(self) -> Iterable[_Message]:
        """Raises ValueError."""
        if self.messages is None and self.data is None:
            raise ValueError("it has none of conversations, messages and data")
        taking = (
            _Message(role=("user", "assistant")[place % 2], content=one) for place, one in enumerate(self.data or ())
        )
        return taking if self.messages is None else self.messages


def messages(reader: Reader) -> Recording:
    def parse(row: Any) -> tuple[str, list[Call]]:
        talk, calls, asked = Messages.model_validate(row), [], list[str]()
        for message in talk.turns():
            if message.role.lower() not in MODELS:
                asked.append(message.said)
            elif asked:
                calls.append(Call(Text("\n".join(asked)), Text(message.said)))
                asked = []
        return talk.name, calls

    return _recording(reader.entries(parse), MESSAGES_RULE, "conversations_without_a_reply")


class _Turn(Entry):
    user: Said
    bot: str


class MTBench101(Entry):
    history: list[_Turn] = Field(min_length=1)


def mt_bench_101(reader: Reader) -> Recording:
    def parse(row: Any) -> tuple[str, list[Call]]:
        return "", [Call(Text(turn.user), Text(turn.bot)) for turn in MTBench101.model_validate(row).history]

    rule = "A line is a conversation, its turns in the order of its history."
    return _recording(reader.entries(parse), rule, unnamed="mt_bench_101-{}")


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
        for call in reader.entries(AgentCall.model_validate, file):
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
