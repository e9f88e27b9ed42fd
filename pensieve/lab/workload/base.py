"""Who asks what, when: the Workload protocol, and random draws that depend on names."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from pensieve.core.request import Forced, Request, TokenArray, tokens_of
from pensieve.errors import ConfigError
from pensieve.serve.record import TurnRecord
from pensieve.serve.tokenizer import ChatTemplate, user_line

if TYPE_CHECKING:
    from pensieve.lab.workload.vllm_run import RealRequest

_NOTHING: TokenArray[int] = array("i")

# What the fields of a workload may be: checked where a configuration is read.

Count = Annotated[int, Field(strict=True, ge=1)]
NoneOrMore = Annotated[int, Field(strict=True, ge=0)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to submit at `at_s` (seconds since the replay began); cancelled as a timeout at deadline_s.

    continues: its prompt is the new message alone, which follows what stands of the conversation by then. prompt: builds
    that of the request when it is sent. said: likewise the tokens of its reply, where the system is told them. Traces use
    both: all of their tokens at once would fill the memory.
    """

    at_s: float
    request: Request
    deadline_s: float | None = None
    prompt: Callable[[], TokenArray[int]] | None = None
    continues: bool = True
    said: Callable[[], TokenArray[int]] | None = None

    def due(self, said: TokenArray[int] = _NOTHING) -> Request:
        """The request with its prompt. said: what stands of the conversation."""
        prompt = self.request.prompt if self.prompt is None else self.prompt()
        output = self.request.output if self.said is None else Forced(self.said())
        return replace(self.request, prompt=said + prompt if self.continues else prompt, output=output)


@dataclass(frozen=True, slots=True)
class WorkloadContext:
    """What a workload may know of the system it loads.

    gpu_tokens: size of the GPU tier that `workload.pressure` is a multiple of; the same for every baseline of a sweep.
    """

    seed: int
    gpu_tokens: int
    cpu_tokens: int
    max_context: int
    vocab: int
    encode: Any  # Callable[[str], Sequence[int]]
    force_lengths: bool
    """True where the weights are random: outputs then have lengths given by the workload, never an end of sequence."""
    chat: ChatTemplate | None = None
    """How the model reads conversations; None: as plain lines."""
    takes_replies: bool = True
    """The system can be told the tokens of a reply; an engine of others cannot."""
    byte_tokens: bool = False
    """Text is read as bytes: the model has no tokenizer on this machine."""
    stateless_capacity: Callable[[Sequence[tuple[int, int]]], float] | None = None
    """Requests a second that stateless serving could finish here, from (prompt, reply) tokens of requests; None: nobody
    knows before it is measured, as on a real device."""

    def message(self, text: str, first: bool) -> TokenArray[int]:
        """A user's message as the model reads it: the first of a conversation, or one that follows a reply and ends it."""
        if self.chat is None:
            return tokens_of(list(self.encode(user_line(text, first))))
        return tokens_of(self.chat.opening(text) if first else self.chat.following(text, None))


def check_turns(min_turns: int, max_turns: int | None) -> None:
    """Raises ConfigError."""
    if max_turns is not None and max_turns < min_turns:
        raise ConfigError(f"workload.max_turns={max_turns} is below workload.min_turns={min_turns}; raise it.")


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """What a workload says of itself before it runs; recorded with the trial and printed by workload.inspect=true.

    load: open, closed or partly open. turns: how many will be submitted, where known (for the progress bar).
    warmup_turns: of these, those that are not measured (request.is_measured).
    working_set_tokens: KV tokens of all conversations at their longest. cache_state: what the cache holds of the measured
    conversations at their first measured turn: cold (nothing), primed (what the warm-up put there), carried (what an
    earlier run left); checked after the run, and a mismatch invalidates the trial.
    """

    load: str
    sessions: int
    turns: int | None
    working_set_tokens: int
    warmup_turns: int
    cache_state: str = "cold"
    facts: dict[str, Any] = field(default_factory=dict)


