"""Sessions of agents, as LMCache publishes them: JSON lines with the whole text of each call, and the reply."""

from __future__ import annotations

from pensieve.core.session import common_prefix
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, text
from pensieve.lab.workload.recording import Begun, Call, Conversation, Recording, Text

RULE = (
    "Calls with one session id are a session, the shortest input first. Recorded times are unreliable and not used. Each "
    "role in it, such as an agent and the model that plays its user, is a conversation of its own. A call continues the "
    "conversation with the earlier input that it shares the longest prefix with. If that is less than half of that input, "
    "the call begins another conversation, after a reply of the session's first one. Every call carries its whole prompt. "
    "Recorded replies are not part of later inputs."
)
CONTINUES = 0.5
"""Share of the best earlier input that a call has to begin with; less is another role's."""

Said = tuple[str, str]  # a call: its input and its reply


def read(reader: Reader) -> Recording:
    """The path is one file, or a folder of them."""
    calls: dict[str, list[Said]] = {}
    for file in reader.files("*.jsonl"):
        for session, prompt, reply in reader.json_lines(_line, file):
            calls.setdefault(session, []).append((prompt, reply))
    return reader.recording(
        format="agent_jsonl",
        conversations=tuple(one for session, each in calls.items() for one in _roles(f"agent-{session}", each)),
        rule=RULE,
        facts={"sessions_in_file": len(calls)},
    )


def _roles(session: str, calls: list[Said]) -> list[Conversation]:
    """The conversations of a session, the one with the shortest input first; it began the others."""
    roles: list[list[Said]] = []
    begun: list[Begun | None] = []
    earlier: list[tuple[str, int]] = []  # inputs, and whose they are
    for prompt, reply in sorted(calls, key=lambda call: len(call[0])):
        alike = [common_prefix(before, prompt) for before, _ in earlier]
        best = max(range(len(earlier)), key=lambda place: alike[place], default=None)
        if best is not None and alike[best] >= CONTINUES * len(earlier[best][0]):
            role = earlier[best][1]
        else:
            role = len(roles)
            begun.append(Begun(session, len(roles[0])) if roles else None)
            roles.append([])
        roles[role].append((prompt, reply))
        earlier.append((prompt, role))
    return [
        Conversation(
            f"{session}/{place}" if place else session,
            tuple(Call(Text(prompt), Text(reply), continues=False) for prompt, reply in role),
            begun[place],
        )
        for place, role in enumerate(roles)
    ]


def _line(row: Row) -> tuple[str, str, str]:
    prompt, reply = text(row, "input"), text(row, "output")
    if not prompt:
        raise Malformed("input is empty")
    return text(row, "session_id"), prompt, reply
