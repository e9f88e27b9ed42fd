"""WEKA's sessions of coding agents: a JSON file each, with times, lengths, and a hash for each 64 tokens of a prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pensieve.core.request import Hint, StopReason
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, hash_list, number, text, whole
from pensieve.lab.workload.recording import Begun, Blocks, Call, Conversation, Recording, hashes_of

RULE = (
    "A file is a session. Each sub-agent in it is a conversation of its own, begun by the request before it. Every request "
    "carries its whole prompt. Equal block hashes of one file give equal tokens, across its sub-agents too. Later prompts "
    "hold the trace's blocks, not our replies nor the tokens behind the last full block. Sessions with as many tokens of "
    "tool definitions share the blocks that lead their first prompts. Those with as many tokens of the system prompt, too, "
    "share its blocks. A pause is the recorded think time. If the request before has no api_time, the pause is the time "
    "between the two requests. A sub-agent's `t` is when it ended: it began `duration_ms` before, and the request after it "
    "waited for it."
)
SUB_AGENT = "subagent"
SESSION_IDS = 2**24
"""Block ids that one file may use."""


@dataclass(slots=True)
class _Open:
    """A conversation that is being read. ends_s: of each reply, by the clock of the conversation. timed: whether the last
    one's is known. joining: sub-agents that ended since, and when the last of them did."""

    name: str
    calls: list[Call] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    at_s: float = 0.0
    timed: bool = False
    joining: list[str] = field(default_factory=list)
    joined_s: float = 0.0


def read(reader: Reader) -> Recording:
    """The path is one file, or a folder of them."""
    sessions: dict[str, _Session] = {}
    facts: Counter[str] = Counter()
    for session in reader.documents("*.json", _Session):
        if session.name in sessions:
            reader.reject(str(reader.path), f"two files have the id of {session.name}")
            continue
        sessions[session.name] = session
        facts += session.facts
    conversations = tuple(one for session in sessions.values() for one in session.conversations)
    counted = {"sessions_in_file": len(sessions), **dict(sorted(facts.items()))}
    return Recording(conversations, RULE, counted, one_clock=False)


class _Session:
    """The conversations of a file: the session itself, and those of its sub-agents. Raises Malformed."""

    def __init__(self, row: Row) -> None:
        self._size, self.name = whole(row, "block_size", 1), f"weka-{text(row, 'id')}"
        if row.get("hash_id_scope", "local") != "local":
            raise Malformed(
                f"hash_id_scope={row['hash_id_scope']!r}: only files whose block ids are their own are known"
            )
        self._base = _digest("weka", "session", self.name) >> 24 << 24
        self.facts: Counter[str] = Counter()
        self.conversations: list[Conversation] = []
        self._read(row, self.name)

    def _read(self, part: Row, name: str, begun: Begun | None = None, pause_s: float | None = None) -> None:
        """Read one conversation and what it began. pause_s: before its first request."""
        requests, this, place = _requests(part), _Open(name), len(self.conversations)
        shared = self._shared(part, requests)
        for index, request in enumerate(requests):
            try:
                if request.get("type") == SUB_AGENT:
                    self.facts["sub_agents"] += 1
                    self._sub_agent(request, this)
                    continue
                self._call(request, this, shared, pause_s)
                stop = str(request.get("stop") or "")
                self.facts["requests_of_sub_agents" if begun else f"requests_{text(request, 'type')}"] += 1
                self.facts[f"stop_{stop or 'empty'}"] += begun is None
            except Malformed as error:
                raise Malformed(f"request {index} of {name}: {error}") from error
        if not this.calls:
            raise Malformed(f"{name} has no request")
        self.conversations.insert(place, Conversation(name, tuple(this.calls), begun))

    def _sub_agent(self, row: Row, parent: _Open) -> None:
        """It began after the last reply of its parent that had ended then, and the parent's next request waits for it."""
        ended_s = number(row, "t")
        duration_s = 0.0 if row.get("duration_ms") is None else number(row, "duration_ms") / 1e3
        began_s = max(0.0, ended_s - duration_s)
        if not parent.calls:
            raise Malformed("a sub-agent comes before the first request")
        turn = sum(end <= began_s for end in parent.ends_s) or 1
        name = f"{parent.name}/{text(row, 'agent_id')}"
        self._read(row, name, Begun(parent.name, turn), max(0.0, began_s - parent.ends_s[turn - 1]))
        parent.joining.append(name)
        parent.joined_s = max(parent.joined_s, ended_s)

    def _call(self, row: Row, this: _Open, shared: Mapping[int, int], first_pause_s: float | None) -> None:
        at_s, tokens, ids = number(row, "t"), whole(row, "in", 1), hash_list(row, "hash_ids")
        if at_s < this.at_s:
            raise Malformed(f"t={at_s} lies before the request above it ({this.at_s})")
        if len(ids) * self._size > tokens:
            raise Malformed(f"in={tokens} has no room for {len(ids)} blocks of {self._size} tokens")
        if ids and not (min(ids) >= 0 and max(ids) < SESSION_IDS):
            raise Malformed(f"hash_ids are numbers below {SESSION_IDS}")
        if not this.calls:
            pause_s = first_pause_s
        elif this.joining:
            pause_s = max(0.0, at_s - max(this.joined_s, this.ends_s[-1]))
        elif this.timed and "think_time" in row:
            pause_s = max(0.0, number(row, "think_time"))
        else:
            pause_s = max(0.0, at_s - this.ends_s[-1])
        reason: StopReason | None = next((one for one in get_args(StopReason) if one == row.get("stop")), None)
        this.calls.append(
            Call(
                Blocks(
                    hashes_of([shared[one] if one in shared else self._base + one for one in ids]), self._size, tokens
                ),
                whole(row, "out"),
                at_s,
                continues=False,
                order=len(this.calls),
                pause_s=pause_s,
                waits_for=tuple(this.joining),
                hint=Hint(reason) if reason else None,
            )
        )
        this.joining = []
        this.at_s, this.timed = at_s, "api_time" in row
        this.ends_s.append(at_s + (max(0.0, number(row, "api_time")) if this.timed else 0.0))

    def _shared(self, row: Row, requests: Sequence[Row]) -> dict[int, int]:
        """Names for block ids that hold across files: of the tool definitions and the system prompt, their place and how long
        they are. Any other block is named by its file and id."""
        tools, system = whole(row, "tool_tokens"), whole(row, "system_tokens")
        first = next((one for one in requests if one.get("type") != SUB_AGENT), {})
        leading = hash_list(first, "hash_ids") if first else []
        names = {}
        for place, one in enumerate(leading[: (tools + system) // self._size]):
            whose = ("tools", tools) if (place + 1) * self._size <= tools else ("system", tools, system)
            names[one] = _digest("weka", *whose, place)
        return names


def _requests(row: Row) -> list[Mapping[str, Any]]:
    requests = row.get("requests")
    if not isinstance(requests, list) or not all(isinstance(one, Mapping) for one in requests):
        raise Malformed("requests is not a list of objects")
    return requests


def _digest(*names: object) -> int:
    """A signed number of 64 bits, a function of the names alone."""
    key = "/".join(str(name) for name in names).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)
