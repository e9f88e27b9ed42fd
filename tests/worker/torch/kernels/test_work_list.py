import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.device.batch import Span
from pensieve.device.kernels.work_list import SMALL, Cutting, padded, work_list

from .cases import spans_of


def _spans(bounds, chunk=16):
    spans, first = [], 0
    for start, stop in bounds:
        spans.append(Span(first, start, stop, np.arange(first, first + -(-stop // chunk), dtype=np.int64)))
        first += stop - start
    return spans_of(spans)


def _pairs(work, cutting, window):
    """(query, key) as the kernel walks them: a tile's keys in steps, shared among its splits, masked row by row."""
    pairs = []
    for kind, first, count, start, _, split, splits, _ in work.items.tolist():
        assert count <= (cutting.small_queries if kind == SMALL else cutting.large_queries)
        lowest = 0 if window is None else max(0, start - window + 1)
        steps = -(-(start + count - lowest) // cutting.block_keys)
        share = -(-steps // splits) * cutting.block_keys
        low = lowest + split * share
        assert low < start + count or start < 0, "no split is without keys"
        for key in range(low, min(low + share, start + count)):
            seen = (i for i in range(count) if key <= start + i and (window is None or key > start + i - window))
            pairs.extend((first + i, key) for i in seen)
    return pairs


bounds = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 60)).map(lambda x: (x[0], x[0] + x[1])), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(bounds, st.integers(1, 4), st.integers(1, 40), st.sampled_from([None, 1, 50]), st.integers(0, 3))
def test_every_query_meets_every_key_it_sees_once(rows, small, wanted, window, idle):
    cutting = Cutting(small, 8 * small, 16, wanted, least_keys=32)
    queries = sum(stop - start for start, stop in rows)
    work = work_list(padded(_spans(rows), queries + idle), cutting, window)
    expected = [
        (span.first + i, key)
        for span in _spans(rows)
        for i in range(span.queries)
        for key in range(max(0, span.start + i - window + 1) if window else 0, span.start + i + 1)
    ]
    assert sorted(_pairs(work, cutting, window)) == sorted(expected)
    tiles = sum(-(-(b - a) // (small if b - a <= small else 8 * small)) for a, b in rows) + idle
    assert len(work.items) <= tiles + wanted

    written = {}
    for _, first, count, _, _, split, splits, partial in work.items.tolist():
        if splits > 1:
            for query in range(count):
                row = partial + split * count + query
                assert row not in written, "two programs write one row"
                written[row] = first + query
    read = {}
    for query, first, step, splits in work.joins.tolist():
        for split in range(splits):
            read[first + split * step] = query
    assert read == written
    assert set(written) == set(range(work.partial_rows))
