"""Which chunks are evicted next: what a choice is, and how those of a policy that values many at once are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.core.policies.base import EvictionPolicy, Scores, refuse_key
from pensieve.core.session import Node, View

Victim = tuple[int, float, float, int, int]
"""A chunk as it stands in the order of eviction, lowest first: level, score, last active, number of its node, and its place
there (~chunk from the tail)."""

Span = tuple[Node, int, int]
"""A run of chunks of a node: first chunk, stop."""

NOT_ENTERED = -1  # the stamp of a lead that no heap has an entry of


@dataclass(slots=True, eq=False)
class Lead:
    """The chunks of one node in an index: how many. In heaps, as it was entered last: the place of the first of them, and
    since_s: last active, as of the ages that have passed."""

    node: Node
    count: int = 0
    place: int = 0
    stamp: int = NOT_ENTERED
    key: Any = None
    since_s: float | None = None
    passed: int = 0


class Candidates(NamedTuple):
    """The chunks of one node that a choice looks at, in their order."""

    level: int
    last_active_s: float
    number: int
    node: Node
    places: NDArray[np.int64]
    scores: NDArray[np.float64]
    orders: NDArray[np.float64]


class Choice:
    """Chunks in the order of eviction. A choice is of thousands of chunks of a few nodes, the first of each: they are chosen,
    compared and grouped together, and their order is worked out only where somebody asks for it.

    nodes: those that have them. A row is a chunk, in order; `some` chooses rows.
    """

    __slots__ = ("_counts", "_levels", "_places", "_rows", "_scores", "_spans", "nodes")

    def __init__(
        self,
        nodes: Sequence[Node],
        levels: Sequence[int],
        counts: Sequence[int],
        places: NDArray[np.int64],
        scores: NDArray[np.float64],
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """counts: how many of places and scores are each node's, one node after the other. rows: the chunks in order, as
        indices of these; None: all, by level and score."""
        self.nodes = nodes
        self._levels, self._counts, self._places, self._scores = levels, counts, places, scores
        self._rows = rows
        self._spans: list[Span] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Choice]) -> Choice:
        """All of these, each of a level of its own."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*[(part.nodes, part._levels, part._counts) for part in parts], strict=True)
        places, scores = (np.concatenate([getattr(part, name) for part in parts]) for name in ("_places", "_scores"))
        nodes, levels, counts = ([*chain.from_iterable(column)] for column in columns)
        return cls(nodes, levels, counts, places, scores)

    def __len__(self) -> int:
        return len(self._places) if self._rows is None else len(self._rows)

    @property
    def rows(self) -> NDArray[np.int64]:
        if self._rows is None:
            by_level = [np.repeat(self._levels, self._counts)] if len(set(self._levels)) > 1 else []
            self._rows = np.lexsort([self._scores, *by_level])
        return self._rows

    @property
    def of(self) -> NDArray[np.int64]:
        """Whose each is, by place in `nodes`."""
        return np.repeat(np.arange(len(self.nodes)), self._counts)[self.rows]

    @property
    def levels(self) -> NDArray[np.int64]:
        return np.array(self._levels, np.int64)[self.of]

    @property
    def places(self) -> NDArray[np.int64]:
        """See Victim."""
        return self._places[self.rows]

    @property
    def scores(self) -> NDArray[np.float64]:
        return self._scores[self.rows]

    def some(self, which: slice | NDArray[Any]) -> Choice:
        """Those in these rows."""
        return Choice(self.nodes, self._levels, self._counts, self._places, self._scores, self.rows[which])

    def keys(self) -> list[NDArray[Any]]:
        """The columns of a Victim, a row each."""
        of = self.of
        last_active = np.array([node.session.last_active_s for node in self.nodes])
        numbers = np.array([node.number for node in self.nodes], np.int64)
        return [self.levels, self.scores, last_active[of], numbers[of], self.places]

    def victims(self) -> list[Victim]:
        return list(zip(*[column.tolist() for column in self.keys()], strict=True))

    def column(self, name: str) -> NDArray[Any]:
        """What this column of Chunks says of each."""
        stops = accumulate(self._counts)
        parts = [
            (getattr(node.chunks, name), stop - count, stop)
            for node, count, stop in zip(self.nodes, self._counts, stops, strict=True)
        ]
        places = np.maximum(self._places, ~self._places)
        return np.concatenate([_NONE, *[np.asarray(column)[places[start:stop]] for column, start, stop in parts]])[
            self.rows
        ]

    def spans(self) -> list[Span]:
        """As runs of chunks, those of one node together, in the order of the nodes' first ones."""
        if self._spans is None:
            if self._rows is not None:
                self._spans = self._spans_of_rows()
            elif len(self.nodes) == 1:
                self._spans = _runs(self.nodes[0], self._places)
            else:
                stops = [*accumulate(self._counts)]
                firsts = self._scores[[stop - count for stop, count in zip(stops, self._counts, strict=True)]].tolist()
                known = sorted(zip(self._levels, firsts, range(len(stops)), strict=True))
                own = [(self.nodes[i], self._places[stops[i] - self._counts[i] : stops[i]]) for _, _, i in known]
                self._spans = [span for node, places in own for span in _runs(node, places)]
        return self._spans

    def _spans_of_rows(self) -> list[Span]:
        if not len(self.rows):
            return []
        of, places = self.of, self.places
        nodes, firsts = np.unique(of, return_index=True)
        order = np.argsort(of, kind="stable")
        parts = dict(zip(nodes.tolist(), np.split(places[order], np.searchsorted(of[order], nodes[1:])), strict=True))
        in_order = nodes[np.argsort(firsts)].tolist()
        return [span for place in in_order for span in _runs(self.nodes[place], parts[place])]


