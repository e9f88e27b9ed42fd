"""What is asked (Request, Output), and what became of it (TurnRecord)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

TokenArray = array  # of 'i': four bytes a token, so that a million remembered tokens cost 4 MB


def tokens_of(values: Sequence[int] | TokenArray[int]) -> TokenArray[int]:
    return values if isinstance(values, array) else array("i", values)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    The noise is a function of (seed, session, turn, position), so that a token does not depend on the batch it was
    computed in, nor on the baseline that computed it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def noise_key(self, session: str, turn: int) -> int:
        """A 63-bit integer; `hash()` would differ from one process to the next."""
        text = f"{self.seed}/{session}/{turn}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Length:
    """Exactly `tokens` tokens, end-of-sequence ignored."""

    tokens: int

    @property
    def max_new_tokens(self) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Forced:
    """Logits are computed and their argmax and margin recorded; the given token is appended."""

    tokens: TokenArray[int]

    @property
    def max_new_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Free:
    """Until end of sequence, one of the stop strings, or `max_new_tokens`."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


Output = Length | Forced | Free


@dataclass(slots=True)
class Request:
    """One turn of one conversation.

    prompt: token ids. With `continues`, the new message only: it is appended to what the conversation holds. Without,
        the whole prompt: the longest common prefix with the conversation's tokens is kept and the rest truncated.
    intended_s: arrival by the schedule, in seconds of the system's clock; TTFT starts here, so that queueing counts.
    known_tokens: overrides `history` in the accounting, where the workload knows better (prefix invalidation).
    next_use_s: when the conversation will be asked again, by the schedule; only an offline policy reads it.
    """

    id: int
    session: str
    turn: int
    prompt: TokenArray[int]
    output: Output
    sampling: Sampling = field(default_factory=Sampling)
    continues: bool = True
    intended_s: float = 0.0
    phase: str = "chat"
    label: str = ""
    iteration: int = 0
    stream: bool = True
    known_tokens: int | None = None
    next_use_s: float | None = None


@dataclass(slots=True)
class TurnRecord:
    """The columns of table `turn` (units in the names; None: not known or never admitted), and the tokens themselves.

    gpu_hit + cpu_hit + recomputed = history and history + new = prompt, read once, at the admission that succeeded.
    status: completed, timeout, cancelled, refused, failed.
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
    recomputed_tokens: int | None = None
    shared_hit_tokens: int | None = None
    new_tokens: int | None = None
    resumed_swapped_tokens: int = 0
    resumed_recomputed_tokens: int = 0
    cpu_recomputed_tokens: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    output_sha256: str | None = None
    # Not columns: kept for the offline bound (see Residency), for the Parquet of tokens and for the caller.
    elsewhere_tokens: int | None = None
    anywhere_tokens: int | None = None
    request_id: int = 0
    token_ids: TokenArray[int] = field(default_factory=lambda: array("i"))
    margins: TokenArray[float] = field(default_factory=lambda: array("d"))
    emitted_s: TokenArray[float] = field(default_factory=lambda: array("d"))

    def close(self, finished_s: float) -> None:
        """Derive the durations and the digest once the last token is there."""
        self.finished_s = finished_s
        self.latency_ms = (finished_s - self.intended_s) * 1e3
        if self.admitted_s is not None:
            self.queue_ms = (self.admitted_s - self.intended_s) * 1e3
        if self.first_token_s is not None:
            self.ttft_ms = (self.first_token_s - self.intended_s) * 1e3
        self.output_tokens = len(self.token_ids)
        self.output_sha256 = hashlib.sha256(self.token_ids.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Event:
    """What a request just got. at_s: seconds of the system's clock. turn: set on `finished` only."""

    kind: Literal["first_token", "token", "finished"]
    request_id: int
    at_s: float
    token: int | None = None
    turn: TurnRecord | None = None
