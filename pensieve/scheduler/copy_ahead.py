"""When KV is copied to the CPU tier: a strategy for each way to do it, and how `auto` chooses one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pensieve.cache.base import CacheManager
from pensieve.cache.exchange import Exchange
from pensieve.cache.two_tier import TwoTierCache
from pensieve.plan import Copy
from pensieve.session import Session

CopyAhead = Literal["paper", "spare", "never"]
"""paper: a share of the GPU blocks, whatever must be dropped from the CPU for it (section 4.3.2). spare: as much, but only
into CPU blocks that no chunk has its only copy in. never: nothing, so that the tiers hold different chunks; what returns from
the CPU changes places with what leaves the GPU."""

AskedCopyAhead = Literal["auto", "paper", "spare", "never"]

WORTH_HIDING = 0.5
"""Of the time of the copies. Where less passes beside the compute, an iteration loses more by copies that are made ahead of
time than a request would wait for those that it needs: not all that are made are needed."""


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """mode: what the scheduler does. note: why, where auto chose; else empty."""

    mode: CopyAhead
    note: str = ""


def choose_copy_ahead(
    asked: AskedCopyAhead, cpu_blocks: int, one_memory: bool, hidden: float | None, kept_clean: int = 0
) -> CopyChoice:
    """one_memory: both tiers are the same memory. hidden: the share of the copies' time that passes beside an iteration, as
    measured; None: not measured. kept_clean: GPU blocks that the paper's mode keeps free or clean.

    A CPU tier of fewer blocks than those cannot hold their copies: the paper's mode then drops chunks from the GPU ahead of
    time to keep the others free, and both tiers together hold less than the GPU alone (G - kept_clean + C blocks of G).
    """
    if asked != "auto":
        return CopyChoice(asked)
    if not cpu_blocks:
        return CopyChoice("paper", "there is no CPU tier to copy to")
    choice = _by_link(one_memory, hidden)
    if choice.mode == "paper" and cpu_blocks < kept_clean:
        held = f"the CPU tier holds {cpu_blocks} blocks, fewer than the {kept_clean} of the GPU tier that would be kept clean"
        return CopyChoice("spare", held)
    return choice


def _by_link(one_memory: bool, hidden: float | None) -> CopyChoice:
    if not one_memory:
        return CopyChoice("paper", "the CPU tier is another memory")
    if hidden is None:
        return CopyChoice("paper", "both tiers are one memory, and what copies cost there was not measured")
    share = f"both tiers are one memory, and {hidden:.0%} of the time of copies passes beside an iteration"
    return CopyChoice("paper" if hidden >= WORTH_HIDING else "never", share)


class Room(NamedTuple):
    """Copies that make room. loads: to the GPU, and leaving: to the CPU, for the head of the queue; ahead: to the CPU, before
    anybody waits for it."""

    loads: tuple[Copy, ...] = ()
    leaving: tuple[Copy, ...] = ()
    ahead: tuple[Copy, ...] = ()


class Paper:
    """At once for a head that lacks blocks; ahead of time below the low watermark and up to the high one (section 4.3.2)."""

    def __init__(self, cache: CacheManager, low: int, high: int) -> None:
        """low, high: GPU blocks that are free or clean, or will be."""
        self._cache, self._low, self._high = cache, low, high

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> Room:
        """Start copies. head: who lacks so many blocks; None: nobody does."""
        wanted = max(self._ahead(), lacking - self._cache.outgoing if lacking else 0)
        copies = self._cache.swap_out(wanted, now_s, urgent=bool(lacking))
        return Room(ahead=copies) if head is None else Room(leaving=copies)

    def on_its_way(self, in_flight: bool) -> bool:
        """Whether copies are under way that give the head of the queue blocks."""
        return bool(self._cache.outgoing)

    def begins_below(self, frees_copies: bool) -> int:
        """Of how many available and outgoing blocks the next plan would copy ahead of time. frees_copies: a request under
        way may compute again what CPU blocks hold, which are then spare."""
        return self._low

    def changes_places(self, head: Session) -> bool:
        """Each plan may load more of what the head of the queue has on the CPU."""
        return False

    def _ahead(self) -> int:
        have = self._cache.available + self._cache.outgoing
        return self._high - have if have < self._low else 0


class Spare(Paper):
    """As the paper, but ahead of time only into CPU blocks that no chunk has its only copy in."""

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> Room:
        ahead, urgent = self._ahead(), lacking - self._cache.outgoing
        leaving = self._cache.swap_out(urgent, now_s, urgent=True)
        return Room(
            leaving=leaving, ahead=self._cache.swap_out(ahead - max(urgent, 0), now_s, urgent=False, spare=True)
        )

    def begins_below(self, frees_copies: bool) -> int:
        return self._low if self._cache.spare_cpu_blocks or frees_copies else 0


class Never(Paper):
    """Nothing ahead of time: the head changes places with what has the GPU, a part at a time (cache/exchange.py)."""

    def __init__(self, cache: CacheManager) -> None:
        super().__init__(cache, 0, 0)
        self._exchange = Exchange(cache) if isinstance(cache, TwoTierCache) and cache.cpu_blocks else None

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> Room:
        if head is None or self._exchange is None:
            return Room()
        return Room(*self._exchange.step(head, lacking, now_s))

    def on_its_way(self, in_flight: bool) -> bool:
        return bool(self._cache.outgoing) or in_flight or not self._cache.copies_done

    def changes_places(self, head: Session) -> bool:
        return self._cache.on_cpu(head)


def strategy_of(mode: AskedCopyAhead, cache: CacheManager, low: int, high: int) -> Paper:
    """low, high: the watermarks in GPU blocks."""
    if mode == "never":
        return Never(cache)
    return Spare(cache, low, high) if mode == "spare" else Paper(cache, low, high)
