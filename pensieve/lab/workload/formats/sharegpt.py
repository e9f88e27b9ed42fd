"""ShareGPT and UltraChat: conversations as lists of messages, in a JSON list or one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, whole
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

USERS = ("human", "user")
MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
RULE = (
    "A turn is a person's message and the model's answer right after it. What comes before the first such pair, or after "
    "the first break of the alternation, is left out. So are conversations without a pair."
)


def read(reader: Reader) -> Recording:
    return recording(reader, reader.json_list(parse))


def recording(reader: Reader, found: Iterable[tuple[str, tuple[Call, ...]]]) -> Recording:
    """A Recording of what `parse` found in each entry, in the order of the file."""
    conversations: list[Conversation] = []
    empty = 0
    names: set[str] = set()
    for index, (name, calls) in enumerate(found):
        if not calls:
            empty += 1
            continue
        unique = name if name and name not in names else f"{name or 'conversation'}.{index}"
        names.add(unique)
        conversations.append(Conversation(unique, calls))
    return Recording(
        format="sharegpt",
        conversations=tuple(conversations),
        rule=RULE,
        malformed=reader.malformed,
        examples=tuple(reader.examples),
        facts={"conversations_without_a_pair": empty},
    )


def parse(entry: Row, counted: str | None = None) -> tuple[str, tuple[Call, ...]]:
    """Name and turns of one entry: `conversations` of {from, value}, `messages` of {role, content}, or `data`, a list of
    texts that take turns. counted: the field with an answer's length in tokens, if it is to be used. Raises Malformed.
    """
    return str(entry.get("id", entry.get("prompt_id", ""))), tuple(_pairs(_messages(entry, counted)))


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    text: str
    tokens: int | None = None


def _messages(entry: Row, counted: str | None) -> list[_Message]:
    for field, role, value in (("conversations", "from", "value"), ("messages", "role", "content")):
        if field in entry:
            return [_message(message, role, value, counted) for message in _list(entry, field)]
    if "data" in entry:
        texts = _list(entry, "data")
        if not all(isinstance(one, str) for one in texts):
            raise Malformed("data is not a list of texts")
        return [_Message((USERS, MODELS)[index % 2][0], one) for index, one in enumerate(texts)]
    raise Malformed("it has none of conversations, messages and data")


def _message(message: Any, role: str, value: str, counted: str | None) -> _Message:
    if not isinstance(message, Mapping) or not isinstance(message.get(role), str):
        raise Malformed(f"a message has no {role}")
    if not isinstance(message.get(value), str):
        raise Malformed(f"a message has no {value}")
    tokens = whole(message, counted, 1) if counted is not None and counted in message else None
    return _Message(str(message[role]).lower(), str(message[value]), tokens)


def _list(entry: Row, field: str) -> list[Any]:
    value = entry[field]
    if not isinstance(value, list):
        raise Malformed(f"{field} is not a list")
    return value


def _pairs(messages: list[_Message]) -> Iterable[Call]:
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
