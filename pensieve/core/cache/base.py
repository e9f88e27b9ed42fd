"""The contract of the cache: what the scheduler asks a manager, phase by phase, and what a manager asks a tier below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pensieve.core.facts import SILENT, Admission, Facts
from pensieve.core.machine import CostModel
from pensieve.core.plan import GPU, Move, Moved, StartReport, Tier
from pensieve.core.request import TokenArray
from pensieve.core.session import ChunkRun, Node, Run, Session


@dataclass(slots=True)
class CacheCounters:
    """Counts since start. evicted: chunks that gave up their GPU block to make room for other KV, whether on CPU or not.
    dropped: chunks that gave up their last copy in memory to make room. What goes with a turn that is over, an edit or a
    conversation that is forgotten makes room for nobody, and is in neither. extra: what one manager alone counts, by metric
    name."""

    evicted_chunks: int = 0
    dropped_chunks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class LowerTier:
    """Keeps full chunks that would be lost, and says which are worth reading: a plug-in. These methods are those of no tier:
    they store nothing and find nothing."""

    name: Tier = ""
    """In moves, facts and gauges."""

    blocks = 0
    """Chunks that it holds at most."""

    bandwidth = 0.0
    """Bytes a second at which a simulated machine reads and writes there."""

    transfer: Callable[..., Any] | None = None
    """What performs its moves on a real device, as TorchOptions.transfer; None: nothing can."""

    def begin(
        self, report: StartReport, chunk_tokens: int, layers: int, cost: CostModel, counts: dict[str, float]
    ) -> None:
        """The worker has started. cost: what computing takes. counts: for what it has done, by metric name."""

    @property
    def used(self) -> int:
        """Chunks that it holds."""
        return 0

    def holds(self, session: Session, index: int) -> bool:
        """Whether it has this chunk, as far as its name is known. Any thread may ask."""
        return False

    def worth_reading(self, session: Session, length: int) -> list[ChunkRun]:
        """Choose which chunks without KV are read, of those in its first `length` tokens, as runs: those with which the
        prompt is predicted to be done sooner than if they were computed with the rest of it."""
        return []

    def store(self, node: Node, start: int, stop: int, source: Tier, ticket: int) -> Move | None:
        """Store the full ones of these chunks of a node, which are about to give up their blocks in `source`, the last that
        have their KV. Returns the move to be planned, if there is one."""
        return None

    def read(self, session: Session, runs: Iterable[ChunkRun], ticket: int) -> Move:
        """Read these chunks, which were `worth_reading`, into the GPU blocks that they have."""
        return Move(ticket, self.name, GPU, (), ())

    def finish(self, moved: Iterable[Moved]) -> None:
        """These moves are over, among them some that are none of its own."""

    def forget(self, session: Session) -> None:
        """Delete the chunks of the session from the store, also those that a fork has in common with it."""

    def report_to(self, facts: Facts) -> None:
        """Tell from now on which session a block serves: the one that wrote or read it last."""

    def check(self) -> None:
        """Assert every invariant; for tests."""


NO_LOWER_TIER = LowerTier()


class Copying:
    """When copies are made; here: never. Room says how the paper does it, plugins/overlap.py has other ways."""

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> None:
        """Start the copies that the plan being made shall have. head: whose request lacks so many blocks; None: nobody
        does."""
        return None

    def on_its_way(self, in_flight: bool) -> bool:
        """Whether anything else than `outgoing` gives the head of the queue blocks. in_flight: a plan is."""
        return False

    def begins_below(self, prefilled: Sequence[Session]) -> int:
        """Of how many available and outgoing blocks the next plan would copy ahead of time, while these are prefilled."""
        return 0

    def changes_places(self, head: Session) -> bool:
        """Each plan may load more of what the head of the queue has on the CPU."""
        return False


class Room(Copying, ABC):
    """The GPU blocks of a manager, as those ask who decide when blocks are made free: the scheduler and strategies of copying
    ahead. Answers hold until the manager or a session of it changes. The defaults are those of a single tier, which copies
    nothing and whose idle blocks are all available."""

    grows = True
    """Decode takes blocks beyond those of the admission; if not, admissions need keep no reserve for it."""

    low = high = 0
    """Watermarks of the GPU blocks that are free or clean, or will be."""

    chunk_blocks = 1
    """GPU blocks that a further chunk of a request takes at most."""

    frees = False
    """A request that goes on gives up blocks: each of its plans is made by itself."""

    shares = False
    """A session may use blocks that another one has written, also one that still runs."""

    stores = False
    """Full blocks are copied to another tier as they are computed: `storing` says when."""

    stores_replies = False
    """Also those that decodes fill."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Blocks to be had without waiting: free, or evictable without a copy."""

    @abstractmethod
    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        """Return how many blocks beyond those available an admission takes, of a prompt whose first `keep` tokens are the
        session's own; 0 or less: it fits."""

    def awaits(self, session: Session, prompt: TokenArray[int]) -> bool:
        """A request that runs is about to compute what this prompt begins with, and what would be computed twice if it was
        admitted now."""
        return False

    @property
    def outgoing(self) -> int:
        """Blocks that become available when the copies under way are done."""
        return 0

    @property
    def can_swap_out(self) -> bool:
        """Something could be copied to a CPU tier."""
        return False

    def storing(self, prefilling: bool) -> bool:
        """A plan that goes on as the last one may have moves, where no decode fills a block. prefilling: a prefill goes
        on."""
        return False

    def swap_out(self, blocks: int, now_s: float, waiting: Session | None) -> None:
        """Start copies until `blocks` more are available or outgoing; drops where no CPU block can be freed. waiting: whose
        request cannot go on without them; None: they are made ahead of time."""
        return None  # there is no other tier

    def swap_out_all(self, session: Session, now_s: float) -> None:
        """Start copies of all that a session which does not run has on GPU only; its request waits for them."""
        return None

    def drop(self, blocks: int, now_s: float) -> int:
        """Give up GPU chunks that are not on CPU, without a copy; returns how many blocks became available."""
        return 0


