"""English: the conversations that ship with the package, and text of an exact length in tokens, drawn by name from their
words, for workloads that measure lengths and do not care what is said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from pensieve.core.request import TokenArray, tokens_of
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.chance import uniform


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


def prose(
    context: WorkloadContext, tokens: int, *names: object, unlike: TokenArray[int] | None = None
) -> TokenArray[int]:
    """Exactly `tokens` tokens of English words, a function of the seed and the names.

    unlike: tokens; the text begins with another one than they do, so that the two share no prefix. Text rather than
    random ids, so that an engine that takes text gets the same prompt.
    """
    assert tokens > 0
    words, found, drawn = vocabulary(), tokens_of([]), 0
    while len(found) < tokens:
        batch = [
            words[int(uniform(context.seed, *names, drawn + place) * len(words))] for place in range(tokens // 4 + 8)
        ]
        drawn += len(batch)
        encoded = context.encode((" " if found else "") + " ".join(batch))
        if not found and unlike is not None and encoded[0] == unlike[0]:
            continue  # other words
        found.extend(encoded)
    return found[:tokens]


@cache
def vocabulary() -> tuple[str, ...]:
    """The words of the shipped conversations, each once, in alphabetical order."""
    words = {word.strip(".,;:?!()'\"").lower() for one in shipped() for turn in one.turns for word in turn.user.split()}
    return tuple(sorted(word for word in words if word.isalpha()))
