"""What happens in the core, told to whoever keeps books of it. The core reads nothing back, and knows no book."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pensieve.core.plan import Repeats, StepPlan, StepResult, Tier
from pensieve.core.request import Request, TokenArray
from pensieve.core.session import Run, Session

NOBODY_NOW = -1
"""Instead of a session's number: no session of this run."""


class Found(NamedTuple):
    """Where an admission found KV before its plan changed anything, as ascending maximal runs.

    shared: also of positions that other sessions wrote. names: of the prompt's full blocks, where the cache knows blocks by
    content; stranded: those of them that are there, and of no use behind a gap.
    """

    gpu: tuple[Run, ...] = ()
    cpu: tuple[Run, ...] = ()
    shared: bool = False
    names: Sequence[bytes] | None = None
    stranded: frozenset[int] = frozenset()


class Admission(NamedTuple):
    """work: positions without KV on GPU or on the way there, ascending. table: GPU blocks of the session from chunk 0.

    found: None for a request that is resumed. loaded_tokens: those on the way to the GPU. again_tokens: on CPU, and computed
    again while others load. A load may still be under way when a later plan of the request is launched; a plan with a
    position above a loaded chunk waits for it. loading: blocks that come from the CPU. read: positions that come from a tier
    below it. read_ticket: of a move before whose end nothing is computed, unless there is nothing else to compute.
    """

    work: tuple[Run, ...]
    table: tuple[int, ...]
    found: Found | None = None
    loading: int = 0
    loaded_tokens: int = 0
    again_tokens: int = 0
    read_ticket: int | None = None
    read: tuple[Run, ...] = ()


class Iterations(NamedTuple):
    """Some that followed each other: when each ended, how long it computed, and how long that waited for a transfer."""

    ended_s: TokenArray[float]
    compute_ms: TokenArray[float]
    stall_ms: TokenArray[float]


Computed = tuple[int, int | None, float | None]
"""A row that was computed: its request; the token that was appended to its output, None where the row was not sampled; the
margin (top logit less the second), None where it is not known."""


class Facts:
    """A sink of facts; every method does nothing. Whoever keeps books overrides what it wants to hear.

    Each fact is told when it holds, at the time told last by `at`, unless it is named for what is about to happen.
    """

    def at(self, now_ns: int) -> None:
        """What follows happens at this time of the engine's clock."""

    # -- tiers and their blocks ---------------------------------------------------------------------------------------

    def tier(self, tier: Tier, blocks: int, earlier: Iterable[int] = ()) -> None:
        """There is a tier of so many blocks. earlier: those that have KV of an earlier run."""

    def held(self, tier: Tier, blocks: Sequence[int], session: int) -> None:
        """A session (its number) has taken free blocks."""

    def freed(self, tier: Tier, blocks: Sequence[int]) -> None:
        """Blocks are free again."""

    def passed_on(self, tier: Tier, blocks: Sequence[int], session: int) -> None:
        """Blocks that are not free serve this session (its number) from now on."""

    # -- sessions -----------------------------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session has begun."""

    def began_as(self, session: Session) -> None:
        """The session has begun as another one: what it has computed, that one had."""

    def truncating(self, session: Session, length: int) -> None:
        """The session is about to keep its first `length` tokens only."""

    def runs(self, session: Session) -> None:
        """A request of the session runs from now on."""

    def rests(self, session: Session) -> None:
        """No request of the session runs any more."""

    def closed(self, session: Session) -> None:
        """The session is forgotten."""

    # -- KV is lost ---------------------------------------------------------------------------------------------------

    def room_for(self, session: Session, now_s: float) -> None:
        """What is lost from now on makes room for this session."""

    def lost(self, session: Session, start: int, stop: int) -> None:
        """Chunks [start, stop) have given up their last copy in memory."""

    def lost_content(self, name: bytes) -> None:
        """A block has been evicted whose content has this name."""

    def not_lost(self, session: Session, start: int, stop: int) -> None:
        """Whatever was lost of chunks [start, stop) is no longer why they lack KV, if they do."""

    def moved(self, source: Session, target: Session, index: int) -> None:
        """A chunk was lost to a session that now has it at the same index."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request, turn: int, now_s: float) -> None:
        """A request has come. turn: its number."""

    def admitting(self, request: Request, session: Session, keep: int, suffix: TokenArray[int]) -> None:
        """A request is about to be admitted: its session will keep its first `keep` tokens, and append `suffix`."""

    def admitted(self, request: Request, session: Session, admission: Admission, now_s: float) -> None:
        """The request runs, for the first time."""

    def resumed(self, request: Request, session: Session, admission: Admission, misread: bool) -> None:
        """It runs again. misread: what it read from a tier below was something else; False: it had been preempted."""

    def ended(self, request: Request, status: str, reason: str | None, now_s: float, error: str | None) -> Any:
        """It is over. Returns what Event.turn shall tell of it."""
        return None

    # -- steps --------------------------------------------------------------------------------------------------------

    def scheduled(self, took_ns: int) -> None:
        """Scheduler and cache have worked for so long, on the wall."""

    def expired(self) -> None:
        """A session was idle for too long, or one too many."""

    def awaited(self, ticket: int, session: Session) -> None:
        """A request of the session waits for this copy between the GPU and the CPU tier, which the next plan has."""

    def collected(self, plan: StepPlan | None, result: StepResult) -> None:
        """A plan is over; None: copies alone."""

    def computed(self, plan: StepPlan, result: StepResult, rows: Sequence[Computed], now_s: float) -> None:
        """What the plan's valid rows yielded."""

    def repeated(self, plan: StepPlan, repeats: Repeats, prefills: Sequence[int]) -> None:
        """It stood for further iterations. prefills: the requests of those rows that go on through all of them."""

    def decoded(self, request: Request, tokens: TokenArray[int], iterations: Iterations) -> None:
        """What a request has got without rows of its own, a token an iteration."""


SILENT = Facts()
