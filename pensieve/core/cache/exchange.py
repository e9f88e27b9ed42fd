"""A returning session changes places with those that hold the GPU, a part at a time."""

from __future__ import annotations

from array import array
from itertools import islice

from pensieve.core.cache.two_tier import TwoTierRoom
from pensieve.core.session import NO_BLOCK, Session, View, runs_of
from pensieve.units import ceil_div

_STAGES = 8  # an exchange that has no GPU block to begin with makes room for so large a part of it


class Exchange:
    """How a session gets onto a GPU from which nothing was copied ahead of time (copy_ahead=never): both tiers are full, of
    different chunks. In each plan while it waits, as many of its chunks are loaded as there are GPU blocks for, and what
    leaves the GPU takes the CPU blocks of its chunks that are loaded already."""

    def __init__(self, room: TwoTierRoom) -> None:
        self._room = room

    def step(self, session: Session, lacking: int, now_s: float) -> None:
        """Make as much room for a waiting session that lacks so many GPU blocks as one plan can. Others lose their only
        copies only for what it needs beyond the room in CPU memory that it leaves behind, and for an eighth of its chunks
        where no GPU block is free to begin with."""
        room = self._room
        tiers, chunks, wanted = room.tiers, session.chunks, lacking - room.outgoing
        begins = room.copies_done and not room.available
        loads = self._load(session, now_s)
        clean = [
            (node, index)
            for node in session.nodes()
            for index, view in enumerate(node.chunks.view)
            if view == View.CLEAN
        ]
        held = len(chunks) - chunks.cpu.count(NO_BLOCK)
        spare = room.spare_cpu_blocks
        costly = max(wanted - spare - held, ceil_div(held, _STAGES) if begins else 0, 0)
        most = min(wanted, spare + len(clean) + costly)
        dropped = room.tiers.counters.dropped_chunks
        if most > 0:
            others = room.victims_of_others(tiers.dirty, session, View.DIRTY, most, now_s)
            room.copy_out(others, now_s, session, giving=clean)
        if not loads:
            self._load(session, now_s)  # where chunks were dropped there are blocks now
        stuck = room.copies_done and not tiers.copies.in_flight and dropped == room.tiers.counters.dropped_chunks
        if stuck and wanted > 0:
            room.swap_out(wanted, now_s, session)  # what it has itself must leave the GPU

    def _load(self, session: Session, now_s: float) -> int:
        """Load as many CPU chunks of a waiting session as there are GPU blocks for without a copy; returns how many."""
        room, chunks = self._room, session.chunks
        most = max(room.available - chunks.view.count(View.CLEAN), 0)
        behind = [index for index, view in enumerate(chunks.view) if view == View.CPU_ONLY][:most]
        if not behind:
            return 0
        tiers, lacking = room.tiers, len(behind) - room.tiers.gpu.free
        if lacking > 0:  # not for chunks of its own, or the next plan would load those again, and so on
            others = room.victims_of_others(tiers.clean, session, View.CLEAN, lacking, now_s)
            room.give_up(tiers.clean, others, tiers.reclaim)
        runs, blocks = runs_of(behind), iter(room.take_gpu(session, len(behind), now_s))
        for node, start, stop in session.in_nodes(runs):
            node.chunks.gpu[start:stop] = array("i", islice(blocks, stop - start))
        room.loaded_early.setdefault(session.number, set()).update(behind)
        return tiers.copy_in(session, runs)
