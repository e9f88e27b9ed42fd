"""Azure's LLM inference traces: CSV with a time and two lengths. There are no sessions in it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, text, whole
from pensieve.lab.workload.recording import Call, Conversation, Count, Recording

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RULE = "Every request is a conversation of its own with its whole prompt; no two prompts share anything."

_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?")


def read(reader: Reader) -> Recording:
    rows = sorted(reader.csv_rows(COLUMNS, _row), key=lambda row: row[0])
    first = rows[0][0] if rows else 0.0
    return reader.recording(
        format="azure",
        conversations=tuple(
            Conversation(f"azure-{index}", (Call(Count(prompt), reply, at - first, continues=False, order=index),))
            for index, (at, prompt, reply) in enumerate(rows)
        ),
        rule=RULE,
    )


def _row(row: Row) -> tuple[float, int, int]:
    return seconds(text(row, "TIMESTAMP")), whole(row, "ContextTokens", 1), whole(row, "GeneratedTokens")


def seconds(stamp: str) -> float:
    """Of a time such as 2023-11-16 18:15:46.6805900, with any number of decimals. Raises Malformed."""
    found = _TIME.match(stamp)
    if not found:
        raise Malformed(f"TIMESTAMP={stamp!r} is not a time")
    try:
        base = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise Malformed(f"TIMESTAMP={stamp!r} is not a time ({error})") from None
    return base + float(found[2] or 0)