def cut_by_context(plans: Iterable[Mapping[str, Any]]) -> str:
    """What the model's context took from these workloads (WorkloadPlan.facts of each), in words; empty where it took nothing
    or where nobody counts."""
    known = list(plans)

    def all_of(name: str) -> int:
        return sum(facts.get(name) or 0 for facts in known)

    ended, turns = all_of("conversations_cut_by_context"), all_of("turns_cut_by_context")
    left_out = all_of("conversations_too_long_for_the_context")
    asked = f" ({turns:,} turns are never asked)" if turns else ""
    told = [f"{ended:,} of {all_of('conversations'):,} conversations end early{asked}"] if ended else []
    told += [f"{left_out:,} conversations are left out, whose first prompt does not fit"] if left_out else []
    return " and ".join(told)


def context_cuts(where: str) -> str:
    """The sentence about one or several `cut_by_context`."""
    return (
        f"The model's context cuts the load: {where}. To ask all of it, choose a model with a longer context; simulated, "
        "model.architecture.max_position_embeddings may be raised."
    )


BYTE_TOKENS = (
    "Tokens are bytes here, about four to a real token: lengths and cache sizes come out four times too large. Install a "
    "tokenizer: `hf download MODEL tokenizer.json tokenizer_config.json`, then model.tokenizer=MODEL (or a folder that "
    "holds one)."
)


def byte_notes(facts: Mapping[str, Any]) -> list[str]:
    """The sentence that goes wherever this load's lengths are shown; none where a tokenizer made them."""
    return [BYTE_TOKENS] if facts.get("tokens") == "bytes" else []


class Workload(Protocol):
    """Built anew for each trial from (config, WorkloadContext); deterministic in the seed."""

    def describe(self) -> WorkloadPlan: ...

    def start(self) -> Iterable[Arrival]: ...

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        """Called with every finished turn (also failed ones): think time, sleeps, warm-up barriers."""
        ...


@dataclass(frozen=True, slots=True)
class Following:
    """What the end of a turn can bring, whatever becomes of it: of these turns, (session, number), some or none, and nothing
    sooner than `pause_s` after it, nor before `not_before_s` on the clock."""

    pause_s: float
    turns: tuple[tuple[str, int], ...] = ()
    not_before_s: float = 0.0


@runtime_checkable
class Foresees(Protocol):
    """A workload that knows what comes after a turn that has not ended, be it under way or still to come itself."""

    def foresee(self, session: str, turn: int) -> Following | None:
        """The same whenever it is asked. None: anything, at once."""


@runtime_checkable
class KnowsUsers(Protocol):
    """A workload whose conversations may wait for others, so that a turn with nothing following is no user's last."""

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool: ...


@runtime_checkable
class KnowsEnds(Protocol):
    """A workload that can say of a conversation that nothing more will be asked of it, and that none begins as it does."""

    def is_over(self, turn: TurnRecord) -> bool:
        """Whether no turn follows this one, which has finished, but those that were given out already."""
        ...


@runtime_checkable
class OfRealRun(Protocol):
    """A workload that replays a real run. real: its requests, by conversation. seen: looked at when the machine was made."""

    real: Mapping[str, RealRequest]
    seen: bool


def out_of_work(workload: Workload, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
    """Whether some user has nothing left to ask after this turn, which `following` follows."""
    if isinstance(workload, KnowsUsers):
        return workload.out_of_work(turn, following)
    return not following


def uniform(seed: int, *names: object) -> float:
    """In [0, 1), 53 bits, a function of the seed and the names alone (`hash()` would differ between processes)."""
    text = "/".join(map(str, (seed, *names)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def exponential(mean: float, seed: int, *names: object) -> float:
    """Exponentially distributed with the given mean; 0 where the mean is 0."""
    return -mean * math.log1p(-uniform(seed, *names))


def between(low: int, high: int, seed: int, *names: object) -> int:
    """A whole number in [low, high], each equally likely."""
    return low + int(uniform(seed, *names) * (high - low + 1))


def shuffled(count: int, seed: int, *names: object) -> list[int]:
    """A permutation of range(count)."""
    return sorted(range(count), key=lambda index: uniform(seed, *names, index))


def part_of(conversation: str, parts: int) -> int:
    """Which of `parts` parts, from 1, it belongs to, in whatever trace and under every seed: by the first byte of the SHA-256
    of its id."""
    return 1 + hashlib.sha256(conversation.encode()).digest()[0] % parts
