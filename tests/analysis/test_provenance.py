from __future__ import annotations

import json

import pytest

from analysis.provenance import footnote, ranges
from analysis.registry import FIGURES
from analysis.sweep import open_source
from pensieve.errors import MixedPanel
from tests.analysis.sweeps import fill
from tests.results.trials import conversation_turns

BOTH = {"baseline": ["pensieve", "stateless"]}


def chat(store, **columns):
    return fill(store, BOTH, lambda at, seed: conversation_turns((40.0, 50.0)), **columns)


def change(store, baseline, **columns):
    """Of one baseline's trials; returns the sweep as it is then."""
    for job in open_source(store).jobs:
        if job.last.baseline == baseline:
            store.set_trial(job.last.id, **columns)
    return open_source(store)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"simulated": True}, "simulated and real trials"),
        ({"contended": True}, r"shared their device with others \(2, 4\).*trial.exclusive=true"),
        ({"weights": "hub"}, "random and trained weights"),
        ({"flags": {"profiled": True}}, "a profiler slowed.*without trial.profile=true"),
        ({"flags": {"contaminated": "It held."}}, "an earlier run had asked.*start it anew"),
        ({"code_hash": "other"}, "different versions of the code.*run the sweep's command again"),
    ],
)
def test_what_must_not_stand_in_one_panel_is_refused_unless_asked_for_and_then_said(
    store, drawn, tmp_path, changed, said
):
    chat(store)
    source = change(store, "stateless", **changed)
    with pytest.raises(MixedPanel, match=f"One panel would hold .*{said}.*--allow-mixed"):
        source.panels()
    allowed = open_source(store, allow_mixed=True)
    [drawing] = FIGURES["ttft_by_turn"].draw(allowed, tmp_path)
    warning = next(text for text in drawn["ttft_by_turn"].texts if text.startswith("MIXED: "))
    told = json.loads(drawing.sidecar.read_text())
    assert told["allow_mixed"] is True
    assert " ".join(["MIXED:", "; ".join(told["mixed"])]) == warning


def test_contended_trials_are_refused_even_where_all_are(store):
    with pytest.raises(MixedPanel, match="shared their device"):
        chat(store, contended=True).panels()


def test_classes_of_ones_own_may_have_code_of_their_own(store):
    chat(store)
    own = {"seed": 0, "eviction": {"_target_": "my_module.Longest"}}
    for job in change(store, "stateless", code_hash="package and my_module").jobs:
        if job.last.baseline == "stateless":
            store.set_trial(job.last.id, config={**job.last.config, **own, "seed": job.last.seed})
    assert len(open_source(store).panels()[0].provenance.code) == 2


def test_the_sidecar_says_what_the_figure_stands_on(store, drawn, tmp_path):
    source = chat(store, device="NVIDIA X", device_count=2, weights="hub", code_hash="abcdef0123456789")
    store.set_trial(1, flags={"failures": "one timed out"})
    [drawing] = FIGURES["ttft_by_turn"].draw(open_source(store), tmp_path)
    told = json.loads(drawing.sidecar.read_text())
    expected = {
        "figure": "ttft_by_turn", "sweep": source.sweep.id, "command": "run.py -m", "trials": [1, 2, 3, 4],
        "seeds": [0, 1], "conversations": 6, "devices": ["2 x NVIDIA X"], "code": ["abcdef0123456789"], "load": ["closed"],
        "cache_state": ["cold"], "kind": ["real"], "weights": ["hub"], "allow_mixed": False, "with_failures": [1],
    }  # fmt: skip
    assert {key: told[key] for key in expected} == expected
    assert told["series"] == [{"baseline": "pensieve", "trials": [1, 3]}, {"baseline": "stateless", "trials": [2, 4]}]
    note = footnote(drawing.panel.provenance, "Median")
    for part in ("2 x NVIDIA X", "trained weights", "code abcdef01", "trials 1 have turns that did not complete"):
        assert part in note


def test_simulated_trials_are_called_so(store):
    [panel] = chat(store, simulated=True, device="sim_h100").panels()
    assert "no weights: lengths only); SIMULATED by a cost model of sim_h100" in footnote(panel.provenance, "Median")


def test_ids_are_written_as_ranges():
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