class Broken(NamedTuple):
    """Running sessions that lost KV on GPU, by a copy from the CPU that failed, or by a read of a tier below it."""

    copied: tuple[Session, ...] = ()
    read: tuple[Session, ...] = ()


class CacheManager(ABC):
    """Decides where KV is. Every baseline in the engine is one of these, under the same scheduler and worker. The scheduler
    alone calls it.

    What it knows is what holds once the plan being made has run: it changes when a plan is made, and a copy counts as done
    when its ticket is reported. Times are seconds of the engine's clock, given as arguments.

    chunk_tokens, gpu_blocks, cpu_blocks: as made, for good. request_blocks: the most blocks that one request can have; all
    there are, unless a subclass says less. sessions: by name; `open` makes one, `forget` removes it. below: the tier under
    the CPU's.
    """

    room: Room
    """What blocks there are, and ways to make more available."""

    drops = False
    """Gives KV that would be lost to a tier below."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.gpu_blocks = self.request_blocks = gpu_blocks
        self.cpu_blocks = cpu_blocks
        self.counters = CacheCounters()
        self.facts: Facts = SILENT
        self.below: LowerTier = NO_LOWER_TIER
        self.sessions: dict[str, Session] = {}
        self._sessions_made = 0

    def begin(
        self,
        *,
        cost: CostModel | None = None,
        layers: int = 1,
        batch_tokens: int = 1,
        below: LowerTier | None = None,
        report: StartReport | None = None,
        facts: Facts | None = None,
        pool: Callable[[int, Tier], Any] | None = None,
    ) -> None:
        """Take what it goes by from now on; each part is given once, before the first request. cost: what computing and
        loading take, for a model of so many layers and iterations of so many positions. below: a tier under the CPU's,
        with what the worker has reported. facts: where to tell what happens. pool: makes the pools of
        both tiers in place of BlockPool."""
        if cost is not None:
            self._price(cost, layers, batch_tokens)
        if below is not None and self.drops:
            assert cost is not None and report is not None
            self.below = below
            below.begin(report, self.chunk_tokens, layers, cost, self.counters.extra)
            below.report_to(self.facts)
        if facts is not None:
            assert not self.sessions
            self.facts = facts
            facts.tier("gpu", self.gpu_blocks)
            facts.tier("cpu", self.cpu_blocks)
            self.below.report_to(facts)

    def _price(self, cost: CostModel, layers: int, batch_tokens: int) -> None:
        """Go by these costs; a manager that restores nothing has no use for them."""
        return None

    # -- asked by gauges, the record of a trial and tests --------------------------------------------------------------

    @property
    @abstractmethod
    def gpu_blocks_used(self) -> int:
        """With KV, or reserved for a request that runs."""

    @property
    def cpu_blocks_used(self) -> int:
        return 0

    def free_blocks(self) -> tuple[set[int], set[int]]:
        """GPU and CPU blocks that nobody may read, as far as it knows them by number; for tests."""
        return set(), set()

    @property
    def chosen(self) -> Mapping[str, float]:
        """Settings that it was not given and chose itself, for the record of a trial."""
        return {}

    @abstractmethod
    def places(self, session: Session) -> str:
        """Where the KV of each of its chunks is, a letter each: G on GPU, B on GPU and CPU, C on CPU, D on disk,
        - nowhere."""

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant; for tests, its cost grows with everything there is."""

    # -- a session ----------------------------------------------------------------------------------------------------

    def open(self, name: str, now_s: float, tenant: str = "") -> Session:
        """Return the session of that name, which stays the same object until it is forgotten; make it if it is new."""
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = Session(name, self._sessions_made, now_s, now_s, tenant=tenant)
            self._sessions_made += 1
            self.facts.opened(session)
        return session

    def fork(self, parent: Session, child: Session, length: int, takes_kv: bool) -> None:
        """Begin a new session with the first `length` tokens of another one. A cache that shares by content finds
        their KV by itself; one that does not may move the parent's to the child, if it `takes_kv`."""
        child.begin(parent.tokens[:length], parent.computed)
        self.facts.began_as(child)

    def reorder(self, session: Session) -> None:
        """Sort its chunks among the victims anew: whether a request of it waits has changed, or when it will be asked
        again."""
        return None

    def truncate(self, session: Session, length: int, computed: int | None = None) -> None:
        """Roll an idle session back (Session.rollback), and give up the KV of the tokens that are cut off."""
        self.facts.truncating(session, length)
        session.rollback(length, computed)
        self._cut(session, length)

    def _cut(self, session: Session, length: int) -> None:
        """Give up the KV beyond its first `length` tokens, where whose it is is known."""
        return None

    def forget(self, session: Session, if_empty: bool = False) -> bool:
        """Remove an idle session and its KV, as though it had never been asked. if_empty: only where it has no KV here and
        nothing depends on it, so that nothing changes for the others. Returns whether it is gone."""
        if not if_empty:
            self._give_up(session)
        elif self.sessions.get(session.name) is not session:
            return True  # forgotten already
        elif self._holds(session):
            return False
        del self.sessions[session.name]
        self.facts.closed(session)
        self._let_go(session)
        return True

    def _let_go(self, session: Session) -> None:
        """Nobody asks about it or its chunks any more."""
        session.close()

    def _give_up(self, session: Session) -> None:
        """Give up its tokens and KV."""
        self.below.forget(session)
        self.truncate(session, 0)

    @abstractmethod
    def _holds(self, session: Session) -> bool:
        """It has KV here, or something depends on it."""

    # -- a request ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def admit(self, session: Session, keep: int, suffix: TokenArray[int] | None, now_s: float) -> Admission:
        """Truncate to `keep` tokens, append `suffix` (at least one), start the session, and reserve blocks for all of its
        tokens and one to decode. None: its request was preempted, and runs again with the tokens that the session has. The
        caller has seen that nothing is `lacking`. The blocks are the session's until `release`."""

    @abstractmethod
    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        """Make room for positions below `length`: (first chunk, block ids) added, possibly none; None where no block is
        available."""

    @abstractmethod
    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        """Record that the plan being made computes these positions: they have KV from now on."""

    @abstractmethod
    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        """Invalidate the KV on GPU of every chunk that holds one of these positions: the plan that computed them failed."""

    @abstractmethod
    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        """Stop a request: its chunks may be evicted from now on, and reserved blocks that were not used are freed. finished:
        False where it waits again; if it then ends without having run, it is released once more."""

    # -- plans and copies ---------------------------------------------------------------------------------------------

    def plans(self, oldest: int, following: int) -> None:
        """Record that plans [oldest, following) are in flight: the worker may use the blocks that these have. A block that is
        given up meanwhile is not handed out until they are over, where anything is copied."""
        return None

    def take_moves(self) -> tuple[Move, ...]:
        """Return, once, the moves that were decided and that no plan has, for the plan being made."""
        return ()

    def finish(self, moved: Sequence[Moved]) -> Broken:
        """Record that these moves are over. One of a plan that failed counts as failed, and is told of once."""
        assert not moved
        return Broken()
