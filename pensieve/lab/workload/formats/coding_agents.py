"""Sessions of coding agents: WEKA's, with a hash for each 64 tokens of a prompt, and TraceLab's, of which lengths alone are
known (CC BY 4.0, https://github.com/uw-syfi/TraceLab)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from pensieve.core.request import Hint, StopReason
from pensieve.lab.workload.formats.reading import Entry, Hashes, Positive, Reader, Time, Whole
from pensieve.lab.workload.playback import Begun
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Parts, Recording, grouped, hashes_of


def _digest(*names: object) -> int:
    """A signed number of 64 bits, a function of the names alone."""
    key = "/".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)


# WEKA's: a JSON file each, with times, lengths and hashes.

WEKA = (
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


class _Request(Entry):
    t: float = Field(ge=0)
    prompt: Positive = Field(alias="in")
    reply: Whole = Field(alias="out")
    hash_ids: Hashes
    api_time: float | None = None
    think_time: float | None = None
    stop: str | None = None

    @model_validator(mode="after")
    def _ids_are_of_the_file(self) -> Self:
        if len(self.hash_ids) and not (min(self.hash_ids) >= 0 and max(self.hash_ids) < SESSION_IDS):
            raise ValueError(f"hash_ids are numbers below {SESSION_IDS}")
        return self


class _Agent(Entry):
    requests: list[
        Annotated[
            Annotated[_SubAgent, Tag(SUB_AGENT)] | Annotated[_Request, Tag("request")],
            Discriminator(lambda row: SUB_AGENT if dict(row).get("type") == SUB_AGENT else "request"),
        ]
    ]
    tool_tokens: Whole
    system_tokens: Whole


class _SubAgent(_Agent):
    agent_id: str
    t: float
    duration_ms: float | None = None


class Weka(_Agent):
    id: str
    block_size: Positive
    hash_id_scope: Literal["local"] = "local"

    @property
    def session(self) -> str:
        return f"weka-{self.id}"

    def conversations(
        self, part: _Agent, name: str, begun: Begun | None = None, pause_s: float | None = None
    ) -> list[Conversation]:
        """The session, or one of its sub-agents, and those that it began. pause_s: before its first request. Raises
        ValueError."""
        calls: list[Call] = []
        ends_s: list[float] = []  # of each reply, by the clock of the conversation
        others: list[Conversation] = []
        joining: list[_SubAgent] = []  # that ended since the last request
        before: _Request | None = None
        shared, base = self._shared(part), _digest("weka", "session", self.session) >> 24 << 24
        for index, request in enumerate(part.requests):
            if isinstance(request, _SubAgent):
                if not calls:
                    raise ValueError("a sub-agent comes before the first request")
                began_s = max(0.0, request.t - (request.duration_ms or 0.0) / 1e3)
                turn = sum(end <= began_s for end in ends_s) or 1
                waited_s = max(0.0, began_s - ends_s[turn - 1])
                others += self.conversations(request, f"{name}/{request.agent_id}", Begun(name, turn), waited_s)
                joining.append(request)
                continue
            if before is not None and request.t < before.t:
                raise ValueError(
                    f"request {index} of {name}: t={request.t} lies before the request above it ({before.t})"
                )
            if len(request.hash_ids) * self.block_size > request.prompt:
                raise ValueError(f"request {index} of {name}: in={request.prompt} has no room for its hash_ids")
            if joining:  # the request waited for them
                pause_s = max(0.0, request.t - max(ends_s[-1], *(one.t for one in joining)))
            elif before is not None and before.api_time is not None and request.think_time is not None:
                pause_s = max(0.0, request.think_time)
            elif before is not None:
                pause_s = max(0.0, request.t - ends_s[-1])
            hashes = hashes_of([shared[one] if one in shared else base + one for one in request.hash_ids])
            reason: StopReason | None = next((one for one in get_args(StopReason) if one == request.stop), None)
            calls.append(
                Call(
                    Blocks(hashes, self.block_size, request.prompt),
                    request.reply,
                    request.t,
                    continues=False,
                    order=len(calls),
                    pause_s=pause_s,
                    waits_for=tuple(f"{name}/{one.agent_id}" for one in joining),
                    hint=Hint(reason) if reason else None,
                )
            )
            ends_s.append(request.t + max(0.0, request.api_time or 0.0))
            before, joining = request, []
        if not calls:
            raise ValueError(f"{name} has no request")
        return [Conversation(name, tuple(calls), begun), *others]

    def _shared(self, part: _Agent) -> dict[int, int]:
        """Names for block ids that hold across files: of the tool definitions and the system prompt, their place and how long
        they are. Any other block is named by its file and id."""
        tools, system, size = part.tool_tokens, part.system_tokens, self.block_size
        leading: Iterable[int] = next((one.hash_ids for one in part.requests if isinstance(one, _Request)), ())
        names = {}
        for place, one in enumerate(list(leading)[: (tools + system) // size]):
            whose = ("tools", tools) if (place + 1) * size <= tools else ("system", tools, system)
            names[one] = _digest("weka", *whose, place)
        return names


def weka(reader: Reader) -> Recording:
    """The path is one file, or a folder of them."""
    sessions: dict[str, list[Conversation]] = {}

    def parse(row: Any) -> list[Conversation]:
        file = Weka.model_validate(row)
        return file.conversations(file, file.session)

    for file in reader.files("*.json"):
        for found in reader.entries(parse, file):
            if sessions.setdefault(found[0].id, found) is not found:
                reader.reject(str(file), f"two files have the id of {found[0].id}")
    all_of_them = tuple(chain.from_iterable(sessions.values()))
    return Recording(all_of_them, WEKA, {"sessions_in_file": len(sessions)}, one_clock=False)


# TraceLab's: a JSON object a round, unpacked, with times, lengths and what the provider's cache had.

TRACELAB = (
    "A session file is a conversation, and every round carries its whole prompt. A prompt that is not shorter than the one "
    "before it begins with it. A shorter one (the agent compacted or edited) begins with those of its tokens that the "
    "provider had cached. What the provider had cached of a first prompt is shared by all sessions of that provider and "
    "model. Other tokens occur nowhere else. A round is sent at its last user message or tool result, and ends with its "
    "last event."
)
_Pieces = tuple[tuple[int, int], ...]
_ASKS = ("user_message", "tool_result")


class _Event(Entry):
    event_type: str = ""
    timestamp: Time


class _Tool(Entry):
    tool_name: str | None = None


class TraceLab(Entry):
    provider: str
    round_index: Whole
    prefix_tokens: Whole
    newly_append_tokens: Whole
    input_tokens_total: Positive
    output_tokens: Whole
    session_id: str
    timing_events: list[_Event] = Field(min_length=1)
    round_id: Any = None
    model: Any = None
    project: Any = None
    session_file: Any = None
    tools: list[_Tool] | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.prefix_tokens + self.newly_append_tokens != self.input_tokens_total:
            raise ValueError(f"prefix_tokens and newly_append_tokens are not {self.input_tokens_total} together")
        return self

    @property
    def session(self) -> str:
        name = _digest("tracelab", f"{self.project}/{self.session_file}/{self.session_id}")
        return f"{self.provider}-{name & (1 << 64) - 1:016x}"

    @property
    def at_s(self) -> float:
        asks = [one.timestamp for one in self.timing_events if one.event_type in _ASKS]
        return max(asks) if asks else min(one.timestamp for one in self.timing_events)

    @property
    def cached(self) -> int:
        return min(self.prefix_tokens, self.input_tokens_total - 1)


def tracelab(reader: Reader) -> Recording:
    rows = list(reader.entries(TraceLab.model_validate))
    once = {(one.session, one.round_index, str(one.round_id)): one for one in reversed(rows)}
    rounds = sorted(once.values(), key=lambda one: one.at_s)
    facts = Counter(duplicate_rounds=len(rows) - len(rounds), shorter_prompts=0)
    prompts: dict[str, _Pieces] = {}
    ended_s: dict[str, float] = {}
    calls: list[tuple[str, Call]] = []
    for order, one in enumerate(rounds):
        name, before = one.session, prompts.get(one.session)
        if before is None:
            before = ((_digest("tracelab", f"{one.provider}/{one.model}"), one.cached),)
        elif one.input_tokens_total < sum(tokens for _, tokens in before):
            facts["shorter_prompts"] += 1
            before = _cut(before, one.cached)
        own = one.input_tokens_total - sum(tokens for _, tokens in before)
        prompts[name] = (*before, (_digest("tracelab", name, one.round_index, one.round_id), own))
        tool = one.tools[-1].tool_name if one.tools else None
        call = Call(
            Parts(tuple(piece for piece in prompts[name] if piece[1])),
            max(1, one.output_tokens),
            one.at_s - rounds[0].at_s,
            continues=False,
            order=order,
            pause_s=max(0.0, one.at_s - ended_s[name]) if name in ended_s else None,
            hint=Hint("tool_use", tool) if tool else Hint("end_turn"),
        )
        calls.append((name, call))
        ended_s[name] = max(event.timestamp for event in one.timing_events)
    return Recording(grouped(calls), TRACELAB, dict(facts))


def _cut(pieces: _Pieces, tokens: int) -> _Pieces:
    """The first so many tokens. A piece that is cut is the beginning of the whole one."""
    found = []
    for name, count in pieces:
        if tokens > 0:
            found.append((name, min(count, tokens)))
        tokens -= count
    return tuple(found)
