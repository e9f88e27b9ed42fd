"""Sessions of agents, as LMCache publishes them: JSON lines with the whole text of each call, and the reply."""

from __future__ import annotations

from pensieve.workload.formats.reading import Malformed, Reader, Row, text
from pensieve.workload.recording import Call, Conversation, Recording, Text

RULE = (
    "Calls with one session id are a conversation, the shortest input first, since each input goes on where an earlier "
    "one ended and the recorded times are unreliable (and not used). Every call carries its whole prompt; recorded "
    "replies are not part of later inputs."
)


def read(reader: Reader) -> Recording:
    """The path is one file, or a folder of them."""
    calls: dict[str, list[tuple[str, str]]] = {}
    for file in reader.files("*.jsonl"):
        for session, prompt, reply in reader.json_lines(_line, file):
            calls.setdefault(session, []).append((prompt, reply))
    return Recording(
        format="agent_jsonl",
        conversations=tuple(
            Conversation(
                f"agent-{session}",
                tuple(
                    Call(Text(prompt), Text(reply), continues=False)
                    for prompt, reply in sorted(each, key=lambda call: len(call[0]))
                ),
            )
            for session, each in calls.items()
        ),
        rule=RULE,
        malformed=reader.malformed,
        examples=tuple(reader.examples),
    )


def _line(row: Row) -> tuple[str, str, str]:
    prompt, reply = text(row, "input"), text(row, "output")
    if not prompt:
        raise Malformed("input is empty")
    return text(row, "session_id"), prompt, reply
