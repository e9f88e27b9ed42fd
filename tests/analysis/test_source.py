import pytest

from analysis.registry import FIGURES
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.units import in_order, number
from tests.analysis.sweeps import fill
from tests.results.trials import conversation_turns, trial_fields

CHAT = conversation_turns((40.0, 50.0))


def chat(store, axes, **columns):
    return fill(store, axes, lambda at, seed: CHAT, **columns)


def test_what_did_not_complete_is_left_out_and_said(store):
    source = chat(store, {"baseline": ["pensieve"]}, command="run.py -m")
    failed = store.begin_trial(trial_fields("x", baseline="stateless"))
    store.link(source.sweep.id, failed, 9, reused=False)
    store.finish_trial(failed, "failed", error="No memory.")
    store.set_sweep(source.sweep.id, n_expected=5)
    source = open_source(store)
    [panel] = source.panels()
    assert (panel.baselines, panel.left_out, source.trace([]).incomplete) == (["pensieve"], ["stateless"], 3)
    [plot] = FIGURES["ttft_by_turn"].plots(open_source(store))
    assert "stateless" not in {row["baseline"] for row in plot.rows}
    with pytest.raises(MissingSeries, match=r"has no completed trial of stateless beside the others; run `run.py -m`"):
        list(FIGURES["speedup"].plots(open_source(store)))


def test_sizes_are_in_order_of_what_they_come_to():
    assert in_order(["2 ktokens", "768 tokens", "0"]) == ["0", "768 tokens", "2 ktokens"]
    assert in_order(["1GiB", "900MB", "2 KiB"]) == ["2 KiB", "900MB", "1GiB"]
    assert in_order(["4", "None", "16"]) == ["4", "16", "None"]
    assert in_order(["10", "9", "0.5"]) == ["0.5", "9", "10"]
    assert in_order(["retention_value", "lru"]) == ["retention_value", "lru"] and number("512/256") is None
    assert in_order(["1GiB", "768 tokens"]) == ["1GiB", "768 tokens"], "bytes and tokens cannot be told apart"
    assert (number("2 ktokens"), number("2KB"), number("1e3"), number("None")) == (2000, 2000, 1000, None)