def compared(one: Choice, other: Choice) -> tuple[list[int], list[int]]:
    """Where the chunks of two choices stand in the order of eviction of both together."""
    both = [choice for choice in (one, other) if len(choice)]
    keys = (
        [np.concatenate([getattr(choice, name) for choice in both]) for name in ("scores", "levels")]
        if both
        else [_NONE]
    )
    order = np.lexsort(keys)
    alike = np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in keys])
    if alike.any():
        order = np.lexsort(
            [np.concatenate(columns) for columns in zip(*[choice.keys() for choice in both], strict=True)][::-1]
        )
    stands = np.empty(len(order), np.int64)
    stands[order] = np.arange(len(order))
    return stands[: len(one)].tolist(), stands[len(one) :].tolist()


def _runs(node: Node, places: NDArray[np.int64]) -> list[Span]:
    """Chunks of a node, in the order of eviction, as runs."""
    first, last = int(places[0]), int(places[-1])
    if last - first == len(places) - 1:
        return [(node, first, last + 1) if first >= 0 else (node, ~last, -first)]
    breaks = np.flatnonzero(places[1:] != places[:-1] + 1) + 1
    return [span for run in np.split(places, breaks) for span in _runs(node, run)]


class VictimIndex(ABC):
    """The chunks of one View, ready to be taken in the policy's order. level 1: sessions with a waiting request, taken only
    after those that have none."""

    def __init__(self, policy: EvictionPolicy, view: View) -> None:
        self._policy = policy
        self._view = int(view)
        self._leads: dict[int, Lead] = {}
        self._unsettled: dict[int, Lead] = {}  # those that have changed since the last choice
        self._looked_at = 1  # nodes that the last choice was of: the next one may be of as many
        self._one_order = policy.many is not None  # of all chunks of a session
        self.chunks = 0

    def changed(self, node: Node, more: int) -> None:
        """Add `more` of the node's chunks to this index (fewer than 0: take them out). The next choice sorts in the one
        that is the first then."""
        lead = self._leads.get(node.number)
        if lead is None:
            if not more:
                return
            lead = self._leads[node.number] = Lead(node)
        lead.count += more
        self.chunks += more
        if lead.count:
            self._unsettled[node.number] = lead
        else:
            self._leave(lead)

    def remove(self, node: Node) -> None:
        """Remove all chunks of a node, of which a session starts to run; the caller resets their views."""
        lead = self._leads.get(node.number)
        if lead is not None:
            self.chunks -= lead.count
            self._leave(lead)

    def refresh(self, node: Node) -> None:
        """Sort a node in anew: the last active, next use or level of its session has changed."""
        lead = self._leads.get(node.number)
        if lead is not None:
            self._take_off(lead)
            self._unsettled[node.number] = lead

    @abstractmethod
    def choose(self, count: int, now_s: float, whole: bool = False) -> Choice:
        """The first `count` chunks in the order of eviction, or as many as there are; none leaves the index yet. whole: where
        the policy evicts whole sessions, as many more as the last one has."""

    @abstractmethod
    def victims(self, now_s: float) -> Iterator[tuple[Node, int]]:
        """Chunks, by node and place, in the order of eviction. After each one the caller must have removed it from this index
        (or stop)."""

    @abstractmethod
    def _settle(self, now_s: float) -> None:
        """Sort in what has changed since the last choice."""

    @abstractmethod
    def _take_off(self, lead: Lead) -> None:
        """Forget where the node stands."""

    def listed(self, nodes: Iterable[Node], now_s: float) -> Choice:
        """All chunks of these nodes in this view, in the order of eviction."""
        own = [self._candidates(node, now_s) for node in nodes if self._view in node.chunks.view]
        return (self._first_of(own, sum(len(one.places) for one in own), False, None) if own else None) or NOTHING

    def _first_of(
        self, looked_at: list[Candidates], count: int, whole: bool, before: tuple[int, float, float] | None
    ) -> Choice | None:
        """The first `count` chunks of these nodes, if all are before that level, score and order (None: whatever they are);
        whole: up to the last one of a node."""
        own = sorted(looked_at, key=_PRECEDENCE)
        counts = [len(one.places) for one in own]
        of, levels = np.repeat(np.arange(len(own)), counts), np.repeat([one.level for one in own], counts)
        scores, orders = map(np.concatenate, zip(*[(one.scores, one.orders) for one in own], strict=True))
        told = scores
        if np.isnan(scores.max()):
            nobody = next(one for one in own if np.isnan(one.scores).any())
            refuse_key(self._policy, "score", float("nan"), nobody.node.session.name)
        falls = (scores[1:] < scores[:-1]) | ((scores[1:] == scores[:-1]) & (orders[1:] < orders[:-1]))
        if (falls & (of[1:] == of[:-1])).any():  # a node's chunks go in their order
            scores, orders = _reached(own)
        sure = len(scores)
        if before is not None and own[-1].level >= before[0]:
            level, score, order = before
            earlier = (scores < score) | ((scores == score) & (orders < order))
            sure = int(np.count_nonzero((levels < level) | ((levels == level) & earlier)))
            if sure < count:
                return None
        rows, stop = np.lexsort((orders, scores, levels)), count
        if whole and sure >= count:
            last = np.append(of[1:] != of[:-1], True)[rows[count - 1 : sure]]
            if not last.any() and before is not None:
                return None
            stop = count + int(last.argmax()) if last.any() else sure
        places = np.concatenate([one.places for one in own])
        return Choice([one.node for one in own], [one.level for one in own], counts, places, told, rows[:stop])

    def as_victim(self, node: Node, place: int, now_s: float) -> Victim:
        """A chunk as it stands in the order of eviction now, also one that is in no index."""
        index = self._asked(node, place)
        (score,) = self._scores(node, index, index + 1, now_s)
        return self._level(node), float(score), node.session.last_active_s, node.number, place

    def _scores(self, node: Node, first: int, last: int, now_s: float) -> Scores:
        """Of its chunks that are [first, last) of their session."""
        return self._policy.scores(node.session, first, last, now_s)

    def _candidates(self, node: Node, now_s: float, most: int | None = None) -> Candidates:
        """The node's chunks in this view, the first `most` of them."""
        column = node.chunks.view
        low, high = column.find(self._view), column.rfind(self._view)
        if high - low + 1 == self._leads[node.number].count:
            places = np.arange(low, high + 1)
        else:
            places = np.flatnonzero(np.frombuffer(column, np.uint8) == self._view)
        places, told = self._valued(node, places, most, now_s)
        try:
            scores = np.asarray(told, np.float64)
        except (TypeError, ValueError):
            refuse_key(self._policy, "score", next(one for one in told if not is_key(one)), node.session.name)
        order, session = self._policy.order, node.session
        asked = places[:1] if self._one_order else places
        orders = np.array([order(session, self._asked(node, place)) for place in asked.tolist()], np.float64)
        own = self._level(node), session.last_active_s, node.number
        return Candidates(*own, node, places, scores, np.resize(orders, len(places)))

    # -- from the head; TailIndex has its own ---------------------------------------------------------------------------

    def _valued(
        self, node: Node, indices: NDArray[np.int64], most: int | None, now_s: float
    ) -> tuple[NDArray[np.int64], Scores]:
        """The first places of these chunks, and their scores."""
        places = indices[:most]
        first, last = int(places[0]), int(places[-1])
        scores = self._scores(node, node.start + first, node.start + last + 1, now_s)
        if last - first >= len(places):
            scores = [scores[place - first] for place in places.tolist()]
        return places, scores

    def _first(self, node: Node) -> int:
        """The place of the node's chunk that goes first."""
        return node.chunks.view.find(self._view)

    def _asked(self, node: Node, place: int) -> int:
        """The chunk of its session by which the policy values it."""
        return node.start + place

    def _level(self, node: Node) -> int:
        return 1 if node.session.waiting or node.waiting else 0

    def leads(self) -> dict[int, tuple[int, int]]:
        """For check(): node number -> (place of the leading chunk, count)."""
        return {number: (self._first(lead.node), lead.count) for number, lead in self._leads.items()}

    def _leave(self, lead: Lead) -> None:
        """A node has no chunk here any more."""
        self._take_off(lead)
        del self._leads[lead.node.number]
        self._unsettled.pop(lead.node.number, None)


