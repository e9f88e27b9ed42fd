"""Which program of the paged kernel does what: tiles of queries, cut along their keys where a GPU would idle.

Everything is arrays: a batch of 10,000 queries is described in well under a millisecond, once an iteration.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pensieve.device.batch import Integers, Spans

ITEM = 8
"""Integers a work item: kind (0 nothing, 1 small, 2 large), first query, queries, position of the first, where its block
table begins, split, splits, row of its first partial result."""
JOIN = 4
"""Integers a join: query, row of its first partial result, rows from one split's to the next one's, splits."""
SMALL, LARGE = 1, 2
_MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Cutting:
    """How work is cut. small_queries, large_queries: of a tile of either kind. block_keys: keys a step of the kernel.

    wanted_items: enough to keep all of a GPU busy; longer tiles are split until there are about as many. least_keys: of
    a split, below which joining costs more than it saves.
    """

    small_queries: int
    large_queries: int
    block_keys: int
    wanted_items: int
    least_keys: int = 128


@dataclass(frozen=True, slots=True)
class WorkList:
    """items [n, ITEM], the heaviest first; joins [m, JOIN]; partial_rows: rows of partial results, each of all heads."""

    items: NDArray[np.int32]
    joins: NDArray[np.int32]
    partial_rows: int
    kinds: frozenset[int]


def padded(spans: Spans, queries: int) -> Spans:
    """With spans over nothing for the queries up to so many that no span covers: their result is zero."""
    covered = int(spans.queries.sum())
    idle = np.arange(covered, queries, dtype=np.int64)
    nothing = np.zeros_like(idle)
    bounds = ((spans.first, idle), (spans.start, nothing - 1), (spans.stop, nothing), (spans.chunks, nothing))
    first, start, stop, chunks = (np.concatenate(both) for both in bounds)
    return Spans(first, start, stop, chunks, spans.blocks)


def work_list(spans: Spans, cutting: Cutting, window: int | None) -> WorkList:
    """At most `wanted_items` more items than tiles."""
    queries = spans.queries
    small = queries <= cutting.small_queries
    per_tile = np.where(small, cutting.small_queries, cutting.large_queries)
    span, index = _repeated(-(-queries // per_tile))
    offset = index * per_tile[span]
    count = np.minimum(per_tile[span], queries[span] - offset)
    first, start = spans.first[span] + offset, spans.start[span] + offset
    low = np.zeros_like(start) if window is None else np.maximum(0, start - window + 1)
    steps = np.maximum(1, -(-(start + count - low) // cutting.block_keys))

    share = max(-(-int(steps.sum()) // cutting.wanted_items), -(-cutting.least_keys // cutting.block_keys))
    splits = np.clip((steps + share // 2) // share, 1, _MOST_SPLITS)
    splits = -(-steps // -(-steps // splits))  # equal shares, rounded up to steps, may need fewer
    rows = np.where(splits > 1, splits * count, 0)
    partial = np.cumsum(rows) - rows

    tile, split = _repeated(splits)
    kind = np.where(small[span], SMALL, LARGE)
    columns = (kind, first, count, start, spans.tables[span])
    items = np.stack([*(x[tile] for x in columns), split, splits[tile], partial[tile]], axis=1)
    heaviest = np.argsort(-(steps / splits)[tile] * kind[tile], kind="stable")

    joined = np.flatnonzero(splits > 1)
    of, query = _repeated(count[joined])
    of = joined[of]
    joins = np.stack([first[of] + query, partial[of] + query, count[of], splits[of]], axis=1)
    kinds = frozenset(np.unique(kind).tolist())
    return WorkList(items[heaviest].astype(np.int32), joins.astype(np.int32), int(rows.sum()), kinds)


def _repeated(counts: Integers) -> tuple[Integers, Integers]:
    """For counts (2, 3): owners (0, 0, 1, 1, 1) and their indices (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
