"""What an experiment's overlay makes run: composed as a user would, simulated, and looked at in the turns it left."""

from collections import Counter
from itertools import pairwise

import pytest

from pensieve.serve.record import is_measured
from tests.composed import replayed

AT_ONCE = {  # people (or agents), conversations, fewest and most turns of one
    "users/sharegpt_full": (32, 32, 10, 30),
    "demo": (6, 6, 8, 8),
    "users/demo_sequential": (1, 6, 7, 7),
    "users/hotness": (6, 24, 8, 8),
    "agents/scaling": (4, 4, 6, 6),
    "machine/disaggregated_decode baseline=pensieve": (1, 25, 1, 1),
    "users/sharegpt_full scale=small": (6, 6, 4, 6),
    "agents/scaling scale=small": (4, 4, 4, 4),
}
QUICK = ("workload.max_new_tokens=4", "workload.think_time_s=0")  # short replies, and everybody begins at the same time


def ran(name, *overrides):
    record, _ = replayed(*f"experiment={name}".split(), *overrides)
    assert {turn.status for turn in record.turns} == {"completed"}
    return [turn for turn in record.turns if is_measured(turn.phase)]


def most_open(turns):
    """Conversations between their first arrival and their last reply."""
    began, ended = {}, {}
    for turn in turns:
        began[turn.session] = min(turn.intended_s, began.get(turn.session, turn.intended_s))
        ended[turn.session] = max(turn.finished_s, ended.get(turn.session, turn.finished_s))
    open_now = most = 0
    for _, change in sorted([(at, 1) for at in began.values()] + [(at, -1) for at in ended.values()]):
        open_now += change
        most = max(most, open_now)
    return most


@pytest.mark.parametrize("name", AT_ONCE)
def test_as_many_people_talk_at_once_as_the_overlay_asks_for(name):
    people, conversations, fewest, most = AT_ONCE[name]
    turns = ran(name, *(QUICK if "sharegpt" in name else ()))
    each = Counter(turn.session for turn in turns)
    assert (most_open(turns), len(each)) == (people, conversations)
    assert fewest <= min(each.values()) <= max(each.values()) <= most
    if "decode" in name:
        assert {(turn.prompt_tokens, turn.output_tokens) for turn in turns} == {(72, 50)}


def history_found(name, *overrides, seeds=(0, 1, 2)):
    """Shares of the history tokens of all seeds: found on GPU, on CPU, recomputed; on the machine that the sizes are for."""
    tokens = Counter()
    for seed in seeds:
        for turn in ran(name, "hardware=sim_a100_80g", "baseline=pensieve", f"seed={seed}", *overrides):
            if turn.history_tokens:
                tokens.update(gpu=turn.gpu_hit_tokens, cpu=turn.cpu_hit_tokens, recomputed=turn.recomputed_tokens)
    assert tokens.total() > 100_000
    return [tokens[where] / tokens.total() for where in ("gpu", "cpu", "recomputed")]


@pytest.mark.slow
def test_the_demo_puts_every_tier_to_work():
    """At its own five seeds, each chunk in one tier, as on a CPU. Nothing is recomputed where the CPU tier holds them all."""
    assert min(history_found("demo", "scheduler.copy_ahead=never", seeds=range(5))) >= 0.03
    gpu, cpu, recomputed = history_found("demo", 'cache.cpu="8448 tokens"', seeds=range(5))
    assert gpu + cpu == 1.0 and recomputed == 0.0


@pytest.mark.slow
def test_the_sharegpt_overlay_finds_history_in_the_published_shares():
    """GPU 60 to 80 %, CPU 15 to 25 %, recomputed 5 to 15 %; all on the GPU where it holds everything."""
    gpu, cpu, recomputed = history_found("users/sharegpt_full")
    assert 0.60 <= gpu <= 0.80
    assert 0.15 <= cpu <= 0.25
    assert 0.05 <= recomputed <= 0.15
    gpu, _, _ = history_found("users/sharegpt_full", "cache=xlarge", "hardware.gpu_memory=200GB", seeds=(0,))
    assert gpu == 1.0


@pytest.mark.parametrize(("blocks", "a", "b"), [("512/256", 512, 256), ("384/384", 384, 384), ("256/512", 256, 512)])
def test_a_miss_asks_for_b_and_the_query_in_every_step_and_half_a_second_passes(blocks, a, b):
    record, _ = replayed("experiment=peers/prefix_invalidation", f"workload.blocks={blocks}", "workload.rounds=2")
    cases = {}
    for turn in record.turns:
        if turn.iteration >= 0:
            cases.setdefault(turn.session, []).append(turn)
    assert Counter(steps[1].phase for steps in cases.values()) == {"hit": 4, "miss": 4}
    for steps in cases.values():
        kind = steps[1].phase
        asked = b + 20 if kind == "miss" else a + b + 20
        assert [turn.prompt_tokens for turn in steps] == [a + b, asked, a + b, asked]
        assert [turn.output_tokens for turn in steps] == [1, 1, 1, 50]
        assert steps[1].recomputed_tokens == steps[3].recomputed_tokens == (b if kind == "miss" else 0)
        gaps = [later.intended_s - earlier.finished_s for earlier, later in pairwise(steps)]
        assert gaps == pytest.approx([0.5] * 3)
