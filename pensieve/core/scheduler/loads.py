"""Which running requests still wait for their KV from the CPU, and when they join the batch without holding it up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pensieve.core.machine import CostModel, predicted_s
from pensieve.core.scheduler.active_request import ActiveRequest


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
