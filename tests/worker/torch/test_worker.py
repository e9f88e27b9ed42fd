"""A batch built in arrays is what its rows say one by one; and what a step reports, waits for and leaves alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pensieve.core.plan import Moved, Row, Sample
from pensieve.device.batch import BlockTables, build_batch
from pensieve.device.model import LoadedModel
from pensieve.serve.systems.profiling import swap_out

from .driver import Driver, random_tokens, tiny_model


def test_a_step_reports_times_and_margins(llama: LoadedModel) -> None:
    driver = Driver(llama)
    result = driver.perform(moves=[swap_out(3, (0,), (1,))])
    assert (result.moved, result.tokens, result.ended_ns, result.compute_ns) == ((Moved(3),), {}, None, 0)
    assert result.stall_ns > 0
    before = driver.worker._clock.now_ns()
    result = driver.step(driver.prompt_row(4, random_tokens(12, 0)))
    top = torch.topk(driver.worker.last_logits[4], 2)
    assert result.tokens == {4: int(top.indices[0])}
    assert result.margins[4] == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-6)
    assert result.ended_ns is not None
    assert before < result.ended_ns <= driver.worker._clock.now_ns()
    assert 0 < result.compute_ns <= result.ended_ns - before
    assert (result.h2d_bytes, result.d2h_bytes, result.stall_ns) == (0, 0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_a_row_whose_logits_are_not_finite_leaves_the_others_exact(attention: str, value: float) -> None:
    """Long and short contexts and a prefill beside it: of each step the tokens are those of a batch without the row. What it
    left in its blocks is not read by who gets them next."""
    driver = Driver(tiny_model("llama", attention=attention))
    for slot, length in ((0, 12), (1, 70), (2, 11)):
        driver.step(driver.prompt_row(slot, random_tokens(length, slot)))
    driver.worker.tensors.gpu[:, driver.tables[0][0]] = value
    row, prompt = driver.decode_row(0), driver.prompt_row(3, random_tokens(9, 3))
    result = driver.perform([row, driver.decode_row(1), driver.decode_row(2), prompt], driver.allocate(3, 9))
    assert (result.error, result.not_finite, sorted(result.tokens)) == (None, (0,), [1, 2, 3])
    assert set(result.margins) == set(result.tokens)
    for slot, token in result.tokens.items():
        driver.tokens[slot].append(token)
        driver.check_logits(slot)
    driver.free += [block for block in driver.tables.pop(0) if block is not None]
    driver.step(driver.prompt_row(4, random_tokens(13, 4)))
    driver.step(driver.decode_row(4), driver.decode_row(1))
    driver.check_logits(4)
    driver.check_logits(1)


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


@pytest.mark.parametrize("seed", range(12))
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
