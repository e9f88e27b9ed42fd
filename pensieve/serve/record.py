"""What became of a request: its TurnRecord, and who is told of it; and what stands of conversations, as who asks knows it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Literal, Protocol

from pensieve.core.request import Event, Request, TokenArray
from pensieve.core.session import common_prefix
from pensieve.errors import WorkerError

Cause = Literal["new", "edited", "evicted", "expired", "restarted", "never_stored"]
"""new: never said before in this conversation. edited: other tokens stood in its place. evicted: its KV was given up for a
request of `evicted_by`. expired, restarted: the conversation was forgotten for its age, or the server was started again.
never_stored: its KV was computed and not kept, by design (stateless; the part of a block at the end of a turn in
prefix_cache), since its step failed, or since another conversation that shared it was forgotten."""


@dataclass(frozen=True, slots=True)
class Loss:
    """For whose request KV was given up, and when, in seconds of the engine's clock."""

    by: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Missed:
    """Positions [start, stop) of a prompt that had no KV."""

    start: int
    stop: int
    cause: Cause
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """A line of a turn's ledger. ms: of the turn's time to first token, or to its end without one. evicted_by, evicted_s:
    the conversation for whose request, and when the last of these tokens was given up; evicted_by None beside them: several
    others."""

    cause: Cause
    tokens: int
    ms: float
    evicted_by: str | None = None
    evicted_s: float | None = None


_UNKNOWN = array("d", (float("nan"),))


