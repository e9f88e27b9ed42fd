"""What LRU tiers of any size find of a load, in one pass over its requests.

LRU is a stack algorithm (Mattson, Gecsei, Slutz and Traiger 1970): a cache of C chunks holds the C chunks that were touched
last, whatever C is. A request finds what is there of its conversation, and then touches all of it, from the first chunk on.
So the last chunk that it asks again lies below the chunks of all conversations that were touched since, and each chunk
before it one deeper.

This is an open loop. Requests come in the order of the workload, each is over at once, and nothing is reserved for those that
run. Two tiers count as one of both sizes, as where what leaves the GPU goes to the CPU and comes back from there. It is exact
while conversations grow: of one that is cut, the chunks that go have taken no room from others.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pensieve.core.request import Request, TokenArray
from pensieve.core.session import chunks_of, common_prefix
from pensieve.lab.workload.base import Arrival, Workload
from pensieve.serve.record import TurnRecord, is_measured

_UNSAID = array("i", (-1,))  # a token of a reply: whatever it is, no prompt has it


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of the measured turns. tokens: of their history, which any cache could have had. depths: the chunks down to the first
    one of it."""

    chunk_tokens: int
    tokens: NDArray[np.int64]
    depths: NDArray[np.int64]

    def found(self, chunks: int) -> float:
        """The share of history tokens that a cache of so many chunks finds; 0 where there are none."""
        whole = int(self.tokens.sum())
        gone = np.maximum(self.depths - chunks, 0) * self.chunk_tokens
        return int(np.maximum(self.tokens - gone, 0).sum()) / whole if whole else 0.0


def played(workload: Workload) -> Iterator[tuple[Request, TokenArray[int]]]:
    """Each request as it comes, where replies have their full length and take no time; and what its conversation holds then.
    The workload is used up."""
    held: dict[str, TokenArray[int]] = {}
    order = count()
    heap: list[tuple[float, int, Arrival]] = []

    def push(arrivals: Iterable[Arrival]) -> None:
        for one in arrivals:
            heapq.heappush(heap, (one.at_s, next(order), one))

    push(workload.start())
    while heap:
        at_s, _, arrival = heapq.heappop(heap)
        known = held.get(arrival.request.session, array("i"))
        request = arrival.due(known)
        request.intended_s = at_s
        yield request, known
        reply = request.output.max_new_tokens
        held[request.session] = request.prompt + _UNSAID * reply
        turn = TurnRecord.arrived(request, request.turn, at_s)
        turn.prompt_tokens = len(request.prompt)
        turn.close("completed", "length", at_s)
        turn.output_tokens = reply
        push(workload.on_finished(turn))


def reuse_of(workload: Workload, chunk_tokens: int) -> Reuse:
    """Play the workload, and measure how far back each turn reaches."""
    requests: list[tuple[int, int, int, int, bool]] = []  # last place, chunks then and now, history, measured
    touched: dict[str, tuple[int, int]] = {}  # by conversation: the place of its last request, and its chunks then
    for request, known in played(workload):
        prompt = len(request.prompt)
        history = max(0, min(common_prefix(known, request.prompt), len(known) - 1, prompt - 1))
        chunks = chunks_of(prompt + request.output.max_new_tokens - 1, chunk_tokens)
        before = touched.get(request.session, (-1, 0))
        touched[request.session] = len(requests), chunks
        requests.append((*before, chunks, history, is_measured(request.phase)))
    return Reuse(chunk_tokens, *_measured(requests))


def _measured(requests: list[tuple[int, int, int, int, bool]]) -> Iterator[NDArray[np.int64]]:
    """The columns of Reuse."""
    sums = _Sums(len(requests))
    tokens, depths = array("q"), array("q")
    for place, (last, had, now, history, measured) in enumerate(requests):
        if measured:
            tokens.append(history)
            depths.append(had + sums.from_(last + 1))
        if last >= 0:
            sums.add(last, -had)
        sums.add(place, now)
    return (np.frombuffer(each, np.int64) for each in (tokens, depths))


class _Sums:
    """Numbers by place, and the sum of those from a place on (a Fenwick tree)."""

    def __init__(self, places: int) -> None:
        self._parts = [0] * (places + 1)
        self._whole = 0

    def add(self, place: int, value: int) -> None:
        self._whole += value
        place += 1
        while place < len(self._parts):
            self._parts[place] += value
            place += place & -place

    def from_(self, place: int) -> int:
        below = 0
        while place:
            below += self._parts[place]
            place -= place & -place
        return self._whole - below
