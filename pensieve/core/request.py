"""What is asked: Request, its Output, its Sampling and its Hint; and the Event of what it just got.

What makes no sense is refused here, with a ConfigError, whoever asks: a server's caller, a workload or a bench.
"""

from __future__ import annotations

import numbers
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from pensieve.errors import ConfigError

TokenArray = array  # of 'i': four bytes a token, so that a million remembered tokens cost 4 MB

UNNUMBERED = 0

_BEYOND = 2**31  # token ids, and a top_k that limits anything, lie below
_COOLEST = 1e-6  # logits divided by less may leave the range of floats


def tokens_of(values: Iterable[int], vocab: int | None = None) -> TokenArray[int]:
    """Token ids, four bytes each. vocab: of the model that shall read them; None: any id that fits will do."""
    if vocab is None and isinstance(values, array) and values.typecode == "i":
        return values
    meaning = "" if vocab is None else ", the model's vocabulary"
    wanted = f"Token ids (prompt_ids) must be whole numbers in [0, {vocab or _BEYOND}){meaning}"
    try:
        listed = list(values)
        if bool in set(map(type, listed)):
            raise TypeError("a bool is no token id")
        wide = array("q", listed)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"{wanted}; these cannot be read as such: {error}.") from error
    for extreme in (min(wide, default=0), max(wide, default=0)):
        if not 0 <= extreme < (vocab or _BEYOND):
            raise ConfigError(f"{wanted}; one of these is {extreme}.")
    return array("i", wide)


def text_of(value: object, name: str) -> str:
    """A string that has an encoding; lone surrogates have none. name: of the argument, for the error."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {value!r}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid Unicode: {error}.") from error
    return value


def _whole(value: object, name: str, least: int) -> int:
    """As Python's own number: numpy's overflow."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not least <= int(value) < 2**63:
        raise ConfigError(f"{name} must be a whole number in [{least}, 2^63), not {value!r}.")
    return int(value)


def _real(value: object, name: str) -> float:
    try:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(f"{name} must be a number that a float can hold, not {value!r}.")


