"""The sentence over a sweep's table, against ratios worked out by hand."""

from __future__ import annotations

from math import exp, log
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from pensieve.record import TurnRecord
from pensieve.results.headline import load_line
from tests.results.answers import CHANCE, FLAT, RISING, answers, turns
from tests.results.trials import turn


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


def test_settings_that_refused_turns_are_not_ranked() -> None:
    rates = {"lru": 0.4, "fifo": 0.6}
    refused = {"statuses": {"completed": 6.0, "refused": 3.0}}
    said = answers(
        *(
            {
                "baseline": "pensieve",
                "ttft": FLAT,
                "eviction": n,
                "metrics": {"miss_rate": r},
                **(refused if n == "lru" else {}),
            }
            for n, r in rates.items()
        ),
        eviction="lru,fifo",
    )
    assert "recomputes least" not in said
    assert "in no latency, no ratio and no share of history, and end some conversations: " in said
    assert "pensieve (eviction=lru) 15 of 45 (15 refused). What is left" in said


def test_the_load_says_how_long_people_think_at_most():
    plan = {"load": "closed", "sessions": 10, "think_time_s": 0.5}
    trials: Any = [SimpleNamespace(engine={"workload": facts}) for facts in (plan, {**plan, "think_time_cap_s": 1.25})]
    assert load_line(trials[:1]) == "Load (closed): 10 conversations, 0.5 s of think time."
    assert load_line(trials[1:]) == "Load (closed): 10 conversations, 0.5 s of think time, 1.25 s of it at most."


def history_turns(missed: list[int]) -> list[TurnRecord]:
    """A turn with 100 tokens of history each, of which so many had to be recomputed."""
    return [
        turn(f"s{i}", 2, history_tokens=100, gpu_hit_tokens=100 - tokens, cpu_hit_tokens=0, recomputed_tokens=tokens)
        for i, tokens in enumerate(missed)
    ]


def policies_apart(paper: list[int], lru: list[int], fifo: list[int], seeds: int = 5) -> str:
    missed = {"retention_value": paper, "lru": lru, "fifo": fifo}
    trials = [
        {
            "baseline": "pensieve",
            "eviction": n,
            "turns": history_turns(m),
            "metrics": {"miss_rate": sum(m) / 100 / len(m)},
        }
        for n, m in missed.items()
    ]
    return answers(*trials, seeds=seeds, eviction=",".join(missed))


def test_where_the_papers_policy_recomputes_more_it_says_by_how_many_points_with_the_interval():
    said = policies_apart([50, 48, 52, 49, 51, 50], [47, 46, 49, 46, 47, 47], [45, 44, 47, 44, 45, 45])
    # (50 + 48 + 52 + 49 + 51 + 50) / 6 = 50.0; 47.0 and 45.0: 3.0 and 5.0 points; five seeds that agree: no spread.
    assert "retention_value, the paper's policy, recomputes 50.0%: more than lru by 3.0 [3.0, 3.0]" in said
    assert "and fifo by 5.0 [5.0, 5.0] (percentage points of the history" in said
    assert "less than" not in said


def test_where_it_recomputes_less_the_sentence_turns_round():
    said = policies_apart([45, 44, 47], [47, 46, 49], [45, 44, 47])
    assert "recomputes 45.3%: less than lru by 2.0 [2.0, 2.0], the same as fifo (" in said
    assert "more than" not in said


def test_beside_other_baselines_the_papers_policy_is_held_against_the_others_too():
    kept = [("retention_value", [50, 48]), ("lru", [47, 45])]
    trials = [
        {
            "baseline": baseline,
            "eviction": name,
            "turns": history_turns(missed if baseline == "pensieve" else [100, 100]),
        }
        for name, missed in kept
        for baseline in ("pensieve", "stateless")
    ]
    said = answers(*trials, eviction="retention_value,lru")
    assert "eviction=lru: At a conversation's last turn Pensieve's first token" in said
    assert said.count("the paper's policy, recomputes") == 1
    assert "more than lru by 3.0 [3.0, 3.0] (" in said


