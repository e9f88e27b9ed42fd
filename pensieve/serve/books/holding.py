"""What keeping costs: how many blocks of each tier each session has held, and for how long.

A block is held from the moment it is taken from its pool until it is back: while it is reserved, while it holds KV, and
while it waits in quarantine. At any moment exactly one session pays for it, the last it was given to. Of blocks that
several can use (full blocks of prefix_cache, chunks on disk) that is the one that began to run with it last, or wrote it:
it is for the sake of its last use that the block is still there. A slot of llama_slots is paid for as a whole, by the
session that ran in it last. KV that a fork takes with it is the child's from then on.

Amounts are whole block-nanoseconds, so that nothing is lost by rounding: those of all sessions add up to the integral
of what the tier has given away. A block costs the same work however many there are: the time is subtracted when it comes
and added when it goes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pensieve.core.facts import NOBODY_NOW
from pensieve.core.plan import Tier

TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")

EARLIER = "(an earlier run)"
"""Who pays for chunks that the file store had at the start, until somebody reads them."""

_BEYOND = 1 << 63
_LOOKED_AT = 4  # closed accounts looked at whenever one more closes; so at most one in four of those kept holds nothing
_FREE = -2  # of a block that is in its pool


class Held(NamedTuple):
    """What one session has held of one tier, in blocks times ns. idle_block_ns: the part of it while none of its
    requests ran."""

    block_ns: int
    idle_block_ns: int


class Account:
    """Of one session, by tier: the blocks it has now, and the time of all it had. Those it still has count as though
    they had been taken at time 0 and given back, so far, never: `until` adds the time that they have been held."""

    __slots__ = ("_blocks", "_book", "_idle_ns", "_ns", "_running", "name")

    def __init__(self, name: str, book: Holding) -> None:
        self.name, self._book, self._running = name, book, False
        self._blocks, self._ns, self._idle_ns = ([0] * len(TIERS) for _ in range(3))

    def change(self, tier: int, blocks: int) -> None:
        """Add `blocks` to what it holds of a tier (below 0: take them off)."""
        block_ns = blocks * self._book.now_ns
        self._blocks[tier] += blocks
        self._ns[tier] -= block_ns
        if not self._running:
            self._idle_ns[tier] -= block_ns

    def start(self) -> None:
        """Record that a request of it runs from now on."""
        self._run(True)

    def stop(self) -> None:
        self._run(False)

    def until_now(self, tier: int) -> Held:
        open_ns = self._blocks[tier] * self._book.now_ns
        return Held(self._ns[tier] + open_ns, self._idle_ns[tier] + (0 if self._running else open_ns))

    def total(self) -> array[int] | None:
        """Return all that it has held and the idle part, tier by tier; None where it still holds something, or the sums
        exceed 64 bits."""
        if any(self._blocks) or max(self._ns) >= _BEYOND:
            return None
        return array("q", (ns for both in zip(self._ns, self._idle_ns, strict=True) for ns in both))

    def _run(self, running: bool) -> None:
        assert running != self._running
        self._running = running
        sign = self._book.now_ns if running else -self._book.now_ns
        for tier, blocks in enumerate(self._blocks):
            self._idle_ns[tier] += sign * blocks


class Holding:
    """The accounts of all sessions. now_ns: the moment at which what follows happens, as whoever moves blocks says."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._accounts = {NOBODY_NOW: Account(EARLIER, self)}
        self._closing: deque[int] = deque()  # sessions that will not be asked again and may still hold something
        # Of those that hold nothing any more, in columns: the number, the name, and what Account.total says.
        self._numbers, self._names, self._totals = array("q"), list[str](), array("q")

    def open(self, number: int, name: str) -> Account:
        """Open the account of a new session; one that was forgotten and begins anew under its name gets another."""
        account = self._accounts[number] = Account(name, self)
        return account

    def account(self, number: int) -> Account:
        return self._accounts[number]

    def close(self, number: int) -> None:
        """Close the account of a session that will not be asked again: once it holds nothing, a few numbers are all
        that is kept."""
        self._closing.append(number)
        for _ in range(min(_LOOKED_AT, len(self._closing))):
            number = self._closing.popleft()
            total = self._accounts[number].total()
            if total is None:
                self._closing.append(number)
                continue
            self._numbers.append(number)
            self._names.append(self._accounts.pop(number).name)
            self._totals.extend(total)

    def column(self, tier: Tier, blocks: int) -> Holders:
        """Make the record of who pays for each block of a tier, all of them free. Whatever is below the CPU's counts as
        disk."""
        return Holders(self._accounts, TIERS.index(tier if tier in TIERS else "disk"), blocks)

    def until_now(self) -> dict[tuple[str, Tier], Held]:
        """Return what each session has held of each tier, where that is anything."""
        found: dict[tuple[str, Tier], Held] = {}
        for name, by_tier in self._in_order():
            for tier, held in zip(TIERS, by_tier, strict=True):
                if held.block_ns:
                    before = found.get((name, tier), Held(0, 0))
                    found[name, tier] = Held(*map(sum, zip(before, held, strict=True)))
        return found

    def _in_order(self) -> Iterator[tuple[str, list[Held]]]:
        """Yield what each session has held by tier, in the order in which they were opened."""
        over = {number: place for place, number in enumerate(self._numbers)}
        width = 2 * len(TIERS)
        for number in sorted((*over, *self._accounts)):
            if number in over:
                ns = self._totals[over[number] * width : (over[number] + 1) * width]
                yield self._names[over[number]], [Held(*ns[at : at + 2]) for at in range(0, width, 2)]
            else:
                account = self._accounts[number]
                yield account.name, [account.until_now(place) for place in range(len(TIERS))]


class Holders:
    """Who pays for each block of one tier: the number of a session."""

    def __init__(self, accounts: dict[int, Account], tier: int, blocks: int) -> None:
        self._accounts, self._tier = accounts, tier
        self._of = array("i", (_FREE,)) * blocks

    def give(self, blocks: Sequence[int], number: int) -> None:
        """Charge free blocks to this session."""
        for block in blocks:
            self._of[block] = number
        self._accounts[number].change(self._tier, len(blocks))

    def take(self, blocks: Sequence[int]) -> None:
        """Mark blocks as free again."""
        self._leave(blocks, _FREE)

    def pass_on(self, blocks: Sequence[int], number: int) -> None:
        """Charge blocks that are not free to this session from now on."""
        self._leave(blocks, number)
        self._accounts[number].change(self._tier, len(blocks))

    def of(self, block: int) -> int | None:
        """Return who pays for the block; None: it is free."""
        number = self._of[block]
        return None if number == _FREE else number

    def _leave(self, blocks: Sequence[int], following: int) -> None:
        """Charge blocks to their sessions no longer. following: whose they are from now on."""
        of, owner, count = self._of, _FREE, 0
        for block in blocks:
            if of[block] != owner:
                if count:
                    self._accounts[owner].change(self._tier, -count)
                owner, count = of[block], 0
            of[block] = following
            count += 1
        if count:
            self._accounts[owner].change(self._tier, -count)