@dataclass(slots=True)
class TurnRecord:
    """The columns of table `turn` (units in the names; None: not known or never admitted), and the tokens themselves.

    Its methods and the books alone change it. gpu_hit + cpu_hit + disk_hit + recomputed = history and history + new = prompt,
    read once, at the first admission. status: completed, timeout, cancelled, refused, failed.
    *_bytes: None: not counted; 0 is a count. Of steps that were collected before the turn ended. h2d_bytes: swapped in for
    its admission or resumption. d2h_bytes: of urgent swap-outs, its own KV when it was preempted and any conversation's
    where it waited for the room; what is copied ahead of time is done for no turn, and in the trial's counter alone.
    sent_bytes, received_bytes: over a network, where the system has one.
    """

    session: str
    turn: int
    ordinal: int = 0
    iteration: int = 0
    label: str = ""
    phase: str = "chat"
    stream: bool = True
    status: str = "completed"
    finish_reason: str | None = None
    error: str | None = None
    intended_s: float = 0.0
    sent_s: float | None = None
    arrived_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    compute_ms: float | None = None
    transfer_ms: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    history_tokens: int | None = None
    gpu_hit_tokens: int | None = None
    cpu_hit_tokens: int | None = None
    disk_hit_tokens: int | None = None
    recomputed_tokens: int | None = None
    shared_hit_tokens: int | None = None
    new_tokens: int | None = None
    resumed_swapped_tokens: int = 0
    resumed_recomputed_tokens: int = 0
    cpu_recomputed_tokens: int = 0
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    output_sha256: str | None = None
    # Not columns: kept for the offline bound (see Books.findable), for the Parquet of tokens and for the caller.
    elsewhere_tokens: int | None = None
    anywhere_tokens: int | None = None
    unexplained_tokens: int | None = None
    """Found in the cache of an engine of others though nobody in this trial had said them. None: it does not report."""
    recomputed_s: float | None = None
    """What the cost model says its recomputed_tokens take, as part of a longer prefill; None: there is none."""
    missed: tuple[Missed, ...] = ()
    found: tuple[tuple[tuple[int, int], ...], ...] = ()
    saved_s: tuple[float, ...] | None = None
    """By tier (holding.TIERS): what the cost model says computing the positions found there would have taken. CPU positions
    that were computed again all the same saved nothing. None: there is no cost model, or it was never admitted."""
    misses: tuple[Miss, ...] = ()
    """The ledger, of a turn that was admitted."""
    request_id: int = 0
    token_ids: TokenArray[int] = field(default_factory=lambda: array("i"))
    margins: TokenArray[float] = field(default_factory=lambda: array("d"))
    emitted_s: TokenArray[float] = field(default_factory=lambda: array("d"))

    @classmethod
    def arrived(cls, request: Request, turn: int, now_s: float) -> TurnRecord:
        """Make the record of a request that has reached an engine which counts the bytes it copies."""
        record = cls(request.session, turn, intended_s=request.intended_s, arrived_s=now_s, request_id=request.id)
        record.planned(request, 0)
        record.h2d_bytes = record.d2h_bytes = 0
        return record

    @classmethod
    def never_sent(cls, request: Request, now_s: float) -> TurnRecord:
        """Make the record of a request that timed out before any system had it."""
        record = cls(request.session, request.turn, intended_s=request.intended_s, request_id=request.id)
        record.close("timeout", None, now_s)
        return record

    @property
    def stands(self) -> bool:
        """Whether its message and what it generated are part of the conversation from now on; if not, it is as though it had
        never been asked. A turn that was cut short stands with all tokens that it generated, its last one without KV as in
        any turn (Session.stop); one that generated nothing, or whose KV a failed step left in doubt, does not."""
        return bool(self.token_ids) and self.status not in ("refused", "failed")

    # -- in the engine ------------------------------------------------------------------------------------------------

    def step(self, compute_ms: float, stall_ms: float) -> None:
        """Add the times of an iteration in which it had a row."""
        self.compute_ms = (self.compute_ms or 0.0) + compute_ms
        self.transfer_ms = (self.transfer_ms or 0.0) + stall_ms

    def more_steps(self, compute_ms: Sequence[float], stall_ms: Sequence[float] = ()) -> None:
        """As `step` for several iterations. stall_ms: nothing where none waited for a transfer."""
        self.compute_ms = reduce(add, compute_ms, self.compute_ms or 0.0)  # `sum` compensates, in some versions
        self.transfer_ms = reduce(add, stall_ms, self.transfer_ms or 0.0)

    def copied(self, column: Literal["h2d_bytes", "d2h_bytes"], count: int | None) -> None:
        """Add the bytes of a copy that it waited for. count None: the step failed, so the sum is unknown from now on."""
        before = getattr(self, column)
        setattr(self, column, None if before is None or count is None else before + count)

    def token(self, token: int, margin: float | None, now_s: float) -> None:
        """Add the next token of its output. margin: top logit less the second; None: not known."""
        self.token_ids.append(token)
        self.margins.append(float("nan") if margin is None else margin)
        self.emitted_s.append(now_s)
        if self.first_token_s is None:
            self.first_token_s = now_s

    def more_tokens(self, tokens: TokenArray[int], times_s: TokenArray[float]) -> None:
        """Add several tokens at once, of a worker that knows no margins; the first token came before."""
        assert self.first_token_s is not None
        self.token_ids.extend(tokens)
        self.margins.extend(_UNKNOWN * len(tokens))
        self.emitted_s.extend(times_s)

    def close(self, status: str, finish_reason: str | None, now_s: float, error: str | None = None) -> None:
        """End it: set its status, its durations and the digest of its output."""
        self.status, self.finish_reason, self.error = status, finish_reason, error
        self.finished_s = now_s
        self.latency_ms = (now_s - self.intended_s) * 1e3
        if self.admitted_s is not None:
            self.queue_ms = (self.admitted_s - self.intended_s) * 1e3
        if self.first_token_s is not None:
            self.ttft_ms = (self.first_token_s - self.intended_s) * 1e3
        self.output_tokens = len(self.token_ids)
        self.output_sha256 = hashlib.sha256(self.token_ids.tobytes()).hexdigest()

    # -- outside the engine -------------------------------------------------------------------------------------------

    def generated(self, tokens: TokenArray[int], emitted_s: TokenArray[float], admitted_s: float | None) -> None:
        """Set the whole output, of a system that tells it at the end. admitted_s: None where the system does not know."""
        self.token_ids, self.emitted_s, self.admitted_s = tokens, emitted_s, admitted_s
        self.first_token_s = emitted_s[0] if emitted_s else None

    def sent(self, at_s: float) -> None:
        """Set when it was submitted, unless its system has told."""
        if self.sent_s is None:
            self.sent_s = at_s

    def overdue(self) -> None:
        """Mark it as timed out: it ended after its deadline, in a system that cannot cancel."""
        self.status = "timeout"

    def planned(self, request: Request, ordinal: int) -> None:
        """Set what the workload says of it. ordinal: its place in the order of scheduling."""
        self.ordinal, self.iteration = ordinal, request.iteration
        self.phase, self.label, self.stream = request.phase, request.label, request.stream

    def shift(self, origin_s: float) -> None:
        """Convert times of the system's clock to seconds since `origin_s`."""
        if origin_s == 0.0:
            return
        for name in ("sent_s", "arrived_s", "admitted_s", "first_token_s", "finished_s"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value - origin_s)
        self.intended_s -= origin_s
        self.emitted_s = array("d", (value - origin_s for value in self.emitted_s))


