"""What the cache and the scheduler ask of time: seconds to recompute or to move a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol


class CostModel(Protocol):
    """Marginal seconds, not those of a lone chunk: a forward of 32 tokens would measure weight loading and turn the
    retention value into LRU."""

    def recompute_s(self, context_tokens: int) -> float:
        """One chunk that ends at `context_tokens`, computed as part of a longer prefill (paper section 4.3.1)."""
        ...

    def step_s(self) -> float:
        """What an iteration costs before it computes anything."""
        ...

    def weights_s(self) -> float:
        """What the linear layers of an iteration take at least, however few its tokens: the reading of the weights."""
        ...

    def load_s(self) -> float:
        """One chunk from CPU to GPU."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the trial's record."""
        ...


def marginal_s(cost: CostModel, start: int, stop: int, chunk_tokens: int) -> float:
    """Positions [start, stop) of a conversation, computed as part of a longer prefill."""
    seconds = 0.0
    while start < stop:
        end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        seconds += cost.recompute_s(end) * (end - start) / chunk_tokens
        start = end
    return seconds


def one_after_another(
    iteration_s: Callable[[Sequence[tuple[int, int]], int], float], runs: Sequence[tuple[int, int]], sampled: int
) -> Iterator[float]:
    """The iterations that follow one of these runs, each of which goes on by as many positions as it has."""
    steps = [stop - start for start, stop in runs]
    while True:
        runs = [(start + step, stop + step) for (start, stop), step in zip(runs, steps, strict=True)]
        yield iteration_s(runs, sampled)


def predicted_s(cost: CostModel, runs: Iterable[tuple[int, int]], chunk_tokens: int) -> float:
    """An iteration that computes these positions of one conversation, chunk by chunk as the eviction policy counts them, and
    what the weights of a short one take beyond their arithmetic."""
    marginal, tokens = 0.0, 0
    for start, stop in runs:
        tokens += stop - start
        marginal += marginal_s(cost, start, stop, chunk_tokens)
    linear = cost.recompute_s(chunk_tokens) * tokens / chunk_tokens  # a first chunk attends to next to nothing
    return cost.step_s() + marginal + max(0.0, cost.weights_s() - linear)


class PositionPrices:
    """Seconds to compute positions as part of a longer prefill, with a price for each that does not depend on which others
    are computed: a part of a chunk at the price of the whole one. So what several runs take adds up. Sums of leading chunks
    are kept, so that any interval is priced at once."""

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost = cost
        self._size = chunk_tokens
        self._chunks: list[float] = []
        self._sums = [0.0]  # of the leading chunks

    def seconds(self, start: int, stop: int) -> float:
        return self._below(stop) - self._below(start)

    def of(self, runs: Iterable[tuple[int, int]]) -> float:
        """Seconds of several intervals."""
        seconds = 0.0
        for start, stop in runs:
            seconds += self._below(stop) - self._below(start)
        return seconds

    def _below(self, position: int) -> float:
        self._price(position)
        whole, rest = divmod(position, self._size)
        return self._sums[whole] + (self._chunks[whole] * rest / self._size if rest else 0.0)

    def _price(self, position: int) -> None:
        for index in range(len(self._chunks), -(-position // self._size)):
            self._chunks.append(self._cost.recompute_s((index + 1) * self._size))
            self._sums.append(self._sums[-1] + self._chunks[-1])
