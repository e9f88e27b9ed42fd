"""Of a conversation that returns, what is there up to the first hole; chunks are given up from the tail (reuse=prefix)."""

from collections.abc import Iterable, Sequence
from itertools import count, repeat

import numpy as np
from numpy.typing import NDArray

from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.cache.tiers import Tiers
from pensieve.core.cache.victims import Choice, Span, VictimIndex
from pensieve.core.policies.base import EvictionPolicy, Scores
from pensieve.core.session import NO_BLOCK, ChunkRun, Node, Session, Stem, View, runs_of


class TailIndex(HeapIndex):
    """From the tail: the last chunk of a node goes first, and what follows a node before it, so that what is left of a
    conversation is a prefix. The place of a chunk is ~chunk.

    The policy says which conversation: each of its chunks has the score of the last one that it still has in any view.
    """

    def _valued(
        self, node: Node, indices: NDArray[np.int64], most: int | None, now_s: float
    ) -> tuple[NDArray[np.int64], Scores]:
        places = ~indices[::-1][:most]
        asked = self._asked(node, int(places[0]))
        return places, [*self._scores(node, asked, asked + 1, now_s)] * len(places)

    def _first(self, node: Node) -> int:
        return ~node.chunks.view.rfind(self._view)

    def _asked(self, node: Node, place: int) -> int:
        return node.start + max(len(node.chunks.view.rstrip(b"\0")) - 1, ~place)

    def _level(self, node: Node) -> int:
        return 2 * super()._level(node) + self._precedes(node)

    def _precedes(self, node: Node) -> bool:
        """A node that follows it has KV: on GPU, or where this index gives up what is on CPU, anywhere."""
        following = (
            [child.chunks for child in node.children.values() if len(child.chunks)] if isinstance(node, Stem) else []
        )
        lower = self._view == View.CPU_ONLY
        return any(own.gpu[0] != NO_BLOCK or (lower and own.cpu[0] != NO_BLOCK) for own in following)


class PrefixTiers(Tiers):
    """Tiers in which what is left of a conversation is a prefix, as far as chunks are chosen by their indices."""

    from_tail = True

    def _victims(self, policy: EvictionPolicy, view: View) -> VictimIndex:
        return TailIndex(policy, view)

    def _free(self, on_gpu: bool, node: Node, start: int, stop: int, discarded: bool) -> None:
        super()._free(on_gpu, node, start, stop, discarded)
        if not start and node.parent is not None:
            self.reorder(node.parent)

    def _free_victims(self, on_gpu: bool, spans: Sequence[Span]) -> int:
        freed = super()._free_victims(on_gpu, spans)
        for node, start, _ in spans:
            if not start and node.parent is not None:
                self.reorder(node.parent)
        return freed

    def _lose(self, spans: Iterable[Span]) -> None:
        """Those behind them go too."""
        super()._lose((node, *self._free_behind(node, start, stop)) for node, start, stop in spans)

    def _set_views(self, node: Node, start: int, views: bytes) -> None:
        changed = node.chunks.view[start : start + len(views)] != views
        super()._set_views(node, start, views)
        if changed:
            self.reorder(node)  # another chunk may be its last

    def strand_behind_hole(self, session: Session) -> frozenset[int]:
        """Have a session that is about to run compute again all that it has behind the first hole; returns these chunks."""
        chunks = session.chunks
        there = list(map(max, chunks.gpu_len, chunks.cpu_len))
        hole = next((index for index, length in enumerate(there) if length < self.chunk_tokens), len(there))
        stranded = frozenset(index for index in range(hole + 1, len(there)) if there[index])
        for node, start, stop in session.in_nodes(runs_of(sorted(stranded))):
            if not node.running:  # else what is missing before it is being computed
                self.strand(node, start, stop)
        return stranded

    def _free_behind(self, node: Node, start: int, stop: int) -> ChunkRun:
        gpu, cpu, first = node.chunks.gpu, node.chunks.cpu, stop
        stop = next(
            (i + 1 for i in range(len(gpu) - 1, first - 1, -1) if gpu[i] != NO_BLOCK or cpu[i] != NO_BLOCK), first
        )
        if stop > first:
            self.copies.abandon(node, first, stop)
            self.counters.evicted_chunks += stop - first - gpu[first:stop].count(NO_BLOCK)
            self.free_gpu(node, first, stop)
            self.free_cpu(node, first, stop)
        return start, stop

    def lost_for_want(self, lacking: Choice, now_s: float) -> tuple[list[int], Choice]:
        """The same from the tail: the least of both together are lost, so that no chunk goes before those behind it."""
        cpu_only, short = self.cpu_only, len(lacking) - self.cpu.free
        there = cpu_only.choose(short, now_s)
        nodes = [lacking.nodes[of] for of in lacking.of.tolist()]
        ours = map(cpu_only.as_victim, nodes, lacking.places.tolist(), repeat(now_s))
        going = sorted([*zip(ours, count()), *zip(there.victims(), repeat(-1))])[:short]
        lost = [row for _, row in going if row >= 0]
        return lost, there.some(slice(short - len(lost)))