class _Table:
    """Nodes of one level, a row each, in no order: their first chunk and the last one, and what is compared after scores:
    the policy's order, when their session was last active, and their number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._rows: dict[int, int] = {}  # by number
        self.first, self.last, self.number = (np.zeros(64, np.int64) for _ in range(3))
        self.order, self.active_s = np.zeros(64), np.zeros(64)

    def put(self, node: Node, first: int, last: int, order: float) -> None:
        row = self._rows.get(node.number)
        if row is None:
            row = self._rows[node.number] = len(self.nodes)
            self.nodes.append(node)
            if row == len(self.first):
                for name in ("first", "last", "number", "order", "active_s"):
                    setattr(self, name, np.resize(getattr(self, name), 2 * row))
            self.number[row] = node.number
        self.first[row], self.last[row] = first, last
        self.order[row], self.active_s[row] = order, node.session.last_active_s

    def in_order(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """In the order in which chunks of equal score go."""
        return rows[np.lexsort((self.number[rows], self.active_s[rows], self.order[rows]))]

    def take_out(self, node: Node) -> None:
        """The last row moves to its place."""
        row = self._rows.pop(node.number, None)
        if row is None:
            return
        moved, old = self.nodes.pop(), len(self.nodes)
        if moved is not node:
            self.nodes[row], self._rows[moved.number] = moved, row
            for column in (self.first, self.last, self.number, self.order, self.active_s):
                column[row] = column[old]


class RunIndex(VictimIndex):
    """As VictimIndex, of nodes that are whole sessions: no heaps, but a table of each level. A choice looks at the nodes of
    the lowest first chunks, and there at the chunks below the first one of the next node."""

    def __init__(self, policy: EvictionPolicy, view: View) -> None:
        super().__init__(policy, view)
        assert policy.many is not None
        self._many, self._below = policy.many, policy.below
        self._tables = _Table(), _Table()
        self._with_holes: set[int] = set()  # numbers of nodes that have others between their chunks of this view

    def choose(self, count: int, now_s: float, whole: bool = False) -> Choice:
        self._settle(now_s)
        parts: list[Choice] = []
        for level, table in enumerate(self._tables):
            if count > 0 and table.nodes:
                parts.append((self._first_one if count == 1 else self._lowest)(table, level, now_s, count))
                count -= len(parts[-1])
        return Choice.joined(parts) if parts else NOTHING

    def victims(self, now_s: float) -> Iterator[tuple[Node, int]]:
        while spans := self.choose(1, now_s).spans():
            yield spans[0][:2]

    def _first_one(self, table: _Table, level: int, now_s: float, count: int = 1) -> Choice:
        size = len(table.nodes)
        heads = self._many(table.order[:size], table.first[:size], now_s)
        row = int(heads.argmin())
        alike = heads == heads[row]
        if np.count_nonzero(alike) > 1:
            row = int(table.in_order(np.flatnonzero(alike))[0])
        return Choice([table.nodes[row]], [level], [1], table.first[row : row + 1].copy(), heads[row : row + 1])

    def _lowest(self, table: _Table, level: int, now_s: float, count: int) -> Choice:
        """The first `count` chunks of a level, or as many as there are."""
        size, most = len(table.nodes), self._looked_at + self._looked_at // 4 + 1
        heads = self._many(table.order[:size], table.first[:size], now_s)
        while True:
            rows, limit = np.arange(size), np.inf
            if most < size:
                rows = np.argpartition(heads, most)[: most + 1]
                rows, limit = rows[:-1], float(heads[rows[-1]])
            rows = table.in_order(rows)
            stops = np.minimum(table.last[rows] + 1, self._below(table.order[rows], limit, now_s))
            lengths = np.maximum(stops - table.first[rows], 0)
            if most >= size or int(lengths.sum()) >= count:
                of, places, scores = self._values(table, rows, lengths, now_s)
                edge = np.partition(scores, count - 1)[count - 1] if count <= len(scores) else np.inf
                if most >= size or edge < limit:
                    break
            most *= 2
        chosen = scores < edge
        chosen[np.flatnonzero(scores == edge)[: count - np.count_nonzero(chosen)]] = True
        counts = np.bincount(of[chosen], minlength=len(rows)).tolist()
        own = [(table.nodes[row], of_it) for row, of_it in zip(rows.tolist(), counts, strict=True) if of_it]
        self._looked_at = len(own)
        nodes, of_each = [node for node, _ in own], [of_it for _, of_it in own]
        return Choice(nodes, [level] * len(own), of_each, places[chosen], scores[chosen])

    def _values(
        self, table: _Table, rows: NDArray[np.int64], lengths: NDArray[np.int64], now_s: float
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Of the first so many chunks of the nodes in these rows, as far as they are in this view: whose each is, which, and
        its score, or that of one before it which is higher: it does not go before that."""
        of, starts = np.repeat(np.arange(len(rows)), lengths), table.first[rows]
        places = np.arange(len(of)) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        if self._with_holes and not self._with_holes.isdisjoint(table.number[rows].tolist()):
            runs = zip(rows.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
            views = b"".join([table.nodes[row].chunks.view[start:stop] for row, start, stop in runs])
            there = np.frombuffer(views, np.uint8) == self._view
            of, places = of[there], places[there]
        scores = self._many(table.order[rows][of], places, now_s)
        same = of[1:] == of[:-1]
        if (same & (scores[1:] < scores[:-1])).any():
            scores = np.concatenate([np.maximum.accumulate(own) for own in np.split(scores, np.flatnonzero(~same) + 1)])
        return of, places, scores

    def _settle(self, now_s: float) -> None:
        for number, lead in self._unsettled.items():
            node, view = lead.node, lead.node.chunks.view
            first, last = view.find(self._view), view.rfind(self._view)
            self._tables[self._level(node)].put(node, first, last, self._policy.order(node.session, first))
            if last - first + 1 == lead.count:
                self._with_holes.discard(number)
            else:
                self._with_holes.add(number)
        self._unsettled.clear()

    def _take_off(self, lead: Lead) -> None:
        for table in self._tables:
            table.take_out(lead.node)
        self._with_holes.discard(lead.node.number)


def _reached(own: Iterable[Candidates]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The highest score and order of each chunk and those before it of the same node."""
    keys: list[tuple[float, float]] = []
    for one in own:
        keys += accumulate(zip(one.scores.tolist(), one.orders.tolist(), strict=True), max)
    scores, orders = np.array(keys).T
    return scores, orders


_PRECEDENCE = itemgetter(0, 1, 2)


_NONE = np.empty(0, np.int64)
NOTHING = Choice((), (), (), _NONE, np.empty(0), _NONE)


def is_key(value: object) -> bool:
    """Whether it is a number that has a place among the others: NaN has none, and would leave a heap in any order."""
    try:
        return value <= float("inf")  # type: ignore[operator]
    except TypeError:
        return False
