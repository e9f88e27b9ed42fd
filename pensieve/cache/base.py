"""The protocols of the cache: what a manager offers the scheduler, and what an eviction policy offers a manager."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pensieve.cache.session import Session
from pensieve.plan import Copy
from pensieve.request import TokenArray

Run = tuple[int, int]
"""Half-open interval of positions."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What every policy factory is called with.

    recompute_s(context_tokens): seconds to recompute the chunk that ends at that context length. load_s: seconds to bring
    one chunk back from CPU.
    """

    chunk_tokens: int
    gpu_blocks: int
    cpu_blocks: int
    recompute_s: Callable[[int], float]
    load_s: float
    seed: int


class EvictionPolicy(Protocol):
    """Which chunk goes first: the lowest score, ties by last active, conversation, chunk index.

    Only the leading evictable chunk of each conversation is a candidate. Candidates of one bucket are ordered by `order`,
    lowest first, and that order must not change while their conversations are idle; `score` then compares only the first
    of each bucket, at the time of the choice. So a choice is exact although it looks at one candidate a bucket.

    A policy may also have: `whole_conversations = True` (a choice goes on until the conversation has nothing left to
    evict); `needs_future = True` (it reads Session.next_use_s and is refused for live traffic); `observe(session, now_s)`
    (called at every admission); `version: int` (a change of it means that bucket and order of everything changed).
    """

    def bucket(self, session: Session, chunk: int) -> Hashable: ...

    def order(self, session: Session, chunk: int) -> float: ...

    def score(self, bucket: Hashable, order: float, now_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the history of an admitted prompt was, in tokens, before its plan changed anything.

    gpu_hit + cpu_hit + recomputed = history; history + new = prompt; shared_hit <= new.
    elsewhere: at most so many leading tokens were in another conversation before, whose blocks may serve this one; anywhere:
    the same of any conversation, this one included. None: not known. They say what could have hit, not what did.
    """

    prompt: int
    history: int
    gpu_hit: int
    cpu_hit: int
    shared_hit: int = 0
    elsewhere: int | None = None
    anywhere: int | None = None

    @property
    def recomputed(self) -> int:
        return self.history - self.gpu_hit - self.cpu_hit

    @property
    def new(self) -> int:
        return self.prompt - self.history


@dataclass(frozen=True, slots=True)
class Demand:
    """Blocks an admission takes, and how many of the `available` ones are its own (pinned by it, so no longer available)."""

    blocks: int
    own_available: int


@dataclass(frozen=True, slots=True)
class Admission:
    """work: positions without KV on GPU or in swap_in, ascending. table: GPU blocks of the conversation from chunk 0.

    swapped_tokens come back with swap_in; again_tokens of the work were computed before, and dropped since or, the
    cpu_recomputed_tokens, not: they are on CPU and computed again while others load. swap_in may still be under way when
    a later plan of the request is launched; a plan with a position above a loaded chunk waits for it.
    """

    residency: Residency
    work: tuple[Run, ...]
    table: tuple[int, ...]
    swap_in: tuple[Copy, ...]
    swapped_tokens: int
    again_tokens: int
    cpu_recomputed_tokens: int = 0


@dataclass(slots=True)
class CacheCounters:
    """Counts since start. evicted: GPU copies given up, whether or not the KV lived on. dropped: chunks whose KV was lost."""

    evicted_chunks: int = 0
    dropped_chunks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class CacheManager(Protocol):
    """Decides where KV is. Every baseline in the engine is one of these, under the same scheduler and worker.

    The metadata advances when a plan is made; copies become true when their ticket completes. All times in seconds of the
    engine's clock, given as arguments. Predicates (`demand`, `available`) change nothing.

    A manager may also have `weigh(cost, layers, batch_tokens)`: called once, before the first request, with what the
    machine takes to compute and to load.
    """

    chunk_tokens: int
    gpu_blocks: int
    cpu_blocks: int
    counters: CacheCounters

    request_blocks: int
    """The most blocks that one request can have."""

    shares: bool
    """A conversation may use blocks that another one has written, also one that still runs."""

    grows: bool
    """Decode takes blocks beyond those of the admission; if not, admissions need keep no reserve for it."""

    @property
    def available(self) -> int:
        """GPU blocks to be had without waiting: free, or evictable without a copy."""
        ...

    @property
    def outgoing(self) -> int:
        """GPU blocks that become available when the copies under way are done."""
        ...

    def open(self, name: str, now_s: float) -> Session:
        """The conversation of that name, made if new."""
        ...

    def find(self, name: str) -> Session | None: ...

    def names(self) -> list[str]: ...

    def expect(self, session: Session, next_use_s: float | None) -> None:
        """When it will be asked again, by the schedule; None: not known to return. For offline policies."""

    def hold(self, session: Session, now_s: float) -> None:
        """A request of it waits: its chunks are victims only after every idle one."""

    def unhold(self, session: Session, now_s: float) -> None: ...

    def demand(self, session: Session, keep: int, length: int) -> Demand:
        """What admitting a prompt of `length` tokens takes, whose first `keep` are the conversation's own."""
        ...

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        """Truncate to `keep` tokens, append `suffix` (at least one), pin, and reserve all blocks and one for decode.

        known overrides the history of the accounting. The caller has checked that `available` covers the demand.
        """
        ...

    def resume(self, session: Session, now_s: float) -> Admission:
        """Pin and reserve for a suspended request; the tokens stand as they are."""
        ...

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        """Make room for positions below `length`: (first chunk, block ids) added, possibly none; None where no block is
        available."""
        ...

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        """The plan being made computes these positions."""

    def release(self, session: Session, now_s: float) -> None:
        """The turn ended: unpin; unused reserved blocks come back."""

    def suspend(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        """Unpin in mid-turn and copy what is dirty out, urgently."""
        ...

    def end_suspended(self, session: Session, now_s: float) -> None:
        """The turn ended while it was suspended: what a release frees beyond the pins goes now."""

    def swap_out(self, blocks: int, now_s: float, urgent: bool) -> tuple[Copy, ...]:
        """Start copies until `blocks` more GPU blocks are available or outgoing; drops where no CPU block can be freed."""
        ...

    def drop(self, blocks: int, now_s: float) -> int:
        """Give up GPU chunks that are not on CPU, without a copy; returns how many blocks became available."""
        ...

    def complete(self, tickets: Sequence[int]) -> None: ...

    def void(self, tickets: Sequence[int]) -> list[Session]:
        """These copies failed, or their plan did: nothing they wrote is valid. Returns the running conversations that lost
        KV on GPU by it; their requests cannot go on."""
        ...

    def fail(self, session: Session, written: Iterable[Run]) -> None:
        """A plan that computed these positions failed: no KV on GPU of the chunks it wrote is valid."""

    def truncate(self, session: Session, length: int) -> None: ...

    def forget(self, session: Session) -> None: ...

    def launched(self, step: int) -> None: ...

    def collected(self, step: int) -> None: ...

    def check(self) -> None:
        """Assert every invariant; for tests, its cost grows with everything there is."""
