"""Which running requests still wait for their KV from the CPU, and when they join the batch without holding it up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pensieve.cost.base import CostModel, predicted_s
from pensieve.plan import Copy
from pensieve.scheduler.sequence import Sequence as Running


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
        self._reads: dict[int, int] = {}  # tickets of what is read from disk, by arrival

    @property
    def expected(self) -> bool:
        """Somebody has not joined yet."""
        return bool(self._ends_s or self._reads)

    def begin(self, sequence: Running, copies: Iterable[Copy], now_s: float, disk_ticket: int | None = None) -> None:
        """It is admitted with these swap-ins, or with none, and with what is read from disk."""
        if disk_ticket is not None:
            self._reads[sequence.arrival] = disk_ticket
        blocks = sum(len(copy.src) for copy in copies)
        if blocks:
            self._link_free_s = max(self._link_free_s, now_s) + blocks * self._cost.load_s()
            self._ends_s[sequence.arrival] = self._link_free_s

    def end(self, sequence: Running) -> None:
        """It joined, was preempted, or is over."""
        self._ends_s.pop(sequence.arrival, None)
        self._reads.pop(sequence.arrival, None)

    def read(self, tickets: Iterable[int]) -> None:
        """What was read from disk with these tickets is there."""
        if self._reads:
            over = set(tickets)
            self._reads = {arrival: ticket for arrival, ticket in self._reads.items() if ticket not in over}

    def joined(self, running: Sequence[Running], max_tokens: int, now_s: float) -> Sequence[Running]:
        """Those that the next iteration may compute: all, where nobody decodes meanwhile; else without those whose load has
        more left than the iteration would take with them. How long a disk takes nobody knows: who reads from it joins when it
        has read."""
        if self._reads:
            running = [sequence for sequence in running if sequence.arrival not in self._reads]
        if not self._ends_s:
            return running
        settled = [sequence for sequence in running if sequence.arrival not in self._ends_s]
        decodes = [sequence.work[0] for sequence in settled if sequence.decoding]
        for sequence in running:
            left_s = self._ends_s.get(sequence.arrival, now_s) - now_s
            if left_s > 0 and decodes and left_s > self._iteration_s([*decodes, *_first(sequence, max_tokens)]):
                continue
            self.end(sequence)
        return [sequence for sequence in running if sequence.arrival not in self._ends_s]

    def _iteration_s(self, runs: Iterable[tuple[int, int]]) -> float:
        return predicted_s(self._cost, runs, self._chunk_tokens)


def _first(sequence: Running, most: int) -> list[tuple[int, int]]:
    """The first positions of its work, as one iteration takes them."""
    runs = []
    for start, stop in sequence.work:
        taken = min(stop - start, most)
        if taken:
            runs.append((start, start + taken))
        most -= taken
    return runs
