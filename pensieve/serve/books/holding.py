"""What keeping costs: how many blocks of each tier each session has held, and for how long.

A block is held from the moment it is taken from its pool until it is back: while it is reserved, while it holds KV, and
while it waits in quarantine. At any moment exactly one session pays for it, the last it was given to. Of blocks that
several can use (full blocks of prefix_cache, chunks on disk) that is the one that began to run with it last, or wrote it:
it is for the sake of its last use that the block is still there. A slot of llama_slots is paid for as a whole, by the
session that ran in it last. KV that a fork takes with it is the child's from then on.

Amounts are whole block-nanoseconds, so that nothing is lost by rounding: those of all sessions add up to the integral
of what the tier has given away. A block costs the same work however many there are: the time is subtracted when it comes
and added when it goes.

Beside it, what other sessions have had: how far a prompt could be found in blocks that were not computed for it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.core.facts import NOBODY_NOW
from pensieve.core.plan import Tier
from pensieve.core.session import BlockHash, Session

TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")

EARLIER = "(an earlier run)"
"""Who pays for chunks that the file store had at the start, until somebody reads them."""

_FREE = -2  # of a block that is in its pool


class Held(NamedTuple):
    """What one session has held of one tier, in blocks times ns. idle_block_ns: the part of it while none of its
    requests ran."""

    block_ns: int
    idle_block_ns: int


class Account:
    """Of one session, by tier: the blocks it has now, and the time of all it had. Those it still has count as though
    they had been taken at time 0 and given back, so far, never: `until` adds the time that they have been held."""

    __slots__ = ("_blocks", "_idle_ns", "_ns", "_running", "name")

    def __init__(self, name: str) -> None:
        self.name, self._running = name, False
        self._blocks, self._ns, self._idle_ns = ([0] * len(TIERS) for _ in range(3))

    def change(self, tier: int, blocks: int, now_ns: int) -> None:
        """Add `blocks` to what it holds of a tier (below 0: take them off)."""
        self._blocks[tier] += blocks
        self._ns[tier] -= blocks * now_ns
        if not self._running:
            self._idle_ns[tier] -= blocks * now_ns

    def run(self, running: bool, now_ns: int) -> None:
        """Record whether a request of it runs from now on."""
        assert running != self._running
        self._running = running
        sign = now_ns if running else -now_ns
        for tier, blocks in enumerate(self._blocks):
            self._idle_ns[tier] += sign * blocks

    def until(self, tier: int, now_ns: int) -> Held:
        open_ns = self._blocks[tier] * now_ns
        return Held(self._ns[tier] + open_ns, self._idle_ns[tier] + (0 if self._running else open_ns))


class Holding:
    """The accounts of all sessions, by number, and who pays for each block of each tier. now_ns: the moment at which what
    follows happens, as whoever moves blocks says. One that was forgotten and begins anew under its name has another number.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._accounts = {NOBODY_NOW: Account(EARLIER)}
        self._payers: dict[Tier, NDArray[np.int32]] = {}  # a session's number by block

    def tier(self, tier: Tier, blocks: int, earlier: Iterable[int]) -> None:
        """A tier of so many blocks, free but for those of an earlier run."""
        self._payers[tier] = np.full(blocks, _FREE, np.int32)
        self.give(tier, list(earlier), NOBODY_NOW)

    def open(self, number: int, name: str) -> None:
        self._accounts[number] = Account(name)

    def run(self, number: int, running: bool) -> None:
        self._accounts[number].run(running, self.now_ns)

    def give(self, tier: Tier, blocks: Sequence[int], number: int) -> None:
        """Charge free blocks to this session."""
        self._payers[tier][blocks[0] if len(blocks) == 1 else np.asarray(blocks, np.int32)] = number
        self._change(tier, number, len(blocks))

    def take(self, tier: Tier, blocks: Sequence[int], following: int = _FREE) -> None:
        """Charge blocks to their sessions no longer. following: whose they are from now on; by default they are free."""
        if not len(blocks):
            return
        payers = self._payers[tier]
        if len(blocks) == 1:  # a decode's, most often
            listed, stops = [int(payers[blocks[0]])], []
            payers[blocks[0]] = following
        else:
            places = np.asarray(blocks, np.int32)
            owners = payers[places]
            payers[places] = following
            listed, stops = owners.tolist(), np.flatnonzero(owners[1:] != owners[:-1]).tolist()
        start = 0
        for stop in (*stops, len(listed) - 1):
            self._change(tier, listed[stop], start - stop - 1)
            start = stop + 1
        if following != _FREE:
            self._change(tier, following, len(blocks))

    def until_now(self) -> dict[tuple[str, Tier], Held]:
        """Return what each session has held of each tier, where that is anything, in the order in which they were opened."""
        found: dict[tuple[str, Tier], Held] = {}
        for account in self._accounts.values():
            for place, tier in enumerate(TIERS):
                held = account.until(place, self.now_ns)
                if held.block_ns:
                    before = found.get((account.name, tier), Held(0, 0))
                    found[account.name, tier] = Held(*map(sum, zip(before, held, strict=True)))
        return found

    def _change(self, tier: Tier, number: int, blocks: int) -> None:
        """Whatever is below the CPU's tier counts as disk."""
        if blocks:
            self._accounts[number].change(TIERS.index(tier if tier in TIERS else "disk"), blocks, self.now_ns)


class Content:
    """Every full block that ever was part of a session, by content, and the number of the session whose it was
    (None: of several).

    It grows with all that is said, so it is kept only for trials, whose offline bound needs it.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._owner: dict[BlockHash, int | None] = {}
        self._noted: dict[int, int] = {}  # session number -> leading blocks of it that are noted
        self._unnoted: dict[int, Session] = {}  # sessions that have run since they were noted last

    def findable(self, session: Session, partial: bool) -> tuple[int, int]:
        """At most so many leading tokens of its prompt were in another session, and in any, up to this moment. partial: a
        part of a block can be found."""
        for other in list(self._unnoted.values()):
            self._note(other)
            if not other.running:
                del self._unnoted[other.number]
        size, length, number, owner = self._size, len(session.tokens), session.number, self._owner
        blocks = session.named(length, size)
        own = (index for index, block in enumerate(blocks) if owner.get(block, number) == number)
        new = (index for index, block in enumerate(blocks) if block not in owner)
        counts = [next(ends, len(blocks)) for ends in (own, new)]
        self._note(session)
        self._unnoted[session.number] = session
        beyond = size - 1 if partial else 0
        elsewhere, anywhere = (min(count * size + beyond, length - 1) for count in counts)
        return elsewhere, anywhere

    def truncating(self, session: Session, length: int) -> None:
        """Note what is about to go: it stays noted."""
        self._note(session)
        self._unnoted.pop(session.number, None)
        self._noted[session.number] = min(length // self._size, self._noted[session.number])

    def closed(self, session: Session) -> None:
        """Stop following the session; what was said in it stays noted."""
        self._note(session)
        self._unnoted.pop(session.number, None)
        self._noted.pop(session.number)

    def _note(self, session: Session) -> None:
        number, blocks = session.number, session.named(len(session.tokens), self._size)
        for block in blocks[self._noted.get(number, 0) :]:
            if self._owner.setdefault(block, number) != number:
                self._owner[block] = None
        self._noted[number] = len(blocks)
