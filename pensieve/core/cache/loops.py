"""The inner loops of a choice of victims: in Python, and in C where a choice is made often and a compiler is there."""

from __future__ import annotations

import ctypes
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from pensieve.compiler import load_library
from pensieve.core.session import runs_of
from pensieve.errors import EngineMissing

Victim = tuple[int, float, float, int, int]
"""A chunk as it stands in the order of eviction, lowest first: level, score, last active, number of the node, chunk."""

node_and_chunk: Callable[[Victim], tuple[int, int]] = itemgetter(3, 4)
"""The chunk itself: number of the node and its chunk."""

Span = tuple[int, int, int]
"""A run of chunks: number of the node, first chunk, stop."""

Head = tuple[int, float, float, int, int, Iterator[Victim]]
"""The first entry of a bucket as a victim, and those behind it, in order."""

Stretch = tuple[int, float, int, Sequence[float]]
"""Of one node: level, last active, first chunk, and the scores of that chunk and of those that follow it."""

StretchOf = Callable[[int, int], Stretch | None]
"""From the number of a node and a chunk on: the first stretch of its chunks; None: there is none."""

_SOURCE = Path(__file__).with_name("loops.c")


class Loops(Protocol):
    def choose(self, heads: list[Head], most: int, whole: bool, stretch_of: StretchOf) -> list[Victim] | None:
        """The first `most` victims, or as many as there are. The heads and, of each node that has given up a chunk, the
        next one compete. A head may have a lower score than its stretch, which counts. whole: as many more as the last node
        has. None: some score or time is no float, which these loops cannot compare; the heads are used up."""
        ...

    def spans(self, victims: list[Victim]) -> list[Span]:
        """The chunks of a choice as runs, those of one node together."""
        ...


class PlainLoops:
    def choose(self, heads: list[Head], most: int, whole: bool, stretch_of: StretchOf) -> list[Victim]:
        heap: list[Any] = list(heads)
        heapq.heapify(heap)
        chosen: list[Victim] = []
        exhausted = True
        while heap and (len(chosen) < most or (whole and not exhausted)):
            *_, number, chunk, source = heap[0]
            if isinstance(source, _Rest):
                heapq.heappop(heap)
                rest = source
            else:
                following = next(source, None)
                if following is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (*following, source))
                rest = _Rest(stretch_of, number, chunk)
                if heap and rest.key is not None and rest.key > heap[0]:
                    heapq.heappush(heap, (*rest.key, rest))
                    continue
            rest.take(chosen, heap[0] if heap else None, None if whole else most)
            exhausted = rest.key is None
            if rest.key is not None:
                heapq.heappush(heap, (*rest.key, rest))
        return chosen

    def spans(self, victims: Iterable[Victim]) -> list[Span]:
        chunks: dict[int, list[int]] = defaultdict(list)
        for _, _, _, number, chunk in victims:
            chunks[number].append(chunk)
        return [(number, start, stop) for number, own in chunks.items() for start, stop in runs_of(own)]


class _Rest:
    """What is left of a node that has given up chunks in a choice."""

    __slots__ = ("_keys", "_number", "_place", "_stretch_of", "key")

    def __init__(self, stretch_of: StretchOf, number: int, chunk: int) -> None:
        self._stretch_of, self._number = stretch_of, number
        self._keys = self._next(chunk)
        self._place = 0
        self.key: Victim | None = self._keys[0]

    def take(self, chosen: list[Victim], rival: Victim | None, most: int | None) -> None:
        """Its first chunk, and all that go before the rival, until `most` are chosen."""
        keys, place = self._keys, self._place
        while True:
            chosen.append(keys[place])
            place += 1
            if place == len(keys):
                _, last = node_and_chunk(keys[-1])
                keys, place = self._next(last + 1), 0
                if not keys:
                    self.key = None
                    return
            if len(chosen) == most or (rival is not None and keys[place] > rival):
                break
        self._keys, self._place, self.key = keys, place, keys[place]

    def _next(self, chunk: int) -> list[Victim]:
        stretch = self._stretch_of(self._number, chunk)
        if stretch is None:
            return []
        level, active, first, scores = stretch
        return [(level, score, active, self._number, place) for place, score in enumerate(scores, first)]


class NativeLoops:
    """As PlainLoops, to the same result; raises EngineMissing where no compiler is, or Python's headers are not."""

    def __init__(self) -> None:
        functions = load_library(_SOURCE, (), python=True).functions
        self._choose, self._spans = functions.choose, functions.spans
        self._choose.restype = self._spans.restype = ctypes.py_object
        self._choose.argtypes = [ctypes.py_object, ctypes.c_ssize_t, ctypes.c_int, ctypes.py_object]
        self._spans.argtypes = [ctypes.py_object]

    def choose(self, heads: list[Head], most: int, whole: bool, stretch_of: StretchOf) -> list[Victim] | None:
        chosen: list[Victim] | None = self._choose(heads, most, whole, stretch_of)
        return chosen

    def spans(self, victims: list[Victim]) -> list[Span]:
        found: list[Span] = self._spans(victims)
        return found


PLAIN = PlainLoops()


def loops_when_ready() -> Loops:
    """fastest_loops, once a thread has them; PLAIN until then: no plan waits for a compiler."""
    global _making
    if fastest_loops.cache_info().currsize:
        return fastest_loops()
    if _making is None:
        _making = Thread(target=fastest_loops, name="pensieve-loops", daemon=True)
        _making.start()
    return PLAIN


_making: Thread | None = None


@cache
def fastest_loops() -> Loops:
    try:
        return NativeLoops()
    except EngineMissing:
        return PLAIN
