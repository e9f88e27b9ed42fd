"""Which of a returning session's CPU chunks are loaded, and which are computed again while the others load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pensieve.core.cache.tiers import Tiers, missing_runs
from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.facts import Admission, Found
from pensieve.core.machine import CostModel
from pensieve.core.session import Chunks, Run, Session
from pensieve.errors import ConfigError
from pensieve.plugins.caches.prefix_rule import PrefixTiers
from pensieve.units import ceil_div

RestoreMode = Literal["load", "hybrid", "recompute"]
"""load: all chunks on CPU are copied back, as in the paper. recompute: none is. hybrid: the split that the cost model
predicts to be the fastest, neither of the two included being slower."""

Reuse = Literal["any", "prefix"]
"""Of a conversation that returns: any: all that is there, with holes, as in the paper. prefix: what is there up to the first
hole; chunks are given up from the tail."""


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
    _chunk_s: list[float] = field(default_factory=list)  # to compute each chunk of a context

    def choose(self, missing: Sequence[Run], on_cpu: Sequence[Run], backlog: int) -> int:
        """How many of the first chunks on CPU are computed again: the fastest split, of equally fast ones that which loads
        most. As seconds_of_splits."""
        return int(self.seconds_of_splits(missing, on_cpu, backlog).argmin())

    def seconds_of_splits(self, missing: Sequence[Run], on_cpu: Sequence[Run], backlog: int) -> NDArray[np.float64]:
        """[chunks on CPU + 1]: seconds until everything is there and computed, if so many of the first are not loaded.

        missing: positions in neither tier, the new prompt included, ascending. on_cpu: positions a chunk, ascending.
        backlog: chunks that the link has still to load for others.
        """
        load_s, step_s, batch = self.cost.load_s(), self.cost.step_s(), self.batch_tokens
        absent = _positions(missing)
        whole = np.sort(np.concatenate([absent, _positions(on_cpu)]))
        absent_s, whole_s = self._until_s(absent), self._until_s(whole)
        loads = np.arange(len(on_cpu), -1, -1)
        loaded_from = [*(start for start, _ in on_cpu), on_cpu[-1][1]]
        # What is computed below the first loaded chunk: iterations alone, and the rest, which others above it join.
        below, above = np.searchsorted(whole, loaded_from), np.searchsorted(absent, loaded_from)
        alone = below // batch * batch
        joining = np.minimum(above + batch - (below - alone), len(absent))
        began_s = alone // batch * step_s + whole_s[alone]
        compute_s = step_s + whole_s[below] - whole_s[alone] + absent_s[joining] - absent_s[above]
        after_s = -(-(len(absent) - joining) // batch) * step_s + absent_s[-1] - absent_s[joining]
        first_layer_s, loaded_s = (backlog + loads / self.layers) * load_s, (backlog + loads) * load_s
        ended_s = (
            np.maximum(np.maximum(began_s, first_layer_s) + compute_s, loaded_s + compute_s / self.layers) + after_s
        )
        ended_s[-1] = ceil_div(len(whole), batch) * step_s + whole_s[-1]
        return np.asarray(ended_s, np.float64)

    def _until_s(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """[positions + 1]: seconds to compute the first ones, as part of a longer prefill; within a chunk all count alike."""
        size, chunks = self.chunk_tokens, positions // self.chunk_tokens
        for chunk in range(len(self._chunk_s), int(chunks.max(initial=-1)) + 1):
            self._chunk_s.append(self.cost.recompute_s((chunk + 1) * size))
        return np.concatenate([[0.0], np.cumsum(np.array(self._chunk_s)[chunks] / size)])


def _positions(runs: Sequence[Run]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in runs)])


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
