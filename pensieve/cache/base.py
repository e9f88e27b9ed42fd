"""The contract of the cache: what the scheduler and the engine ask a manager, phase by phase."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pensieve.cost.base import CostModel
from pensieve.holding import Holding
from pensieve.ledger import Loss, Missed, joined
from pensieve.plan import Copy, DiskLoad, DiskStore
from pensieve.request import TokenArray
from pensieve.session import Session

if TYPE_CHECKING:
    from pensieve.cache.disk import DiskTier

Run = tuple[int, int]
"""Half-open interval of positions."""


def without(runs: Iterable[Run], gone: Iterable[Run]) -> tuple[Run, ...]:
    """Return what is left of `runs` once the intervals `gone` are cut out of them."""
    left = list(runs)
    for first, last in gone:
        parts = [((start, min(stop, first)), (max(start, last), stop)) for start, stop in left]
        left = [part for both in parts for part in both if part[0] < part[1]]
    return tuple(left)


def tokens_in(runs: Iterable[Run]) -> int:
    """How many positions the runs have together."""
    return sum(stop - start for start, stop in runs)


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join neighbouring intervals. runs: ascending."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the history of an admitted prompt was, in tokens, before its plan changed anything.

    gpu_hit + cpu_hit + disk_hit + recomputed = history; history + new = prompt; shared_hit <= new.
    elsewhere: at most so many leading tokens were in another session before, whose blocks may serve this one; anywhere:
    the same of any session, this one included. None: not known. They say what could have hit, not what did.
    missed: why those positions without KV that were computed before, or would have been but for an edit, have none.
    on_cpu, on_disk: the positions that cpu_hit and disk_hit count.
    """

    prompt: int
    history: int
    gpu_hit: int
    cpu_hit: int
    shared_hit: int = 0
    elsewhere: int | None = None
    anywhere: int | None = None
    missed: tuple[Missed, ...] = ()
    disk_hit: int = 0
    on_cpu: tuple[Run, ...] = ()
    on_disk: tuple[Run, ...] = ()

    @property
    def recomputed(self) -> int:
        return self.history - self.gpu_hit - self.cpu_hit - self.disk_hit

    @property
    def new(self) -> int:
        return self.prompt - self.history

    def with_disk(self, read: Iterable[Run]) -> Residency:
        """Return a copy that counts these positions as found on disk, and no longer as missed."""
        missed, found = list(self.missed), []
        for start, stop in read:
            end = min(stop, self.history)
            if start < end:
                found.append((start, end))
            left = [replace(one, stop=min(one.stop, start)) for one in missed]
            left += [replace(one, start=max(one.start, end)) for one in missed]
            missed = sorted((one for one in left if one.start < one.stop), key=lambda one: one.start)
        hit = self.disk_hit + tokens_in(found)
        return replace(self, disk_hit=hit, missed=joined(missed), on_disk=(*self.on_disk, *found))

    @property
    def on_gpu(self) -> tuple[Run, ...]:
        """The positions that gpu_hit and shared_hit count."""
        elsewhere = [(one.start, one.stop) for one in self.missed if one.start < self.history]
        return without(((0, self.history + self.shared_hit),), (*elsewhere, *self.on_cpu, *self.on_disk))


@dataclass(frozen=True, slots=True)
class Demand:
    """GPU blocks that an admission takes. blocks: beyond those that the session has. own_available: of those that it has,
    the ones that `available` counts until the session runs."""

    blocks: int
    own_available: int


