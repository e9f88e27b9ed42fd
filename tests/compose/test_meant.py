"""A command line is read as it was meant, and says what that is."""

import pytest

from pensieve.lab.compose.conf import as_meant, options

SIMULATED = ["workload=trace", "model=llama3_8b", "cache=small", "hardware=sim_a100_80g"]


@pytest.mark.parametrize(
    ("config", "typed", "added"),
    [
        ("config", ["workload.path=a.jsonl", "-m"], SIMULATED),
        ("config", ["workload.path=a.jsonl", "--cfg", "job"], SIMULATED),
        ("config", ["workload.path=a.jsonl", "hardware=cpu"], ["workload=trace"]),
        ("config", ["workload.path=a.jsonl", "model.weights=random"], ["workload=trace"]),
        ("size", ["workload.path=a.jsonl"], ["workload=trace"]),
        ("config", ["workload.path=a.json", "workload=sharegpt"], []),
        ("config", ["workload.path=runs", "experiment=agents/policies_weka"], []),
        ("config", ["model=tiny"], []),
    ],
)
def test_a_path_alone_is_a_recording_to_replay(config, typed, added):
    arguments, notes = as_meant(typed, config)
    assert arguments == [*added, *typed]
    assert [all(one in note for one in added) for note in notes] == [True] * bool(added)


SHORT = "ablation_eviction agent_scaling paper_opt66b_4gpu"  # by its name alone, and with its folder before it


@pytest.mark.parametrize("name", SHORT.split())
def test_an_experiment_is_found_by_a_short_name(name):
    [now], [note] = as_meant([f"experiment={name}"])
    option = now.partition("=")[2]
    assert option in options("experiment") and option.rpartition("/")[2] in name
    assert note == f"experiment={name} is now {now}."


@pytest.mark.parametrize("name", ["demo", "paper/beyond", "mine"])
def test_a_whole_name_stays_as_typed(name):
    assert as_meant([f"experiment={name}"]) == ([f"experiment={name}"], [])
