"""Conversations in OpenAI's form: JSON lines (or one JSON list) with `messages` of a role and a content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pensieve.lab.workload.formats import sharegpt
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

RULE = (
    "A line is a conversation. A turn is a reply of the assistant and all messages since the reply before it: system, user "
    "and tool messages are its new text. Messages without a reply are left out."
)


def read(reader: Reader) -> Recording:
    found: dict[str, Conversation] = {}
    empty = 0
    for index, (name, calls) in enumerate(reader.json_list(_conversation)):
        if not calls:
            empty += 1
            continue
        unique = name if name and name not in found else f"{name or 'conversation'}.{index}"
        found[unique] = Conversation(unique, calls)
    return Recording(
        format="openai_jsonl",
        conversations=tuple(found.values()),
        rule=RULE,
        malformed=reader.malformed,
        examples=tuple(reader.examples),
        facts={"conversations_without_a_reply": empty},
    )


def _conversation(row: Row) -> tuple[str, tuple[Call, ...]]:
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise Malformed("messages is not a list")
    return str(row.get("id", "")), tuple(_turns(messages))


def _turns(messages: list[Any]) -> Iterator[Call]:
    asked: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Malformed("a message has no role")
        said = _text(message)
        if message["role"].lower() not in sharegpt.MODELS:
            asked.append(said)
        elif asked:
            yield Call(Text("\n".join(asked)), Text(said))
            asked = []


def _text(message: Mapping[str, Any]) -> str:
    """What a message says: its content, a text or a list of parts of which those of text count, and the tools it calls."""
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str) and not calls:
        raise Malformed("a message has no content")
    return "\n".join(filter(None, (content, json.dumps(calls) if calls else "")))