def test_points_within_their_interval_of_zero_are_not_told_apart():
    said = policies_apart([40, 60, 50, 45, 55], [55, 45, 50, 60, 41], [70, 90, 80, 75, 85], seeds=1)
    assert "less than fifo by 30.0 [30.0, 30.0], not told apart from lru (-0.20 [-" in said


def test_with_few_seeds_points_have_no_interval():
    assert (
        "more than lru by 3.0 and fifo by 5.0 (percentage points of the history, paired by seed and conversation; 3 "
        in (policies_apart([50], [47], [45], seeds=3))
    )


def many_settings(times: dict[str, dict[str, float]], seeds: int = 1) -> tuple[str, dict[str, dict[str, float]]]:
    """The sentences over a sweep of cache sizes, in each of which the others' first token takes so many times Pensieve's at
    every turn, but for chance; and the ratios, by other baseline and size."""
    trials: list[dict[str, Any]] = []
    ratios: dict[str, dict[str, float]] = {}
    for size, others in times.items():
        config = {"seed": 0, "cache": {"name": "demo", "gpu": size}}
        ours = len(trials)
        trials.append({"baseline": "pensieve", "ttft": FLAT, "config": config})
        for other, factor in others.items():
            ratios.setdefault(other, {})[size] = geometric_mean(len(trials), ours, factor, seeds)
            trials.append({"baseline": other, "ttft": [factor * 40.0] * 3, "config": config})
    return answers(*trials, seeds=seeds, **{"cache.gpu": ",".join(times)}), ratios


OVER_5 = "At a conversation's last turn, over 5 settings, Pensieve's first token"


def span(ratios: dict[str, float]) -> str:
    least, most = min(ratios, key=lambda s: ratios[s]), max(ratios, key=lambda s: ratios[s])
    return f"{ratios[least]:.2f}× (cache.gpu={least}) to {ratios[most]:.2f}× (cache.gpu={most}) as soon"


def test_many_settings_are_one_sentence_with_the_least_and_the_most():
    said, ratios = many_settings({str(n): {"stateless": t} for n, t in enumerate([1.8, 2.5, 4.0, 2.0, 3.0])})
    assert min(ratios["stateless"].values()) > 1
    doubt = "(3 conversations: no interval)"
    assert said.startswith(f"{OVER_5} comes {span(ratios['stateless'])} as stateless serving's {doubt}.")


def test_where_some_of_many_settings_are_slower_it_says_in_how_many():
    said, ratios = many_settings({str(n): {"stateless": t} for n, t in enumerate([0.3, 2.5, 4.0, 0.5, 3.0])})
    own = ratios["stateless"]
    assert sorted(ratio > 1 for ratio in own.values()) == [False, False, True, True, True]
    assert said.startswith(
        f"{OVER_5} is faster than stateless serving's in 3 of 5 settings, slower in 2, not told apart in 0 ({span(own)}) (3 "
        "conversations: no interval)."
    )


def test_settings_whose_interval_holds_one_are_not_told_apart():
    factors = [1.0, 4.0, 0.2, 4.0, 4.0]
    said, ratios = many_settings({str(n): {"gpu_only": t} for n, t in enumerate(factors)}, seeds=5)
    assert 0.85 < ratios["gpu_only"]["0"] < 1.15
    assert f"{OVER_5} is faster than gpu_only's in 3 of 5 settings, slower in 1, not told apart in 1 (" in said


