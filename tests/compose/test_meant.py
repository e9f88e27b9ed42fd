"""A command line is read as it was meant, and says what that is."""

import pytest

from pensieve.compose.meant import as_meant

SIMULATED = ["workload=trace", "model=llama3_8b", "cache=small", "hardware=sim_a100_80g"]


@pytest.mark.parametrize(
    ("config", "typed", "added"),
    [
        ("config", ["workload.path=a.jsonl", "-m"], SIMULATED),
        ("config", ["workload.path=a.jsonl", "hardware=cpu"], ["workload=trace"]),
        ("config", ["workload.path=a.jsonl", "model.weights=random"], ["workload=trace"]),
        ("size", ["workload.path=a.jsonl"], ["workload=trace"]),
        ("config", ["workload.path=a.json", "workload=sharegpt"], []),
        ("config", ["workload.path=runs", "experiment=policies_weka"], []),
        ("config", ["model=tiny"], []),
    ],
)
def test_a_path_alone_is_a_recording_to_replay(config, typed, added):
    arguments, notes = as_meant(typed, config)
    assert arguments == [*typed, *added]
    assert [all(one in note for one in added) for note in notes] == [True] * bool(added)
