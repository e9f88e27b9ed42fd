"""A batch built in arrays is what its rows say one by one, and costs the host little."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device.batch import BlockTables, Spans, build_batch

CPU = torch.device("cpu")
CHUNK = 4


def random_rows(source: random.Random) -> tuple[list[Row], BlockTables]:
    tables, rows = BlockTables(), []
    for slot in source.sample(range(90), source.randint(1, 12)):
        tables.overwrite(slot, 0, [source.randrange(1000) for _ in range(40)])
        at, runs = source.randrange(20), []
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            stop = at + source.choice((1, 1, 1, 2, 9))
            runs.append((at, stop))
            at = stop + source.randint(1, 9)
        count = sum(stop - start for start, stop in runs)
        tokens = None if count == 1 and source.random() < 0.5 else tuple(source.randrange(97) for _ in range(count))
        sample = Sample(runs[-1][1], source.randrange(2**63), source.choice((0.0, 0.7)), 0.9)
        rows.append(Row(slot, tuple(runs), tokens, sample if source.random() < 0.8 else None))
    return rows, tables


@pytest.mark.parametrize("seed", range(40))
def test_every_position_has_its_token_its_place_and_its_sample(seed: int) -> None:
    rows, tables = random_rows(random.Random(seed))
    batch = build_batch(rows, tables, CHUNK, CPU)
    spans = list(batch.spans)
    wanted = {}  # by place in the pool and position: its token
    for row in rows:
        positions = [position for run in row.runs for position in range(*run)]
        for position, token in zip(positions, row.tokens or [None], strict=True):
            block = int(tables.at(row.slot, position // CHUNK))
            wanted[block * CHUNK + position % CHUNK, position] = token
    unseen = set() if batch.unseen is None else set(batch.unseen[0].tolist())
    got = zip(batch.write_places.tolist(), batch.positions.tolist(), batch.token_ids.tolist(), strict=True)
    for at, (place, position, token) in enumerate(got):
        known = wanted.pop((place, position))
        assert (known is None) == (at in unseen) and known in (None, token)
    assert not wanted
    lengths = [span.queries for span in spans]
    singles = lengths.count(1)
    assert lengths[:singles] == [1] * singles, "spans of one query come first"
    assert [span.stop for span in spans[:singles]] == sorted((s.stop for s in spans[:singles]), reverse=True)
    assert [span.first for span in spans] == np.cumsum([0, *lengths[:-1]]).tolist()
    by_position = {(row.slot, row.sample.position): row.sample for row in rows if row.sample is not None}
    assert len(batch.sampled) == len(by_position)
    for at, (slot, sample) in zip(batch.logits_at.tolist(), batch.sampled, strict=True):
        assert by_position.pop((slot, sample.position)) is sample
        assert int(batch.positions[at]) == sample.position - 1
    assert batch.logits_at.tolist() == sorted(batch.logits_at.tolist())


def test_spans_as_arrays_and_as_objects_are_the_same() -> None:
    rows, tables = random_rows(random.Random(3))
    spans = build_batch(rows, tables, CHUNK, CPU).spans
    each = list(spans)
    for cut, own in ((spans, each), (spans.cut(2, 4), each[2:4]), (spans.cut(0, 0), [])):
        again = Spans.of(own)
        for field in fields(Spans):
            assert np.array_equal(getattr(cut, field.name), getattr(again, field.name)), field.name
    for window in (None, 3):
        lows = [0 if window is None else max(0, span.start - window + 1) for span in each]
        assert spans.lows(window).tolist() == lows


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(0, ((0, 1),), (1, 2), None), "tokens for"),
        (Row(0, ((9, 11),), (1, 2), None), r"no block|beyond"),
        (Row(5, ((0, 1),), (1,), None), "beyond"),
    ],
)
def test_what_no_scheduler_plans_is_a_bug(row: Row, words: str) -> None:
    tables = BlockTables()
    tables.overwrite(0, 0, [1, 2])
    with pytest.raises(AssertionError, match=words):
        build_batch([row], tables, CHUNK, CPU)