def _settle(frozen: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 are off. seed: 64 bits with a sign.

    The noise is a function of (seed, session, turn, position), so that a token does not depend on the batch it was
    computed in, nor on the baseline that computed it. anonymous: of (seed, position) alone, so that equal prompts draw equal
    tokens in whichever conversation they are asked.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    anonymous: bool = False

    def __post_init__(self) -> None:
        temperature, top_p = _real(self.temperature, "temperature"), _real(self.top_p, "top_p")
        if not (temperature == 0 or _COOLEST <= temperature < float("inf")):
            raise ConfigError(
                f"temperature is 0 (greedy) or a finite number of at least {_COOLEST}, not {temperature}."
            )
        if not 0 < top_p <= 1:
            raise ConfigError(f"top_p is above 0 and at most 1 (off), not {top_p}.")
        top_k = min(_whole(self.top_k, "top_k", 0), _BEYOND - 1)  # more than any vocabulary is no limit
        seed = _whole(self.seed, "seed", -(2**63))
        _settle(self, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


@dataclass(frozen=True, slots=True)
class Length:
    """Exactly `tokens` tokens, end-of-sequence ignored."""

    tokens: int

    def __post_init__(self) -> None:
        _settle(self, tokens=_whole(self.tokens, "max_new_tokens", 1))

    @property
    def max_new_tokens(self) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Forced:
    """Logits are computed and their argmax and margin recorded; the given token is appended."""

    tokens: TokenArray[int]

    def __post_init__(self) -> None:
        _whole(len(self.tokens), "The number of forced tokens", 1)

    @property
    def max_new_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Free:
    """Until end of sequence, one of the stop strings, or `max_new_tokens`."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _settle(self, max_new_tokens=_whole(self.max_new_tokens, "max_new_tokens", 1))
        if not all(text_of(stop, "Each stop string") for stop in self.stop):
            raise ConfigError('A stop string is empty, and every reply begins with ""; leave stop out for none.')


Output = Length | Forced | Free


@dataclass(frozen=True, slots=True)
class Fork:
    """A new conversation begins as another one does: with the first `tokens` tokens of `session`.

    takes_kv: the other one is not expected to go on from there, so where blocks cannot be shared the new one gets them.
    """

    session: str
    tokens: int
    takes_kv: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """What whoever asks says of the beginning of a prompt. tokens: leading ones that were known before.

    lost: why this engine may have none of their KV. edited: they were asked at another place; restarted: an earlier engine
    computed them, and the disk may have them; kept: this engine computed them, and they count as new where it has forgotten
    the conversation for its age.
    """

    tokens: int
    lost: Literal["edited", "restarted", "kept"] = "edited"

    def __post_init__(self) -> None:
        _settle(self, tokens=_whole(self.tokens, "history", 0))


StopReason = Literal["tool_use", "end_turn"]
LONGEST_S = 1e9  # 30 years; policies reckon with it in floats


@dataclass(frozen=True, slots=True)
class Hint:
    """Of the time between the end of a reply and the next request of its conversation; None: nothing is said.

    stop_reason: how the reply ended: the model called a tool and waits for the result, or it is the person's turn.
    tool: which one. expected_s: seconds that the client expects to pass. keep_s: seconds after which it no longer asks for
    the conversation to be kept (`keep_alive` of the API). Nobody says what only a schedule can know.
    """

    stop_reason: StopReason | None = None
    tool: str | None = None
    expected_s: float | None = None
    keep_s: float | None = None

    def __post_init__(self) -> None:
        if self.stop_reason is not None and self.stop_reason not in get_args(StopReason):
            raise ConfigError(f"stop_reason is one of {', '.join(get_args(StopReason))}, not {self.stop_reason!r}.")
        if self.tool is not None and (not isinstance(self.tool, str) or not self.tool):
            raise ConfigError(f"tool is the name of a tool, not {self.tool!r}.")
        for name in ("expected_s", "keep_s"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S
            ):
                raise ConfigError(f"{name} is a number of seconds from 0 to {LONGEST_S:.0e}.")


@dataclass(slots=True)
class Request:
    """One turn of one conversation.

    turn: its number, from 1; UNNUMBERED: the engine counts the turns of a conversation nobody has planned ahead.
    prompt: token ids, from the conversation's first. What the engine holds of it is kept as far as both begin alike, and
        truncated beyond.
    intended_s: arrival by the schedule, in seconds of the system's clock; TTFT starts here, so that queueing counts.
    history: where whoever asks knows more of it than the engine does.
    next_use_s: when the conversation will be asked again, by the schedule; only an offline policy reads it.
    fork: what the conversation begins with if this request is its first and that other one is known; else nothing.
    tenant: conversations of two tenants share no KV, in caches that share by content.
    hint: what the client says of the time after the reply; policies read it (Session.hint) once the turn is over.
    """

    id: int
    session: str
    turn: int
    prompt: TokenArray[int]
    output: Output
    sampling: Sampling = field(default_factory=Sampling)
    intended_s: float = 0.0
    phase: str = "chat"
    label: str = ""
    iteration: int = 0
    stream: bool = True
    history: History | None = None
    next_use_s: float | None = None
    fork: Fork | None = None
    tenant: str = ""
    hint: Hint | None = None

    def __post_init__(self) -> None:
        text_of(self.session, "session_id")


class Event(NamedTuple):
    """A tuple, since there is one for each token. at_s: seconds of the system's clock. turn: set on `finished` only, the
    TurnRecord that whoever keeps the books has made of the request. tokens: how many; more than one, of which only the
    number is told, where whoever polls has asked for no more (Engine.counts_windows), and at_s is then that of the last of
    them."""

    kind: Literal["first_token", "token", "finished"]
    request_id: int
    at_s: float
    token: int | None = None
    turn: Any = None
    tokens: int = 1
