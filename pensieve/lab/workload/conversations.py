"""The conversations that ship with the package: what people ask, turn after turn, in English."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Turn:
    """reply_words: how long an answer to this message would reasonably be, in words."""

    user: str
    reply_words: int


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    title: str
    turns: tuple[Turn, ...]


@cache
def shipped() -> tuple[Conversation, ...]:
    """All of conversations.jsonl, in its order; only the user's side, since replies come from the model that runs."""
    text = (resources.files("pensieve.lab.workload") / "conversations.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return tuple(Conversation(row["id"], row["title"], tuple(Turn(**turn) for turn in row["turns"])) for row in rows)