def test_where_the_least_is_the_most_it_is_said_once():
    """Times without chance: of one baseline the same ratio in all settings, of another one setting alone."""
    trials = []
    for size in "12345":
        config = {"seed": 0, "cache": {"name": "demo", "gpu": size}}
        trials.append({"baseline": "pensieve", "turns": turns(FLAT), "config": config})
        trials.append({"baseline": "stateless", "turns": turns([80.0] * 3), "config": config})
        if size == "3":
            trials.append({"baseline": "gpu_only", "turns": turns([120.0] * 3), "config": config})
    said = answers(*trials, seeds=1, **{"cache.gpu": "1,2,3,4,5"})
    once = "comes 3.00× (cache.gpu=3) as soon as gpu_only's"
    assert said.startswith(
        f"{OVER_5} comes 2.00× as soon as stateless serving's, and {once} (3 conversations: no inter"
    )


def test_where_nobody_recomputed_anything_the_papers_policy_is_not_held_against_others():
    assert "the paper's policy" not in policies_apart([0, 0], [0, 0], [0, 0])
    assert "recomputes 0.0%: less than lru by 1.0" in policies_apart([0, 0], [1, 1], [0, 0])


def test_the_papers_policy_with_nothing_beside_it_is_compared_with_nothing():
    trials = [
        {
            "baseline": baseline,
            "eviction": "retention_value",
            "turns": history_turns([50]),
            "metrics": {"miss_rate": 0.5},
        }
        for baseline in ("pensieve", "stateless")
    ]
    assert "the paper's policy" not in answers(*trials, eviction="retention_value")


def test_with_intervals_none_is_missed():
    said, _ = many_settings({str(n): {"stateless": t} for n, t in enumerate([1.8, 2.5, 4.0, 2.0, 3.0])}, seeds=5)
    assert said.startswith(f"{OVER_5} comes ")
    assert "no interval" not in said


def test_a_ratio_that_is_printed_as_one_is_no_finding_without_an_interval():
    """Times without chance: 0.3 % apart."""
    trials = [{"baseline": b, "turns": turns([ms] * 3)} for b, ms in (("pensieve", 100.0), ("stateless", 100.3))]
    said = answers(*trials, seeds=3)
    assert "is not told apart from stateless serving's (1.00×) (3 seeds: no interval)" in said
    assert "as soon as" not in said
    apart = [trials[0], {"baseline": "stateless", "turns": turns([102.0] * 3)}]
    assert "comes 1.02× as soon as stateless serving's (3 seeds: no interval)" in answers(*apart, seeds=3)


def test_of_simulated_and_real_settings_it_says_how_many_are_simulated():
    trials = [
        {
            "baseline": baseline,
            "turns": turns([40.0 * (1 + (baseline != "pensieve"))] * 3),
            "hardware": hardware,
            "simulated": hardware != "cpu",
        }
        for hardware in ("cpu", "sim_a", "sim_b", "sim_c", "sim_d")
        for baseline in ("pensieve", "stateless")
    ]
    said = answers(*trials, hardware="cpu,sim_a,sim_b,sim_c,sim_d")
    assert "over 5 settings (4 of them simulated), Pensieve's first token comes 2.00×" in said
    assert "on simulated hardware" not in said
    assert "over 4 settings" not in said


def ranked(rates: dict[str, float]) -> str:
    trials = (
        {"baseline": "pensieve", "ttft": FLAT, "eviction": n, "metrics": {"miss_rate": r}} for n, r in rates.items()
    )
    return answers(*trials, eviction=",".join(rates))


def test_settings_that_are_printed_alike_share_their_place():
    said = ranked({"lru": 0.1001, "fifo": 0.6, "belady": 0.1003})
    assert said.startswith(
        "eviction=lru and eviction=belady recompute least of the history, 10.0%, and eviction=fifo most, 60.0%"
    )
    assert ranked({"lru": 0.1001, "fifo": 0.1003}).startswith(
        "All 2 settings recompute the same share of history, 10.0%."
    )


def decoded(ms_a_token: float, requests: int = 4) -> list[TurnRecord]:
    """Requests of three tokens each, of which the second takes twice as long."""
    made = [turn(f"r{number}", 1, 1.0, tokens=(1, 2, 3)) for number in range(requests)]
    for number, one in enumerate(made):
        one.latency_ms = 3 * ms_a_token * (2 if number == 1 else 1)
    return made


