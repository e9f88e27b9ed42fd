"""Conversations as texts: ShareGPT and UltraChat, OpenAI's messages, LMBenchmark, MT-Bench, and agents' sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pensieve.core.session import common_prefix
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, text, whole
from pensieve.lab.workload.recording import Begun, Call, Conversation, Recording, Text

USERS = ("human", "user")
MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
_KEY = 32  # leading characters by which prompts that may continue each other are found

Named = tuple[str, tuple[Call, ...]]  # a conversation's name, empty where it has none, and its calls


@dataclass(frozen=True, slots=True)
class Kind:
    """A format of which each entry is a conversation. unnamed: what the entry at a place is called without a name of its
    own. empty: the fact that counts entries without a turn."""

    parse: Callable[[Row], Named]
    rule: str
    empty: str = ""
    unnamed: str = "conversation.{}"

    def read(self, reader: Reader) -> Recording:
        """A JSON list of entries, or one a line."""
        return self.recording(reader.entries(self.parse))

    def recording(self, found: Iterable[Named]) -> Recording:
        """What `parse` found in each entry, in the order of the file."""
        conversations: dict[str, Conversation] = {}
        empty = 0
        for place, (name, calls) in enumerate(found):
            if not calls:
                empty += 1
                continue
            again = f"{name}.{place}" if name else self.unnamed.format(place)
            unique = again if not name or name in conversations else name
            conversations[unique] = Conversation(unique, calls)
        return Recording(tuple(conversations.values()), self.rule, {self.empty: empty} if self.empty else {})


def sharegpt(entry: Row, counted: str | None = None) -> Named:
    """`conversations` of {from, value}, `messages` of {role, content}, or `data`, a list of texts that take turns. counted:
    the field with an answer's length in tokens, if it is to be used. Raises Malformed."""
    return str(entry.get("id", entry.get("prompt_id", ""))), tuple(_pairs(_messages(entry, counted)))


def openai_jsonl(entry: Row) -> Named:
    return str(entry.get("id", "")), tuple(_replies(_list(entry, "messages")))


def mt_bench(entry: Row) -> Named:
    turns = entry.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) and one.strip() for one in turns):
        raise Malformed("turns is not a list of texts")
    return f"mt_bench-{whole(entry, 'question_id')}", tuple(Call(Text(one), None) for one in turns)


def mt_bench_101(entry: Row) -> Named:
    history = entry.get("history")
    if not isinstance(history, list) or not history:
        raise Malformed("history is not a list of turns")
    said = [(turn.get("user"), turn.get("bot")) if isinstance(turn, Mapping) else (None, None) for turn in history]
    if not all(isinstance(user, str) and isinstance(bot, str) and user for user, bot in said):
        raise Malformed("a turn of its history has no user and bot")
    return "", tuple(Call(Text(str(user)), Text(str(bot))) for user, bot in said)


OPENAI = Kind(
    openai_jsonl,
    "A line is a conversation. A turn is a reply of the assistant and all messages since the reply before it: system, user "
    "and tool messages are its new text. Messages without a reply are left out.",
    "conversations_without_a_reply",
)
SHAREGPT = Kind(
    sharegpt,
    "A turn is a person's message and the model's answer right after it. What comes before the first such pair, or after the "
    "first break of the alternation, is left out. So are conversations without a pair.",
    "conversations_without_a_pair",
)
MT_BENCH = Kind(
    mt_bench,
    "A line is a conversation, each of its turns a message. It has no replies: they are workload.max_new_tokens long.",
)
MT_BENCH_101 = Kind(
    mt_bench_101, "A line is a conversation, its turns in the order of its history.", unnamed="mt_bench_101-{}"
)
LMBENCHMARK = (
    "An entry with `conversations` is one, as in ShareGPT; its answers have `num_tokens` tokens where that is given. An "
    "entry with `input` is a request with its whole prompt. It continues the conversation whose last prompt is its prefix, "
    "the longest of several, and otherwise opens one."
)


def lmbenchmark(reader: Reader) -> Recording:
    entries = list(reader.entries(_lmbenchmark))
    talks = SHAREGPT.recording(talk for prompt, talk in entries if prompt is None)
    prompts: list[list[tuple[str, Call]]] = []
    begun: dict[str, list[list[tuple[str, Call]]]] = {}  # conversations by how their first prompt begins
    for prompt, (_, calls) in entries:
        if prompt is None:
            continue
        keys = {prompt[:length] for length in range(1, _KEY + 1)}  # a short prompt is all of its key
        alike = [one for key in keys for one in begun.get(key, ())]
        before = [one for one in alike if len(prompt) > len(one[-1][0]) and prompt.startswith(one[-1][0])]
        if before:
            max(before, key=lambda one: len(one[-1][0])).append((prompt, calls[0]))
        else:
            prompts.append([(prompt, calls[0])])
            begun.setdefault(prompt[:_KEY], []).append(prompts[-1])
    asked = tuple(Conversation(f"prompt-{place}", tuple(call for _, call in one)) for place, one in enumerate(prompts))
    return replace(talks, rule=LMBENCHMARK, conversations=talks.conversations + asked)