@dataclass(frozen=True, slots=True)
class Admission:
    """work: positions without KV on GPU or in swap_in, ascending. table: GPU blocks of the session from chunk 0.

    swapped_tokens: those that swap_in brings. again_tokens: those of the work that had been computed before.
    cpu_recomputed_tokens: those of the work that are on CPU and are computed again while others load. swap_in may still be
    under way when a later plan of the request is launched; a plan with a position above a loaded chunk waits for it.
    read: positions that come from disk, with the ticket disk_ticket; `found` counts them, `residency` does not.
    """

    residency: Residency
    work: tuple[Run, ...]
    table: tuple[int, ...]
    swap_in: tuple[Copy, ...]
    swapped_tokens: int
    again_tokens: int
    cpu_recomputed_tokens: int = 0
    disk_ticket: int | None = None
    read: tuple[Run, ...] = ()

    @property
    def found(self) -> Residency:
        """Where the history was, what is read from disk included."""
        return self.residency.with_disk(self.read) if self.read else self.residency

    @property
    def spared(self) -> tuple[tuple[Run, ...], ...]:
        """The positions that were found and are not computed again, by tier (holding.TIERS)."""
        found = self.found
        loaded = without(found.on_cpu, self.work) if self.cpu_recomputed_tokens else found.on_cpu
        return found.on_gpu, loaded, found.on_disk


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


