"""A command line is read as it was meant, and says what that is."""

import pytest

from pensieve.lab.compose import options
from pensieve.lab.compose.meant import FORMER_COMMANDS, as_meant

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


FORMER = """
ablation_eviction agent_scaling agent_stages beyond_chunk_size beyond_copy_ahead beyond_cost_context
beyond_cost_error beyond_cpu_size beyond_disk beyond_duplex beyond_pipelined_swap_in
cluster_migration cluster_scale demo_sequential disaggregated_decode disaggregated_decode_sim fidelity
fidelity_vllm hotness paper_eviction paper_llama2_13b_gqa_sharegpt
paper_llama2_13b_gqa_ultrachat paper_llama2_70b_4gpu paper_opt13b_sharegpt paper_opt13b_ultrachat paper_opt66b_4gpu
paper_think_time paper_unified policies_agents policies_mooncake policies_weka prefix_invalidation
prefix_invalidation_batch prefix_invalidation_engines replica_routing returning_loads sharegpt_full sharegpt_gemma
sharegpt_light slot_overflow value_of_hint
"""


@pytest.mark.parametrize("name", FORMER.split())
def test_an_experiment_is_found_by_its_former_name(name):
    [now], [note] = as_meant([f"experiment={name}"])
    option = now.partition("=")[2]
    assert option in options("experiment") and option.rpartition("/")[2] in name
    assert note == f"experiment={name} is now {now}."


@pytest.mark.parametrize("name", FORMER_COMMANDS)
def test_an_experiment_that_is_another_one_now(name):
    [experiment, *_], [note] = as_meant([f"experiment={name}"])
    assert experiment.partition("=")[2] in options("experiment") and name in note


def test_a_small_version_is_a_scale():
    assert as_meant(["-m", "experiment=hotness_small", "seed=1"])[0] == [
        "-m", "experiment=users/hotness", "scale=small", "seed=1",
    ]  # fmt: skip
    assert as_meant(["experiment=peers_multiturn_small"])[0] == ["experiment=peers_multiturn", "scale=small"]


@pytest.mark.parametrize("name", ["demo", "paper/eviction", "mine"])
def test_what_has_not_moved_stays_as_typed(name):
    assert as_meant([f"experiment={name}"]) == ([f"experiment={name}"], [])


def test_two_former_names_on_one_line_are_both_replaced_where_they_stand():
    typed = ["experiment=hotness_small", "seed=1", "eviction=noisy_hint_20", "-m"]
    meant, notes = as_meant(typed)
    expected = [
        "experiment=users/hotness",
        "scale=small",
        "seed=1",
        "eviction=noisy_hint",
        "eviction.error_pct=20",
        "-m",
    ]
    assert meant == expected
    assert len(notes) == 2