def _lmbenchmark(entry: Row) -> tuple[str | None, Named]:
    """The whole prompt of an entry that is one."""
    if "input" not in entry:
        return None, sharegpt(entry, counted="num_tokens")
    prompt = text(entry, "input")
    if not prompt:
        raise Malformed("input is empty")
    return prompt, ("", (Call(Text(prompt), max(1, whole(entry, "output_length")), continues=False),))


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    text: str
    tokens: int | None = None


def _messages(entry: Row, counted: str | None) -> list[_Message]:
    for field, role, value in (("conversations", "from", "value"), ("messages", "role", "content")):
        if field in entry:
            return [_message(message, role, value, counted) for message in _list(entry, field)]
    if "data" not in entry:
        raise Malformed("it has none of conversations, messages and data")
    texts = _list(entry, "data")
    if not all(isinstance(one, str) for one in texts):
        raise Malformed("data is not a list of texts")
    return [_Message((USERS, MODELS)[index % 2][0], one) for index, one in enumerate(texts)]


def _message(message: Any, role: str, value: str, counted: str | None) -> _Message:
    for name in (role, value):
        if not isinstance(message, Mapping) or not isinstance(message.get(name), str):
            raise Malformed(f"a message has no {name}")
    tokens = whole(message, counted, 1) if counted is not None and counted in message else None
    return _Message(message[role].lower(), message[value], tokens)


def _list(entry: Row, field: str) -> list[Any]:
    value = entry.get(field)
    if not isinstance(value, list):
        raise Malformed(f"{field} is not a list")
    return value


def _pairs(messages: list[_Message]) -> Iterator[Call]:
    place = 0
    while place + 1 < len(messages) and not _is_pair(messages, place):
        place += 1
    while place + 1 < len(messages) and _is_pair(messages, place):
        question, answer = messages[place], messages[place + 1]
        yield Call(Text(question.text), Text(answer.text) if answer.tokens is None else answer.tokens)
        place += 2


def _is_pair(messages: list[_Message], place: int) -> bool:
    question, answer = messages[place], messages[place + 1]
    return question.role in USERS and answer.role in MODELS and bool(question.text.strip() and answer.text.strip())


def _replies(messages: list[Any]) -> Iterator[Call]:
    asked: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Malformed("a message has no role")
        said = _said(message)
        if message["role"].lower() not in MODELS:
            asked.append(said)
        elif asked:
            yield Call(Text("\n".join(asked)), Text(said))
            asked = []


def _said(message: Mapping[str, Any]) -> str:
    """What a message says: its content, a text or a list of parts of which those of text count, and the tools it calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str) and not calls:
        raise Malformed("a message has no content")
    return "\n".join(filter(None, (content, json.dumps(calls) if calls else "")))


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

Said = tuple[str, str]  # a call: its input and its reply


def agents(reader: Reader) -> Recording:
    """The path is one file, or a folder of them."""
    calls: dict[str, list[Said]] = {}
    for file in reader.files("*.jsonl"):
        for session, prompt, reply in reader.entries(_agent_line, file):
            calls.setdefault(session, []).append((prompt, reply))
    conversations = tuple(one for session, each in calls.items() for one in _roles(f"agent-{session}", each))
    return Recording(conversations, AGENTS, {"sessions_in_file": len(calls)})


def _roles(session: str, calls: list[Said]) -> list[Conversation]:
    """The conversations of a session, the one with the shortest input first; it began the others."""
    roles: list[list[Said]] = []
    begun: list[Begun | None] = []
    earlier: list[tuple[str, int]] = []  # inputs, and whose they are
    for prompt, reply in sorted(calls, key=lambda call: len(call[0])):
        alike = [common_prefix(before, prompt) for before, _ in earlier]
        best = max(range(len(earlier)), key=lambda place: alike[place], default=None)
        if best is not None and alike[best] >= CONTINUES * len(earlier[best][0]):
            role = earlier[best][1]
        else:
            role = len(roles)
            begun.append(Begun(session, len(roles[0])) if roles else None)
            roles.append([])
        roles[role].append((prompt, reply))
        earlier.append((prompt, role))
    return [
        Conversation(
            f"{session}/{place}" if place else session,
            tuple(Call(Text(prompt), Text(reply), continues=False) for prompt, reply in role),
            begun[place],
        )
        for place, role in enumerate(roles)
    ]


def _agent_line(row: Row) -> tuple[str, str, str]:
    prompt, reply = text(row, "input"), text(row, "output")
    if not prompt:
        raise Malformed("input is empty")
    return text(row, "session_id"), prompt, reply
