"""What overlaps with compute: when KV is copied to the CPU tier, other than as the paper does, and when a request whose KV is
loaded from there joins the batch."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, cast

import numpy as np

from pensieve.core.cache.base import Copying, Room
from pensieve.core.cache.two_tier import TwoTierRoom
from pensieve.core.cache.victims import Choice, VictimIndex
from pensieve.core.machine import CostModel
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import Forward, Scheduler, SchedulerSettings, Strategies
from pensieve.core.session import NO_BLOCK, Node, Session, View, runs_of
from pensieve.serve.books.books import predicted_s
from pensieve.units import ceil_div

CopyAhead = Literal["paper", "spare", "never"]
"""paper: a share of the GPU blocks, whatever must be dropped from the CPU for it (section 4.3.2). spare: as much, but only
into CPU blocks that no chunk has its only copy in. never: nothing, so that the tiers hold different chunks; what returns from
the CPU changes places with what leaves the GPU."""

AskedCopyAhead = Literal["auto", "paper", "spare", "never"]


_STAGES = 8  # an exchange that has no GPU block to begin with makes room for so large a part of it


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """mode: what the scheduler does. note: why, where auto chose; else empty."""

    mode: CopyAhead
    note: str = ""


def choose_copy_ahead(asked: str, cpu_blocks: int, one_memory: bool, kept_clean: int = 0) -> CopyChoice:
    """one_memory: both tiers are the same memory. kept_clean: GPU blocks that the paper's mode keeps free or clean.

    No measurement decides: trials of one command must evict alike, however busy the machine is. Where both tiers are one
    memory, no copy passes beside the compute, and copies ahead of time fill that memory with duplicates. A CPU tier of fewer
    blocks than are kept clean cannot hold their copies: the paper's mode then drops chunks from the GPU ahead of time to keep
    the others free, and both tiers together hold less than the GPU alone (G - kept_clean + C blocks of G).
    """
    if asked != "auto":
        return CopyChoice(cast(CopyAhead, asked))
    if not cpu_blocks:
        return CopyChoice("paper", "there is no CPU tier to copy to")
    if one_memory:
        return CopyChoice("never", "both tiers are one memory")
    if cpu_blocks < kept_clean:
        held = f"the CPU tier holds {cpu_blocks} blocks, fewer than the {kept_clean} of the GPU tier that would be kept clean"
        return CopyChoice("spare", held)
    return CopyChoice("paper", "the CPU tier is another memory")


class Spare(Copying):
    """As the paper, but ahead of time only into CPU blocks that no chunk has its only copy in."""

    def __init__(self, room: TwoTierRoom) -> None:
        self._room = room

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> None:
        room = self._room
        ahead, urgent = room.ahead(), lacking - room.outgoing
        room.swap_out(urgent, now_s, head)
        room.swap_out(ahead - max(urgent, 0), now_s, None, spare=True)

    def begins_below(self, prefilled: Sequence[Session]) -> int:
        spare = self._room.spare_cpu_blocks or any(map(_on_cpu, prefilled))  # what is computed again is spare
        return self._room.low if spare else 0


class Never(Spare):
    """Nothing ahead of time: both tiers are full, of different chunks, and the head of the queue changes places with what has
    the GPU, a part at a time. In each plan while it waits, as many of its chunks are loaded as there are GPU blocks for, and
    what leaves the GPU takes the CPU blocks of its chunks that are loaded already."""

    def on_its_way(self, in_flight: bool) -> bool:
        return in_flight or not self.copies_done

    def begins_below(self, prefilled: Sequence[Session]) -> int:
        return 0

    def changes_places(self, head: Session) -> bool:
        return _on_cpu(head)

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> None:
        """Make as much room as one plan can. Others lose their only copies only for what the head needs beyond the room in
        CPU memory that it leaves behind, and for an eighth of its chunks where no GPU block is free to begin with."""
        room = self._room
        if head is None or not room.cpu_blocks:
            return
        tiers, chunks, wanted = room.tiers, head.chunks, lacking - room.outgoing
        begins = self.copies_done and not room.available
        loads = self._load(head, now_s)
        clean = [
            (node, index) for node in head.nodes() for index, view in enumerate(node.chunks.view) if view == View.CLEAN
        ]
        held = len(chunks) - chunks.cpu.count(NO_BLOCK)
        spare = room.spare_cpu_blocks
        costly = max(wanted - spare - held, ceil_div(held, _STAGES) if begins else 0, 0)
        most = min(wanted, spare + len(clean) + costly)
        dropped = room.tiers.counters.dropped_chunks
        if most > 0:
            others = _of_others(tiers.dirty, head, View.DIRTY, most, now_s)
            self._give(clean, int(np.count_nonzero(others.column("cpu") == NO_BLOCK)))
            room.copy_out(others, now_s, head)
        if not loads:
            self._load(head, now_s)  # where chunks were dropped there are blocks now
        stuck = self.copies_done and not tiers.copies.in_flight and dropped == room.tiers.counters.dropped_chunks
        if stuck and wanted > 0:
            room.swap_out(wanted, now_s, head)  # what it has itself must leave the GPU

    @property
    def copies_done(self) -> bool:
        """No copy is under way whose end would change what may be evicted."""
        return not self._room.tiers.copies.open_moves

    def _give(self, clean: list[tuple[Node, int]], wanted: int) -> None:
        """Free as many CPU blocks, first those of duplicates, then those of clean chunks of the head."""
        tiers = self._room.tiers
        tiers.free_duplicates(max(0, wanted - tiers.cpu.free))
        while tiers.cpu.free < wanted and clean:
            node, index = clean.pop()
            tiers.free_cpu(node, index, index + 1)
            tiers.update(node, index, index + 1)

    def _load(self, session: Session, now_s: float) -> int:
        """Load as many CPU chunks of a waiting session as there are GPU blocks for without a copy; returns how many."""
        room, chunks = self._room, session.chunks
        most = max(room.available - chunks.view.count(View.CLEAN), 0)
        behind = [index for index, view in enumerate(chunks.view) if view == View.CPU_ONLY][:most]
        if not behind:
            return 0
        tiers, lacking = room.tiers, len(behind) - room.tiers.gpu.free
        if lacking > 0:  # not for chunks of its own, or the next plan would load those again, and so on
            others = _of_others(tiers.clean, session, View.CLEAN, lacking, now_s)
            tiers.reclaim(others.spans())
        runs, blocks = runs_of(behind), iter(room.take_gpu(session, len(behind), now_s))
        for node, start, stop in session.in_nodes(runs):
            node.chunks.gpu[start:stop] = array("i", islice(blocks, stop - start))
        room.loaded_early.setdefault(session.number, set()).update(behind)
        return tiers.copy_in(session, runs)


class Loads:
    """An iteration waits, layer by layer, for the loads of every row in it. So a long load holds up the decodes that share
    its iteration; apart from them it runs beside them, and only the last part of it, which an iteration covers, is shared.

    When a load ends is what the cost model predicts for the link, one load after the other. Nothing waits for the prediction
    where it is wrong: an iteration that comes too early waits for its loads, as it does without this.
    """

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost, self._chunk_tokens = cost, chunk_tokens
        self._link_free_s = 0.0
        self._ends_s: dict[int, float] = {}  # by arrival

    @property
    def expected(self) -> bool:
        """Some request still waits for its load."""
        return bool(self._ends_s)

    def begin(self, active: ActiveRequest, blocks: int, now_s: float) -> None:
        """Record that the request is admitted, and loads so many blocks."""
        if blocks:
            self._link_free_s = max(self._link_free_s, now_s) + blocks * self._cost.load_s()
            self._ends_s[active.arrival] = self._link_free_s

    def end(self, active: ActiveRequest) -> None:
        """Stop waiting for the request: it joined, was preempted, or is over."""
        self._ends_s.pop(active.arrival, None)

    def joined(self, running: Sequence[ActiveRequest], max_tokens: int, now_s: float) -> Sequence[ActiveRequest]:
        """Return the requests that the next iteration may compute: all, where nobody decodes meanwhile; else without those
        whose load has more left than the iteration would take with them."""
        if not self._ends_s:
            return running
        there = [active for active in running if active.arrival not in self._ends_s]
        decodes = [active.work[0] for active in there if active.decoding]
        for active in running:
            left_s = self._ends_s.get(active.arrival, now_s) - now_s
            if left_s > 0 and decodes and left_s > self._iteration_s([*decodes, *_first(active, max_tokens)]):
                continue
            self.end(active)
        return [active for active in running if active.arrival not in self._ends_s]

    def _iteration_s(self, runs: Iterable[tuple[int, int]]) -> float:
        return predicted_s(self._cost, runs, self._chunk_tokens)


def _first(active: ActiveRequest, most: int) -> list[tuple[int, int]]:
    """The first `most` positions of its work, as one iteration takes them."""
    runs = []
    for start, stop in active.work:
        taken = min(stop - start, most)
        if taken:
            runs.append((start, start + taken))
        most -= taken
    return runs


def strategies_of(
    settings: SchedulerSettings,
    chunk_tokens: int,
    cost: CostModel | None,
    forward: Callable[[Scheduler], Forward] | None = None,
) -> Strategies:
    """What the settings ask for. cost: what computing and loading take; None: nothing is loaded apart."""
    joining = Loads(cost, chunk_tokens) if settings.load_apart and cost is not None else None
    return Strategies(_COPYING.get(settings.copy_ahead), joining, forward)


def _on_cpu(session: Session) -> bool:
    """Some of its KV is in the CPU tier."""
    return session.chunks.cpu.count(NO_BLOCK) < len(session.chunks)


def _two_tiers(way: Callable[[TwoTierRoom], Copying]) -> Callable[[Room], Copying]:
    """Other managers copy in ways of their own."""
    return lambda room: way(room) if isinstance(room, TwoTierRoom) else room


_COPYING = {"spare": _two_tiers(Spare), "never": _two_tiers(Never)}


def _of_others(victims: VictimIndex, session: Session, view: View, count: int, now_s: float) -> Choice:
    """At most `count` victims among the other sessions, whatever its own chunks are worth to the policy."""
    own = {node: node.chunks.view.count(view) for node in session.nodes()}
    chosen = victims.choose(count + sum(own.values()), now_s)
    return chosen.some(np.array([node not in own for node in chosen.nodes], bool)[chosen.of]).some(slice(count))
