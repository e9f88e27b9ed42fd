"""BurstGPT: CSV with a time in seconds, two lengths, and in its later releases a session."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.lab.workload.formats.reading import Reader, Row, number, whole
from pensieve.lab.workload.recording import Call, Conversation, Count, Recording

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSIONS = ("Session ID", "SessionID")
RULE = (
    "Rows with one session id are a conversation, as long as each request has room for all that was said before. The new "
    "message is its tokens less the earlier request and response. A shorter request opens another conversation. "
    "Rows without a session id stand alone. Rows whose response has no tokens failed when recorded and are left out."
)


@dataclass(frozen=True, slots=True)
class _Row:
    at_s: float
    session: str
    request: int
    response: int


def read(reader: Reader) -> Recording:
    found = sorted(reader.csv_rows(COLUMNS, _row), key=lambda row: row.at_s)
    rows = [row for row in found if row.response > 0]
    first = rows[0].at_s if rows else 0.0
    calls: dict[str, list[Call]] = {}
    latest: dict[str, tuple[str, int]] = {}  # of a session: its present conversation, and the tokens said in it
    for index, row in enumerate(rows):
        name, said = latest.get(row.session, ("", 0)) if row.session else ("", 0)
        if not name or row.request <= said:
            name, said = f"burstgpt-{index}", 0
            calls[name] = []
        calls[name].append(Call(Count(row.request - said), row.response, row.at_s - first, order=index))
        latest[row.session] = (name, row.request + row.response)
    return reader.recording(
        format="burstgpt",
        conversations=tuple(Conversation(name, tuple(each)) for name, each in calls.items()),
        rule=RULE,
        facts={"requests_without_response": len(found) - len(rows)},
    )


def _row(row: Row) -> _Row:
    session = next((str(row[name]).strip() for name in SESSIONS if name in row), "")
    return _Row(number(row, "Timestamp"), session, whole(row, "Request tokens", 1), whole(row, "Response tokens"))
