import json

import pytest

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
        ({"contended": True}, r"shared their device with others \(2, 4\).*trial.exclusive=true"),
        ({"weights": "hub"}, "random and trained weights"),
        ({"flags": {"contaminated": "It held."}}, "an earlier run had asked.*start it anew"),
        ({"code_hash": "other"}, "different versions of the code.*run the sweep's command again"),
    ],
)
def test_what_must_not_stand_in_one_panel_is_refused(store, tmp_path, changed, said):
    chat(store)
    source = change(store, "stateless", **changed)
    with pytest.raises(MixedPanel, match=f"One panel would hold .*{said}.*--allow-mixed"):
        source.trace(source.trials)


def test_what_was_let_through_is_said_in_the_picture_and_beside_it(store, drawn, tmp_path):
    chat(store)
    change(store, "stateless", simulated=True)
    [drawing] = FIGURES["ttft_by_turn"].draw(open_source(store, allow_mixed=True), tmp_path)
    warning = next(text for text in drawn["ttft_by_turn"].texts if text.startswith("MIXED: "))
    told = json.loads(drawing.sidecar.read_text())
    assert told["allow_mixed"] is True
    assert warning.startswith(" ".join(["MIXED:", *"; ".join(told["mixed"]).split()]))
