"""Text of an exact length in tokens, drawn by name: for workloads that measure lengths and do not care what is said."""

from __future__ import annotations

from functools import cache

from pensieve.core.request import TokenArray, tokens_of
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.chance import uniform
from pensieve.lab.workload.conversations import shipped


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