PREPARING = ("warmup", "rewarm")


def is_measured(phase: str) -> bool:
    """Whether a turn of this phase counts, or only prepares others. Every choice of turns to report asks here with the phase
    of a TurnRecord, a Request, or a row of table `turn`."""
    return phase not in PREPARING


class Transcripts(dict[str, "TokenArray[int]"]):
    """Of conversations, by name: all tokens that were said, as the next prompt begins."""

    def of(self, session: str) -> TokenArray[int]:
        """None where nothing stands."""
        return self.get(session) or array("i")

    def known(self, session: str, prompt: TokenArray[int]) -> int:
        """Leading tokens of the prompt that were computed before. The last token of a turn has no KV: the next one computes
        it."""
        said = self.of(session)
        return max(0, min(common_prefix(said, prompt), len(said) - 1))

    def history_of(self, asked: Request) -> int:
        """Prompt tokens that were said before: all that a cache could have had. The last one is computed in any case."""
        known = self.known(asked.session, asked.prompt) if asked.history is None else asked.history.tokens
        return min(known, len(asked.prompt) - 1)

    def note(self, asked: Request, turn: TurnRecord) -> None:
        """A turn has ended: add what was asked and answered, if it stands."""
        if turn.stands:
            self[asked.session] = asked.prompt + turn.token_ids

    def forget(self, session: str | None) -> None:
        """Forget one conversation; None: all."""
        if session is None:
            self.clear()
        else:
            self.pop(session, None)


class Listener(Protocol):
    """Who is told what becomes of one request. It is called by whatever drives the engine, between two iterations: it must
    not wait, and may begin further requests."""

    @property
    def streams(self) -> bool:
        """Whether another thread passes on each token as it comes."""

    def happened(self, event: Event) -> None:
        """The request got a token, or ended; nothing comes after the event `finished`."""

    def failed(self, error: WorkerError) -> None:
        """The system crashed or was closed before the request ended; nothing comes after it."""


class Listeners(dict[int, Listener]):
    """By request, those who are told what becomes of theirs."""

    def tell(self, events: list[Event]) -> list[Event]:
        """Returns the events of all other requests."""
        others = []
        for event in events:
            listener = self.get(event.request_id)
            if listener is None:
                others.append(event)
                continue
            if event.kind == "finished":
                del self[event.request_id]
            listener.happened(event)
        return others

    def fail(self, error: WorkerError) -> None:
        """Pass this error to every listener whose request has not ended."""
        for request_id in list(self):
            listener = self.pop(request_id, None)
            if listener is not None:
                listener.failed(error)
