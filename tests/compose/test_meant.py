"""A command line is read as it was meant, and says what that is."""

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from pensieve.lab.compose import check, options
from pensieve.lab.compose.meant import as_meant
from pensieve.lab.trial.jobs import compose_jobs, plan_jobs
from tests.composed import hydra_session

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


REMOVED = """
sim_eviction users/hotness_interval users/hotness_users cluster/failures cluster/routing machine/llm_decode
paper/ablation_chunk paper/ablation_cpu_size paper/ablation_gpu_cache paper/ablation_scheduler paper/ablation_swap_out
paper/sim_llama3_8b peers/batch_size_confound
"""


@pytest.mark.parametrize("name", REMOVED.split())
def test_an_experiment_that_was_removed_is_asked_by_another_command(name):
    meant, [note] = as_meant([f"experiment={name}"])
    assert f"experiment={name}" not in meant and name in note
    with hydra_session():
        config = GlobalHydra.instance().hydra.compose_config("config", meant, RunMode.MULTIRUN, False)
        jobs = plan_jobs(config)
        assert len([check(job) for job in compose_jobs(config, jobs)]) > 1


@pytest.mark.parametrize("name", ["demo", "paper/eviction", "mine"])
def test_what_has_not_moved_stays_as_typed(name):
    assert as_meant([f"experiment={name}"]) == ([f"experiment={name}"], [])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("experiment=peers_multiturn_small", "experiment=peers_multiturn scale=small"),
        ("-m experiment=hotness_small seed=1", "-m experiment=users/hotness scale=small seed=1"),
        (
            "experiment=hotness_small seed=1 eviction=noisy_hint_20 -m",
            "experiment=users/hotness scale=small seed=1 eviction=noisy_hint eviction.error_pct=20 -m",
        ),
    ],
)
def test_former_names_are_replaced_where_they_stand_and_a_small_version_is_a_scale(typed, meant):
    found, notes = as_meant(typed.split())
    assert found == meant.split() and len(notes) == typed.count("_small") + typed.count("_20")