def test_without_pensieve_the_others_stand_beside_the_quickest() -> None:
    said = answers(
        {"baseline": "semantic_blind", "turns": decoded(300.0)},
        {"baseline": "native_pytorch", "turns": decoded(10.0)},
        {"baseline": "fully_aware", "turns": decoded(12.0)},
    )
    assert said.startswith("An output token takes least time with native_pytorch (from a request's arrival to its last")
    assert "and 30.0× [30.0, 30.0] as long with semantic_blind and 1.20× [1.20, 1.20] as long with fully_aware." in said
    assert "Pensieve" not in said.partition(".")[0]


def test_over_settings_without_pensieve_the_least_and_the_most_are_named() -> None:
    models = {"llama3_8b": 400.0, "llama2_13b": 100.0}
    said = answers(
        *(
            {"baseline": name, "model": model, "turns": decoded(blind if name == "semantic_blind" else 10.0)}
            for model, blind in models.items()
            for name in ("semantic_blind", "fully_aware")
        ),
        model=",".join(models),
        seeds=1,
    )
    assert said.startswith("Over 2 settings an output token takes least time with fully_aware (")
    assert "and 10.0× (model=llama2_13b) to 40.0× (model=llama3_8b) as long with semantic_blind (4 conv" in said


def test_one_baseline_that_is_not_pensieve_has_nothing_beside_it() -> None:
    assert "least time" not in answers({"baseline": "stateless", "turns": decoded(10.0)})


def test_who_lost_most_of_its_turns_is_not_compared_by_those_that_are_left() -> None:
    def said(completed: float, whose: str = "ray_keepalive") -> str:
        lost = {"statuses": {"completed": completed, "failed": 10 - completed}}
        return answers(
            {"baseline": "pensieve", "ttft": RISING, **(lost if whose == "pensieve" else {})},
            {"baseline": "ray_keepalive", "ttft": FLAT, **(lost if whose == "ray_keepalive" else {})},
            {"baseline": "stateless", "ttft": RISING},
        )

    assert "comes later than ray_keepalive's" in said(5)
    few = said(4)
    assert "not compared" in few and "ray_keepalive completed 20 of 50 turns; those few are not compared." in few
    assert "ray_keepalive's (" not in few and "not told apart from stateless serving's" in few
    ours = said(4, "pensieve")
    assert "pensieve completed 20 of 50 turns; those few are not compared." in ours
    assert "Pensieve's first token" not in ours


def test_without_pensieve_who_lost_most_of_its_turns_is_not_the_quickest() -> None:
    def said(completed: float) -> str:
        lost = {"statuses": {"completed": completed, "failed": 10 - completed}}
        return answers(
            {"baseline": "ray_keepalive", "turns": decoded(10.0), **lost},
            {"baseline": "stateless", "turns": decoded(30.0)},
        )

    assert "takes least time with ray_keepalive" in said(6)
    assert "least time" not in said(
        4
    ) and "ray_keepalive completed 20 of 50 turns; those few are not compared." in said(4)


def test_the_quickest_is_so_by_the_ratios_that_are_told() -> None:
    """Its mean is above that of the other, for one slow turn of many."""

    def turns_of(times_ms: list[float]) -> list[TurnRecord]:
        made = decoded(1.0, len(times_ms))
        for one, ms in zip(made, times_ms, strict=True):
            one.latency_ms = 3 * ms
        return made

    said = answers(
        {"baseline": "even", "turns": turns_of([10.0] * 4)},
        {"baseline": "skewed", "turns": turns_of([1.0, 1.0, 1.0, 60.0])},
    )
    assert "takes least time with skewed" in said
    assert f"{(10 * 10 * 10 / 6) ** 0.25:.2f}×" in said
