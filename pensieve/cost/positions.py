"""What positions of a conversation take to compute, summed once, so that any interval of them is priced at once."""

from __future__ import annotations

from collections.abc import Iterable

from pensieve.cost.base import CostModel


class PositionPrices:
    """Seconds to compute positions as part of a longer prefill: those of cost.positions_s, kept as sums of leading chunks."""

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost = cost
        self._size = chunk_tokens
        self._chunks: list[float] = []
        self._sums = [0.0]  # of the leading chunks

    def seconds(self, start: int, stop: int) -> float:
        return self._below(stop) - self._below(start)

    def of(self, runs: Iterable[tuple[int, int]]) -> float:
        """Seconds of several intervals."""
        return sum(self.seconds(start, stop) for start, stop in runs)

    def _below(self, position: int) -> float:
        self._price(position)
        whole, rest = divmod(position, self._size)
        return self._sums[whole] + (self._chunks[whole] * rest / self._size if rest else 0.0)

    def _price(self, position: int) -> None:
        for index in range(len(self._chunks), -(-position // self._size)):
            self._chunks.append(self._cost.recompute_s((index + 1) * self._size))
            self._sums.append(self._sums[-1] + self._chunks[-1])
