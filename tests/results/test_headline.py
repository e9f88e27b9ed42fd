"""The sentence over a sweep's table, against ratios worked out by hand, and the warnings that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import exp, log
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.record import TurnRecord
from pensieve.results.headline import load_line
from pensieve.results.store import ResultsStore
from pensieve.results.sweep_table import sweep_table
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep

FLAT = [40.0, 40.0, 40.0]
RISING = [40.0, 80.0, 160.0]
CHANCE = [0.9, 1.2, 1.0, 1.1, 0.8, 1.05, 0.95]


def turns(ttft_ms: Sequence[float], factor: float = 1.0, queue_share: float = 0.1) -> list[TurnRecord]:
    made = conversation_turns([factor * ms for ms in ttft_ms])
    for turn in made:
        assert turn.ttft_ms is not None
        turn.queue_ms = queue_share * turn.ttft_ms
    return made


def answers(*trials: dict[str, Any], seeds: int = 5, **axes: str) -> str:
    """The sentences over a sweep of these baselines, each run with every seed; `ttft` rises with chance by seed."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1,2,3,4", **axes)
    job = count()
    for seed in range(seeds):
        for number, given in enumerate(trials):
            fields = dict(given)
            own = turns(fields.pop("ttft"), CHANCE[(seed + 2 * number) % len(CHANCE)], fields.pop("queue", 0.1))
            flags = fields.pop("flags", None)
            trial = add_trial(
                store, sweep, next(job), fields.pop("baseline"), own, fields.pop("metrics", None), seed=seed, **fields
            )
            if flags:
                store.set_trial(trial, flags=flags)
    return " ".join(sweep_table(store, sweep).answers)


def geometric_mean(a: int, b: int, times: float, seeds: int = 5) -> float:
    """Of the ratios of trial a to trial b: `times` at the last turn, but for each seed's chance."""
    ratios = [CHANCE[(s + 2 * a) % len(CHANCE)] / CHANCE[(s + 2 * b) % len(CHANCE)] for s in range(seeds)]
    return times * exp(fmean(log(ratio) for ratio in ratios))


def test_the_first_sentence_has_the_ratio_of_the_last_turns_and_where_history_came_from() -> None:
    said = answers({"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING})
    expected = geometric_mean(1, 0, 160 / 40)
    assert f"Pensieve's first token comes {expected:.2f}× [" in said
    assert "as soon as stateless serving's; of its history 50% was found on GPU, 25% came from CPU, 25% was" in said


def test_swapped_it_is_behind() -> None:
    said = answers({"baseline": "pensieve", "ttft": RISING}, {"baseline": "stateless", "ttft": FLAT})
    assert f"comes later than stateless serving's ({geometric_mean(1, 0, 40 / 160):.2f}× [" in said
    assert "as soon as" not in said


def test_equal_ones_are_not_told_apart() -> None:
    said = answers(
        {"baseline": "pensieve", "ttft": FLAT},
        {"baseline": "gpu_only", "ttft": FLAT},
        {"baseline": "stateless", "ttft": RISING},
    )
    assert "as soon as stateless serving's, and is not told apart from gpu_only's (" in said


def test_without_five_seeds_no_interval_is_claimed() -> None:
    said = answers({"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING}, seeds=3)
    assert (
        f"comes {geometric_mean(1, 0, 4.0, seeds=3):.2f}× as soon as stateless serving's (3 seeds: no interval)" in said
    )
    assert "3 seeds: no intervals below 5" in said


def test_simulated_is_said_in_the_sentence() -> None:
    said = answers(*({"baseline": b, "ttft": FLAT, "simulated": True} for b in ("pensieve", "stateless")))
    assert "first token on simulated hardware is not told apart" in said


def test_settings_of_one_baseline_are_ranked_by_what_they_recompute() -> None:
    rates = {"lru": 0.4, "fifo": 0.6, "belady": 0.1}
    said = answers(
        *({"baseline": "pensieve", "ttft": FLAT, "eviction": n, "metrics": {"miss_rate": r}} for n, r in rates.items()),
        eviction="lru,fifo,belady",
    )
    assert said.startswith("eviction=belady recomputes least of the history, 10.0%, and eviction=fifo most, 60.0%")


@pytest.mark.parametrize(("queue", "warned"), [(0.4, False), (0.6, True)])
def test_a_baseline_that_mostly_waits_is_near_saturation(queue: float, warned: bool) -> None:
    said = answers({"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING, "queue": queue})
    assert ("Near saturation" in said) is warned
    if warned:
        # Three conversations at 1.0, 1.1 and 1.2 times the list, five seeds: the median is 1.1 x 160 ms by the seeds' median.
        assert f"stateless {0.6 * 176:,.0f} of {176:,.0f} ms" in said


@pytest.mark.parametrize(("evicted", "read", "warned"), [(521, 0.0, True), (521, 0.1, False), (0, 0.0, False)])
def test_a_cpu_tier_that_nothing_was_read_back_from_shows_nothing(evicted: float, read: float, warned: bool) -> None:
    metrics = {"evicted_chunks": evicted, "cpu_hit_rate": read}
    said = answers({"baseline": "pensieve", "ttft": FLAT, "metrics": metrics}, {"baseline": "stateless", "ttft": FLAT})
    assert ("2,605 chunks left the GPU tier and none was read back" in said) is warned


@pytest.mark.parametrize(("share", "warned"), [(0.62, True), (0.02, False)])
def test_a_busy_machine_is_told(share: float, warned: bool) -> None:
    trial = {"ttft": FLAT, "flags": {"others_cpu_share": share}}
    said = answers({"baseline": "pensieve", **trial}, {"baseline": "stateless", **trial})
    assert ("Other programs used 62% of this machine's CPU time" in said) is warned


@pytest.mark.parametrize(("error", "warned"), [(788.0, True), (-60.0, True), (12.0, False)])
def test_a_cost_model_that_is_far_off_is_told(error: float, warned: bool) -> None:
    metrics = {"cost_model_error_pct": error}
    said = answers({"baseline": "pensieve", "ttft": FLAT, "metrics": metrics}, {"baseline": "stateless", "ttft": FLAT})
    assert (f"pensieve {error:+.0f} %" in said) is warned


def test_the_load_says_how_long_people_think_at_most():
    plan = {"load": "closed", "sessions": 10, "think_time_s": 0.5}
    trials: Any = [SimpleNamespace(engine={"workload": facts}) for facts in (plan, {**plan, "think_time_cap_s": 1.25})]
    assert load_line(trials[:1]) == "Load (closed): 10 conversations, 0.5 s of think time."
    assert load_line(trials[1:]) == "Load (closed): 10 conversations, 0.5 s of think time, 1.25 s of it at most."
