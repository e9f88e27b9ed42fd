"""MT-Bench-101: JSON lines with the task, an id and a history of messages and answers."""

from __future__ import annotations

from collections.abc import Mapping

from pensieve.lab.workload.formats.reading import Malformed, Reader, Row
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

RULE = "A line is a conversation, its turns in the order of its history."


def read(reader: Reader) -> Recording:
    return Recording(
        format="mt_bench_101",
        conversations=tuple(
            Conversation(f"mt_bench_101-{index}", calls) for index, calls in enumerate(reader.json_lines(_calls))
        ),
        rule=RULE,
        malformed=reader.malformed,
        examples=tuple(reader.examples),
    )


def _calls(row: Row) -> tuple[Call, ...]:
    history = row.get("history")
    if not isinstance(history, list) or not history:
        raise Malformed("history is not a list of turns")
    return tuple(_call(turn) for turn in history)


def _call(turn: object) -> Call:
    user, bot = (turn.get("user"), turn.get("bot")) if isinstance(turn, Mapping) else (None, None)
    if not isinstance(user, str) or not isinstance(bot, str) or not user:
        raise Malformed("a turn of its history has no user and bot")
    return Call(Text(user), Text(bot))
