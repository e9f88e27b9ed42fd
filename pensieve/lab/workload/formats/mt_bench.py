"""MT-Bench: `question.jsonl`, JSON lines with an id, a category and a list of turns; it has questions and no answers."""

from __future__ import annotations

from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, whole
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

RULE = (
    "A line is a conversation, each of its turns a message. It has no replies: they are workload.max_new_tokens long."
)


def read(reader: Reader) -> Recording:
    conversations: dict[str, Conversation] = {}
    for place, (name, calls) in enumerate(reader.json_lines(_question)):
        unique = f"mt_bench-{name}" if f"mt_bench-{name}" not in conversations else f"mt_bench-{name}.{place}"
        conversations[unique] = Conversation(unique, calls)
    return Recording(
        format="mt_bench",
        conversations=tuple(conversations.values()),
        rule=RULE,
        malformed=reader.malformed,
        examples=tuple(reader.examples),
    )


def _question(row: Row) -> tuple[int, tuple[Call, ...]]:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) and one.strip() for one in turns):
        raise Malformed("turns is not a list of texts")
    return whole(row, "question_id"), tuple(Call(Text(one), None) for one in turns)
