"""Which of a returning session's CPU chunks are loaded, and which are computed again while the others load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pensieve.core.cache.tiers import Tiers, missing_runs
from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.facts import Admission, Found
from pensieve.core.machine import CostModel
from pensieve.core.session import Chunks, Run, Session, merged, tokens_in
from pensieve.errors import ConfigError
from pensieve.plugins.caches.prefix_rule import PrefixTiers
from pensieve.units import ceil_div

RestoreMode = Literal["load", "hybrid", "recompute"]
"""load: all chunks on CPU are copied back, as in the paper. recompute: none is. hybrid: the split that the cost model
predicts to be the fastest, neither of the two included being slower."""

Reuse = Literal["any", "prefix"]
"""Of a conversation that returns: any: all that is there, with holes, as in the paper. prefix: what is there up to the first
hole; chunks are given up from the tail."""

_CANDIDATES = 32  # splits tried around the crossing, within an iteration's worth of chunks to either side


@dataclass(slots=True)
class RestoreTimes:
    """Predicts how long a restore takes on a device that does nothing else, and chooses the fastest split.

    Iterations of `batch_tokens` positions follow each other, each costing step_s and its chunks' recompute_s; the loads go
    on meanwhile, layer by layer, load_s a chunk. Only an iteration with a position above a loaded chunk waits for them: of
    its `layers` layers each for its own (paper section 4.3.3).
    """

    cost: CostModel
    chunk_tokens: int
    layers: int
    batch_tokens: int
    _until: list[float] = field(default_factory=lambda: [0.0])  # seconds to compute chunks [0, i)

    def choose(self, missing: Sequence[Run], on_cpu: Sequence[Run], backlog: int) -> int:
        """How many of the first chunks on CPU are computed again: the fastest split, of equally fast ones that which loads
        most.

        missing: positions in neither tier, the new prompt included, ascending. on_cpu: positions a chunk, ascending.
        backlog: chunks that the link has still to load for others.
        """
        cpu_chunks = CpuChunks(on_cpu)

        def computes_longer(recomputed: int) -> bool:
            below, _ = _cut_at(merged(sorted((*missing, *cpu_chunks.runs(recomputed)))), on_cpu[recomputed][0])
            return self._alone_s(below) >= (backlog + chunks - recomputed) * self.cost.load_s()

        # What is computed before the loads are needed grows with the split and the time of the loads falls, so they cross
        # once. An iteration counts as a whole, so the best split is the crossing or lies within an iteration of it.
        chunks = len(on_cpu)
        crossing = bisect_left(range(chunks), True, key=computes_longer)
        reach = ceil_div(self.batch_tokens, self.chunk_tokens)
        around = range(max(0, crossing - reach), min(chunks, crossing + reach) + 1, ceil_div(2 * reach, _CANDIDATES))
        seconds = {
            count: self.finish_s(missing, cpu_chunks, count, backlog) for count in {0, crossing, chunks, *around}
        }
        best: int = min(seconds, key=lambda count: (seconds[count], count))
        return best

    def finish_s(self, missing: Sequence[Run], cpu_chunks: CpuChunks, recomputed: int, backlog: int) -> float:
        """Seconds until everything is there and computed, if the first `recomputed` chunks on CPU are not loaded."""
        work = merged(sorted((*missing, *cpu_chunks.runs(recomputed))))
        loads = len(cpu_chunks.chunks) - recomputed
        if not loads:
            return self._alone_s(work)
        below, above = _cut_at(work, cpu_chunks.chunks[recomputed][0])
        alone, shared = _first(below, tokens_in(below) // self.batch_tokens * self.batch_tokens)
        joining, after = _first(above, self.batch_tokens - tokens_in(shared))
        began = self._alone_s(alone)
        compute = self.cost.step_s() + self.compute_s(shared) + self.compute_s(joining)
        loaded = (backlog + loads) * self.cost.load_s()
        first_layer = (backlog + loads / self.layers) * self.cost.load_s()
        ended = max(max(began, first_layer) + compute, loaded + compute / self.layers)
        return ended + self._alone_s(after)

    def compute_s(self, runs: Iterable[Run]) -> float:
        """Positions of these runs as part of a longer prefill, without what an iteration costs anyway."""
        return sum(self._below_s(stop) - self._below_s(start) for start, stop in runs)

    def _alone_s(self, runs: Sequence[Run]) -> float:
        return ceil_div(tokens_in(runs), self.batch_tokens) * self.cost.step_s() + self.compute_s(runs)

    def _below_s(self, position: int) -> float:
        """Positions [0, position); within a chunk each position counts alike."""
        until, size = self._until, self.chunk_tokens
        whole, rest = divmod(position, size)
        while len(until) <= whole + 1:
            until.append(until[-1] + self.cost.recompute_s(len(until) * size))
        return until[whole] + (until[whole + 1] - until[whole]) * rest / size


class RestoringCache(TwoTierCache):
    """Decides each restore by its mode. A hybrid one takes compute that other requests could use, so while another request
    runs everything is loaded; so it is before the costs are known.

    A chunk computed again keeps its copy on CPU: the two differ by rounding only, and either is the KV of these tokens. If
    the request stops before the chunk is computed as far as the copy goes, the copy is what stays. With reuse=prefix there is
    no tier below the CPU's.
    """

    def __init__(self, *, restore: RestoreMode = "load", reuse: Reuse = "any", **others: Any) -> None:
        """Raises ConfigError for a prefix in which something is computed again."""
        if reuse == "prefix" and restore != "load":
            raise ConfigError("baseline.cache.reuse=prefix loads what is on CPU; set baseline.cache.restore=load.")
        self.mode, self.reuse, self.drops = restore, reuse, reuse == "any"
        super().__init__(**others)
        self.times: RestoreTimes | None = None
        self._running = 0

    def _tiers(self, *given: Any) -> Tiers:
        return (PrefixTiers if self.reuse == "prefix" else Tiers)(*given)

    def _strand(self, session: Session) -> frozenset[int]:
        return self.tiers.strand_behind_hole(session) if isinstance(self.tiers, PrefixTiers) else frozenset()

    def _price(self, cost: CostModel, layers: int, batch_tokens: int) -> None:
        self.times = RestoreTimes(cost, self.chunk_tokens, layers, batch_tokens)

    def _start(self, session: Session, found: Found | None, now_s: float) -> Admission:
        self._running += 1
        return super()._start(session, found, now_s)

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        self._running -= session.running
        super().release(session, now_s, finished)

    def _recomputed(self, chunks: Chunks, length: int, on_cpu: Sequence[int]) -> int:
        if self.mode != "hybrid":
            return len(on_cpu) if self.mode == "recompute" else 0
        if self._running > 1 or self.times is None:
            return 0
        size = self.chunk_tokens
        missing = missing_runs(chunks, length, size, cpu_too=True)
        positions = [(index * size, index * size + chunks.cpu_len[index]) for index in on_cpu]
        return self.times.choose(missing, positions, self.tiers.copies.incoming)


def restored(*, restore: RestoreMode = "load", reuse: Reuse = "any", **others: Any) -> TwoTierCache:
    """Make the cache that restores and reuses so."""
    if (restore, reuse) == ("load", "any"):
        return TwoTierCache(**others)
    return RestoringCache(restore=restore, reuse=reuse, **others)


class CpuChunks:
    """The chunks on CPU, stored so that the first few of them come as runs without joining them one by one."""

    def __init__(self, chunks: Sequence[Run]) -> None:
        self.chunks = chunks
        self._from: list[int] = []  # by chunk: the first one of its stretch of consecutive positions
        for index, (start, _) in enumerate(chunks):
            follows = index > 0 and chunks[index - 1][1] == start
            self._from.append(self._from[-1] if follows else index)

    def runs(self, count: int) -> list[Run]:
        """Return the first `count` chunks as runs, the last run first."""
        runs: list[Run] = []
        while count:
            first = self._from[count - 1]
            runs.append((self.chunks[first][0], self.chunks[count - 1][1]))
            count = first
        return runs


def _cut_at(runs: Sequence[Run], position: int) -> tuple[list[Run], list[Run]]:
    """Divide the runs into those below the position and those above it. It is the start of a loaded chunk, so no run
    crosses it."""
    count = bisect_left(runs, (position, position))
    return list(runs[:count]), list(runs[count:])


def _first(runs: Sequence[Run], tokens: int) -> tuple[list[Run], list[Run]]:
    """Divide the runs into their first `tokens` positions and the others."""
    taken: list[Run] = []
    for index, (start, stop) in enumerate(runs):
        if tokens < stop - start:
            first = [*taken, (start, start + tokens)] if tokens else taken
            return first, [(start + tokens, stop), *runs[index + 1 :]]
        taken.append((start, stop))
        tokens -= stop - start
    return taken, []