class CacheManager(ABC):
    """Decides where KV is. Every baseline in the engine is one of these, under the same scheduler and worker.

    What it knows is what holds once the plan being made has run: it changes when a plan is made, and a copy counts as done
    when its ticket is reported. Times are seconds of the engine's clock, given as arguments. A query changes nothing.

    request_blocks: the most blocks that one request can have; all there are, unless a subclass says less.
    """

    shares = False
    """A session may use blocks that another one has written, also one that still runs."""

    grows = True
    """Decode takes blocks beyond those of the admission; if not, admissions need keep no reserve for it."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.gpu_blocks = self.request_blocks = gpu_blocks
        self.cpu_blocks = cpu_blocks
        self.counters = CacheCounters()
        self.taker = Loss("", 0.0)
        """For whose request room is being made: what is given up meanwhile is its doing. The scheduler says it."""
        self.holding: Holding | None = None
        """What each session holds, where that is counted."""
        self.disk: DiskTier | None = None
        """The tier below the CPU's, where there is one."""
        self.sessions: dict[str, Session] = {}
        self._sessions_made = 0

    # -- query --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def available(self) -> int:
        """GPU blocks to be had without waiting: free, or evictable without a copy."""

    @property
    @abstractmethod
    def outgoing(self) -> int:
        """GPU blocks that become available when the copies under way are done."""

    @property
    def copies_done(self) -> bool:
        """No copy is under way whose end would change what may be evicted."""
        return True

    @property
    def can_swap_out(self) -> bool:
        """Something could be copied to a CPU tier."""
        return False

    @property
    def spare_cpu_blocks(self) -> int:
        """CPU blocks that are free or hold a second copy: using them for something else loses no KV."""
        return 0

    def on_cpu(self, session: Session) -> bool:
        """Some of its KV is in the CPU tier."""
        return False

    @property
    def gpu_blocks_used(self) -> int:
        """With KV, or reserved for a request that runs."""
        return self.gpu_blocks - self.available

    @property
    def cpu_blocks_used(self) -> int:
        return 0

    @property
    def disk_blocks(self) -> int:
        """Chunks that its disk tier holds at most; 0: it has none."""
        return 0 if self.disk is None else self.disk.blocks

    @property
    def disk_blocks_used(self) -> int:
        return 0 if self.disk is None else self.disk.used

    def free_blocks(self) -> tuple[set[int], set[int]]:
        """GPU and CPU blocks that nobody may read, as far as it knows them by number; for tests."""
        return set(), set()

    @property
    def chosen(self) -> Mapping[str, float]:
        """Settings that it was not given and chose itself, for the record of a trial."""
        return {}

    @abstractmethod
    def demand(self, session: Session, keep: int, length: int) -> Demand:
        """What admitting a prompt of `length` tokens takes, whose first `keep` are the session's own."""

    def find(self, name: str) -> Session | None:
        return self.sessions.get(name)

    def names(self) -> list[str]:
        return list(self.sessions)

    @abstractmethod
    def places(self, session: Session) -> str:
        """Where the KV of each of its chunks is, a letter each: G on GPU, B on GPU and CPU, C on CPU, D on disk,
        - nowhere."""

    # -- admit --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        """Truncate to `keep` tokens, append `suffix` (at least one), start the session, and reserve blocks for all of its
        tokens and one to decode.

        known overrides the history of the accounting. The caller has checked that `available` covers the demand.
        """

    @abstractmethod
    def resume(self, session: Session, now_s: float) -> Admission:
        """As `admit`, for a preempted request, whose tokens the session has already."""

    @abstractmethod
    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        """Make room for positions below `length`: (first chunk, block ids) added, possibly none; None where no block is
        available."""

    # -- progress -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        """Record that the plan being made computes these positions."""

    @abstractmethod
    def launched(self, step: int) -> None:
        """Record that the plan of this number goes to the worker."""

    @abstractmethod
    def collected(self, step: int) -> None:
        """Record that plans up to this number are over."""

    @abstractmethod
    def complete(self, tickets: Sequence[int]) -> None:
        """Record that the copies with these tickets are done."""

    @abstractmethod
    def void(self, tickets: Sequence[int]) -> list[Session]:
        """Record that these copies failed, or their plan did: nothing they wrote is valid. Returns the running
        sessions that lost KV on GPU by it; their requests cannot go on."""

    @abstractmethod
    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        """Invalidate the KV on GPU of every chunk that holds one of these positions: the plan that computed them failed."""

    @abstractmethod
    def preempt(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        """Stop a request in mid-turn: its chunks may be evicted from now on. Returns the copies, started at once, of those
        that are on GPU only."""

    def end_preempted(self, session: Session, now_s: float) -> None:
        """Give up what `release` gives up beyond `preempt`: a preempted request has ended without running again."""
        return None

    @abstractmethod
    def release(self, session: Session, now_s: float) -> None:
        """End a request: its chunks may be evicted from now on, and reserved blocks that were not used are freed."""

    def release_unfinished(self, session: Session, now_s: float) -> None:
        """As `release`, for a request that waits again: its turn is not over."""
        self.release(session, now_s)

    def attribute_losses_to(self, session: Session, now_s: float) -> None:
        """Attribute what is given up from now on to a request of this session."""
        self.taker = Loss(session.name, now_s)
        self.set_time(round(now_s * 1e9))

    # -- evict --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def swap_out(self, blocks: int, now_s: float, urgent: bool) -> tuple[Copy, ...]:
        """Start copies until `blocks` more GPU blocks are available or outgoing; drops where no CPU block can be freed."""

    def swap_out_spare(self, blocks: int, now_s: float) -> tuple[Copy, ...]:
        """As swap_out, ahead of time, as far as there are CPU blocks that nothing has its only copy in."""
        return ()

    def exchange(self, session: Session, lacking: int, now_s: float) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Make a waiting session that lacks so many GPU blocks change places, a part at a time: load what it has on
        CPU, and copy out as much of what must leave the GPU. Returns the copies to the GPU and those to the CPU."""
        return (), self.swap_out(lacking - self.outgoing, now_s, urgent=True)

    @abstractmethod
    def drop(self, blocks: int, now_s: float) -> int:
        """Give up GPU chunks that are not on CPU, without a copy; returns how many blocks became available."""

    # -- disk ---------------------------------------------------------------------------------------------------------

    def use_disk(self, blocks: int, load_s: float, layers: int, cost: CostModel, kept: Mapping[bytes, int]) -> None:
        """Add a disk tier: a file store of so many chunks. Called once, before the first request; see DiskTier for the
        arguments. Managers without a CPU tier ignore it."""
        return None

    @property
    def has_disk_work(self) -> bool:
        """Writes to disk or reads from it were decided that no plan has taken yet."""
        return self.disk is not None and self.disk.has_work

    def take_disk_work(self) -> tuple[DiskStore | DiskLoad, ...]:
        """Return, once, the writes to disk and the reads from it that the plan being made shall perform."""
        return () if self.disk is None else self.disk.take_work()

    def remove_from_disk(self, keys: Iterable[bytes]) -> None:
        """Remove these chunks from the index of the disk tier: the file store does not hold them."""
        if self.disk is not None:
            self.disk.remove(keys)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def set_cost_model(self, cost: CostModel, layers: int, batch_tokens: int) -> None:
        """Set what computing and loading take on this machine. Called once, before the first request."""
        return None

    def watch_content(self) -> None:
        """Record from now on how much of each prompt other sessions have had (Residency.elsewhere, anywhere), where
        sessions can share KV. Called before the first request, if at all."""
        return None

    def count_holding(self) -> None:
        """Count from now on what each session holds of each tier (holding.py). Called before the first request and
        after `use_disk`, if at all. Its memory grows with the number of sessions ever asked."""
        assert not self._sessions_made
        self.holding = Holding()
        self._count_blocks(self.holding)

    @abstractmethod
    def _count_blocks(self, holding: Holding) -> None:
        """Have the pools report every block that they give out or take back to `holding`."""

    def set_time(self, now_ns: int) -> None:
        """Set the time, in ns of the engine's clock, at which the following changes count as made."""
        if self.holding is not None:
            # With plans in flight, the time at which one ended may be before that at which the next was made.
            self.holding.now_ns = max(self.holding.now_ns, now_ns)

    def open(self, name: str, now_s: float, tenant: str = "") -> Session:
        """Return the session of that name; make it if it is new."""
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = Session(name, self._sessions_made, now_s, now_s, tenant=tenant)
            if self.holding is not None:
                session.account = self.holding.open(session.number, name)
            self._sessions_made += 1
        return session

    def recall(self, session: Session, tokens: TokenArray[int]) -> None:
        """Restore the tokens that a new session had before the engine was started again: all but the last count as
        computed, though none of their KV is in a tier of this engine but the disk."""
        session.recall(tokens)

    def receive(self, session: Session, tokens: TokenArray[int], lengths: Sequence[int], now_s: float) -> int:
        """Take over KV of an idle session that came from another machine. lengths: by chunk of `tokens`, the leading
        offsets that came. Returns the number of tokens whose KV is taken; managers without a CPU tier take none."""
        return 0

    def fork(self, parent: Session, child: Session, length: int, takes_kv: bool) -> None:
        """Begin a new session with the first `length` tokens of another one. A cache that shares by content finds
        their KV by itself; one that does not may move the parent's to the child, if it `takes_kv`."""
        child.begin_as(parent, length)

    def expect(self, session: Session, next_use_s: float | None) -> None:
        """Set when the schedule will ask it again; None: not known to return. Read by offline policies only."""
        session.next_use_s = next_use_s

    def mark_waiting(self, session: Session, arrival: int, now_s: float) -> None:
        """Record that a request of it waits: its chunks are victims only after those of every session that has none.
        arrival: the request's place in the order of admission."""
        session.mark_waiting(arrival)

    def unmark_waiting(self, session: Session, arrival: int, now_s: float) -> None:
        session.unmark_waiting(arrival)

    @abstractmethod
    def truncate(self, session: Session, length: int, computed: int | None = None) -> None:
        """Roll the session back (Session.rollback), and give up the KV of the tokens that are cut off."""

    @abstractmethod
    def forget(self, session: Session) -> None:
        """Remove the session and its KV, as though it had never been asked."""

    def let_go(self, session: Session) -> bool:
        """Remove a session that nobody will ask again, unless it has KV here or something depends on it. Returns
        whether it was removed; nothing changes for the others."""
        return False

    def _close(self, session: Session) -> None:
        """Remove it from the sessions, and close its account of what it held."""
        del self.sessions[session.name]
        if self.holding is not None:
            self.holding.close(session.number)

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant; for tests, its cost grows with everything there is."""


def edited_run(session: Session, keep: int, suffix: TokenArray[int], history: int) -> tuple[Missed, ...]:
    """Return the positions behind `history` at which the prompt has other tokens than the session had computed. Called
    before the session is truncated to `keep`."""
    if keep >= len(session.tokens) or not suffix or suffix[0] == session.tokens[keep]:
        return ()
    return joined([Missed(max(history, keep), min(session.computed, keep + len(suffix)), "edited")])
