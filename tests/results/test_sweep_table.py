"""The rows of a sweep's table: which trials they pool, and whether their outputs agree."""

from array import array
from pathlib import Path

import pytest

from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep

FAST = [40.0, 42.0, 44.0, 46.0, 48.0, 50.0]
SLOW = [40.0, 60.0, 80.0, 100.0, 120.0, 150.0]


@pytest.fixture
def store() -> ResultsStore:
    return ResultsStore(MEMORY)


def test_what_a_swept_overlay_chose_makes_groups(store: ResultsStore) -> None:
    """Two replays of one sweep are two machines: their times must not be pooled."""
    sweep = open_sweep(store, experiment="fidelity_vllm", replay="one,other")
    for job, (model, hardware, scale) in enumerate((("llama", "sim_h100", 1.0), ("qwen", "sim_h200", 9.0))):
        turns = conversation_turns([scale * ms for ms in FAST])
        add_trial(store, sweep, job, "prefix_cache", turns, model=model, hardware=hardware)
    rows = sweep_table(store, sweep).rows
    assert [dict(row.group) for row in rows] == [
        {"model": "llama", "hardware": "sim_h100"},
        {"model": "qwen", "hardware": "sim_h200"},
    ]
    assert rows[1].ttft_last_ms == pytest.approx(9 * (rows[0].ttft_last_ms or 0))


def test_outputs_are_compared_token_for_token(tmp_path: Path) -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store)
    other = conversation_turns(SLOW)
    other[5].token_ids[2] += 1
    other[5].margins[2] = 0.001953125
    add_trial(store, sweep, 0, "pensieve", conversation_turns(FAST), tokens=tmp_path)
    add_trial(store, sweep, 1, "gpu_only", other, tokens=tmp_path)
    add_trial(store, sweep, 2, "stateless", conversation_turns(SLOW), tokens=tmp_path)
    table = sweep_table(store, sweep)
    rows = {row.baseline: row.outputs for row in table.rows}
    same, different = rows["pensieve"], rows["gpu_only"]
    assert rows["stateless"] is None
    assert same is not None
    assert different is not None
    assert (same.reference, same.turns_compared, same.turns_differing) == ("stateless", 19, 0)
    assert (different.turns_compared, different.turns_differing, different.margin) == (19, 1, 0.001953125)
    assert "identical" in table.text() and "1 differ" in table.text()
    [note] = [one for one in table.notes if one.code == "outputs_differ"]
    assert "stateless's: gpu_only in 1 of 19 turns, margin at most 2.0e-03" in note.text
    silent = {"gpu_only": other, "stateless": conversation_turns(SLOW)}
    for record in (record for own in silent.values() for record in own):
        record.margins = array("d")
    for job, (baseline, own) in enumerate(silent.items(), start=3):
        add_trial(store, sweep, job, baseline, own, tokens=tmp_path, seed=1)
    [note] = [one for one in sweep_table(store, sweep).notes if one.code == "outputs_differ"]
    assert "in 2 of 38 turns, unknown margin" in note.text, "one seed does not tell it"
