"""What a sweep found, against ratios worked out by hand, and the one sentence made of it."""

from __future__ import annotations

from math import exp, log
from statistics import fmean
from typing import Any

import pytest

from pensieve.lab.results.findings import LAST_TTFT, RECOMPUTED, Finding
from pensieve.lab.results.sweep_table import SweepTable
from pensieve.lab.statistics import PairedRatio
from pensieve.serve.record import TurnRecord
from tests.results.answers import CHANCE, FLAT, RISING, told, turns
from tests.results.trials import turn


def geometric_mean(a: int, b: int, times: float, seeds: int = 5) -> float:
    """Of the ratios of trial a to trial b: `times` at the last turn, but for each seed's chance."""
    ratios = [CHANCE[(s + 2 * a) % len(CHANCE)] / CHANCE[(s + 2 * b) % len(CHANCE)] for s in range(seeds)]
    return times * exp(fmean(log(ratio) for ratio in ratios))


def beside(table: SweepTable, other: str) -> Finding:
    [found] = [one for one in table.findings if one.other == other]
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "times", "verdict"),
    [(FLAT, RISING, 160 / 40, "lower"), (RISING, FLAT, 40 / 160, "higher"), (FLAT, FLAT, 1.0, "not told apart")],
)
def test_the_ratio_of_the_last_turns_and_its_verdict(
    ours: list[float], theirs: list[float], times: float, verdict: str
) -> None:
    table = told({"baseline": "pensieve", "ttft": ours}, {"baseline": "stateless", "ttft": theirs})
    found = beside(table, "stateless")
    assert found.quantity == LAST_TTFT and found.name == "pensieve" and found.verdict == verdict
    assert found.found.ratio == pytest.approx(geometric_mean(1, 0, times))
    rows = {row.baseline: row for row in table.rows}
    assert rows["stateless"].beside_ours == found.found, "table and headline have one ratio"
    assert rows["pensieve"].beside_ours is None


def ratio(value: float, low: float | None = None, high: float | None = None, seeds: int = 5) -> PairedRatio:
    return PairedRatio(value, low, high, 3 * seeds, seeds)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (ratio(4.35, 2.21, 5.65), "4.35× lower than other (95 % CI 2.21–5.65)"),
        (ratio(0.25, 0.2, 0.5), "4.00× higher than other (95 % CI 2.00–5.00)"),
        (ratio(1.04, 0.95, 1.13), "not told apart from other (1.04×, 95 % CI 0.95–1.13)"),
        (ratio(8.0, seeds=3), "8.00× lower than other"),
        (ratio(1.003, seeds=3), "not told apart from other (1.00×)"),
        (ratio(12.34, 9.5, 17.3), "12.3× lower than other (95 % CI 9.50–17.3)"),
    ],
)
def test_a_finding_in_words(found: PairedRatio, text: str) -> None:
    assert Finding(LAST_TTFT, {}, "pensieve", "other", found).text == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (ratio(0.03, 0.01, 0.05), "3.0 points higher than lru (95 % CI 1.0 to 5.0)"),
        (ratio(-0.02, -0.03, -0.01), "2.0 points lower than lru (95 % CI 1.0 to 3.0)"),
        (ratio(-0.002, -0.1, 0.1), "not told apart from lru (-0.2 points, 95 % CI -10.0 to 10.0)"),
    ],
)
def test_more_of_the_history_in_points(found: PairedRatio, text: str) -> None:
    assert Finding(RECOMPUTED, {}, "retention_value", "lru", found).text == text


def test_the_headline_of_one_setting() -> None:
    table = told(
        {"baseline": "pensieve", "ttft": FLAT},
        {"baseline": "gpu_only", "ttft": FLAT},
        {"baseline": "stateless", "ttft": RISING},
    )
    low, even = beside(table, "stateless"), beside(table, "gpu_only")
    assert table.headline == f"TTFT at the last turn: pensieve {low.text}, {even.text}."


def test_without_five_seeds_no_interval_is_claimed() -> None:
    table = told({"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING}, seeds=3)
    assert table.headline is not None and table.headline.endswith("lower than stateless (3 seeds: no CI).")


def test_simulated_is_said_first() -> None:
    table = told(*({"baseline": b, "ttft": FLAT, "simulated": True} for b in ("pensieve", "stateless")))
    assert table.headline is not None and table.headline.startswith("Simulated. TTFT")


def many_settings(times: list[float], other: str = "stateless", seeds: int = 1) -> SweepTable:
    """A sweep of cache sizes, in each of which the other's TTFT is so many times Pensieve's, but for chance."""
    trials: list[dict[str, Any]] = []
    for size, factor in enumerate(times):
        config = {"seed": 0, "cache": {"name": "demo", "gpu": str(size)}}
        trials.append({"baseline": "pensieve", "ttft": FLAT, "config": config})
        trials.append({"baseline": other, "ttft": [factor * 40.0] * 3, "config": config})
    return told(*trials, seeds=seeds, **{"cache.gpu": ",".join(map(str, range(len(times))))})


@pytest.mark.parametrize(
    ("times", "counts"),
    [([1.8, 2.5, 4.0, 2.0, 3.0], None), ([0.3, 2.5, 4.0, 0.5, 3.0], "lower than stateless in 3 of 5, higher in 2 (")],
)
def test_many_settings_are_one_sentence_with_counts_and_the_span(times: list[float], counts: str | None) -> None:
    table = many_settings(times)
    ratios = sorted(one.found.ratio for one in table.findings)
    span = f"{ratios[0]:.2f}× to {ratios[-1]:.2f}×"
    told_of = f"{span} lower than stateless" if counts is None else f"{counts}{span})"
    assert table.headline == f"TTFT at the last turn over 5 settings: pensieve {told_of}."


def test_settings_whose_interval_holds_one_are_not_told_apart() -> None:
    table = many_settings([1.0, 4.0, 0.2, 4.0, 4.0], "gpu_only", seeds=5)
    assert table.headline is not None
    assert "pensieve lower than gpu_only in 3 of 5, higher in 1, not told apart in 1 (" in table.headline


def history_turns(missed: list[int]) -> list[TurnRecord]:
    """A turn with 100 tokens of history each, of which so many had to be recomputed."""
    return [
        turn(f"s{i}", 2, history_tokens=100, gpu_hit_tokens=100 - tokens, cpu_hit_tokens=0, recomputed_tokens=tokens)
        for i, tokens in enumerate(missed)
    ]


def policies(seeds: int = 5, **missed: list[int]) -> SweepTable:
    trials = [
        {
            "baseline": "pensieve",
            "eviction": name,
            "turns": history_turns(own),
            "metrics": {"miss_rate": sum(own) / 100 / len(own)},
        }
        for name, own in missed.items()
    ]
    return told(*trials, seeds=seeds, eviction=",".join(missed))


def test_the_papers_policy_beside_the_others_in_points() -> None:
    # (50 + 48 + 52) / 3 = 50.0; 47.0 and 51.0: 3.0 points more and 1.0 less; five seeds that agree: no spread.
    table = policies(retention_value=[50, 48, 52], lru=[47, 46, 48], fifo=[51, 49, 53])
    found = {one.other: one for one in table.findings}
    assert {name: (round(one.found.ratio, 9), one.verdict) for name, one in found.items()} == {
        "lru": (0.03, "higher"),
        "fifo": (-0.01, "lower"),
    }
    assert table.headline == ("History recomputed: lowest 47.0 % (eviction=lru), highest 51.0 % (eviction=fifo).")


def test_points_within_their_interval_of_zero_are_not_told_apart() -> None:
    table = policies(retention_value=[40, 60, 50, 45, 55], lru=[55, 45, 50, 60, 41], seeds=1)
    assert beside(table, "lru").verdict == "not told apart"


def test_where_nobody_recomputed_anything_policies_are_not_compared() -> None:
    assert not policies(retention_value=[0, 0], lru=[0, 0]).findings
    assert policies(retention_value=[0, 0], lru=[1, 1]).findings


def test_settings_that_are_printed_alike_share_their_place() -> None:
    trials = (
        {"baseline": "pensieve", "ttft": FLAT, "eviction": n, "metrics": {"miss_rate": r}}
        for n, r in {"lru": 0.1001, "fifo": 0.6, "belady": 0.1003}.items()
    )
    table = told(*trials, eviction="lru,fifo,belady")
    assert table.headline == "History recomputed: lowest 10.0 % (2 settings), highest 60.0 % (eviction=fifo)."


def test_settings_that_refused_turns_are_not_ranked() -> None:
    lost = {"statuses": {"completed": 6.0, "refused": 3.0}}
    trials = (
        {"baseline": "pensieve", "ttft": FLAT, "eviction": n, "metrics": {"miss_rate": r}, **(lost if r < 0.5 else {})}
        for n, r in {"lru": 0.4, "fifo": 0.6}.items()
    )
    assert told(*trials, eviction="lru,fifo").headline is None


def decoded(ms_a_token: float, requests: int = 4) -> list[TurnRecord]:
    """Requests of three tokens each, of which the second takes twice as long."""
    made = [turn(f"r{number}", 1, 1.0, tokens=(1, 2, 3)) for number in range(requests)]
    for number, one in enumerate(made):
        one.latency_ms = 3 * ms_a_token * (2 if number == 1 else 1)
    return made


def test_without_pensieve_the_others_stand_beside_the_lowest() -> None:
    table = told(
        {"baseline": "semantic_blind", "turns": decoded(300.0)},
        {"baseline": "native_pytorch", "turns": decoded(10.0)},
        {"baseline": "fully_aware", "turns": decoded(12.0)},
    )
    assert table.headline == (
        "Latency a token: native_pytorch 30.0× lower than semantic_blind (95 % CI 30.0–30.0), "
        "1.20× lower than fully_aware (95 % CI 1.20–1.20)."
    )


def test_the_lowest_is_so_by_the_ratios_that_are_told() -> None:
    """Its mean is above that of the other, for one slow turn of many."""

    def turns_of(times_ms: list[float]) -> list[TurnRecord]:
        made = decoded(1.0, len(times_ms))
        for one, ms in zip(made, times_ms, strict=True):
            one.latency_ms = 3 * ms
        return made

    table = told(
        {"baseline": "even", "turns": turns_of([10.0] * 4)},
        {"baseline": "skewed", "turns": turns_of([1.0, 1.0, 1.0, 60.0])},
    )
    [found] = table.findings
    assert found.name == "skewed" and found.found.ratio == pytest.approx((10 * 10 * 10 / 6) ** 0.25)


def test_one_baseline_alone_is_compared_with_nothing() -> None:
    table = told({"baseline": "stateless", "turns": decoded(10.0)})
    assert not table.findings and table.headline is None


@pytest.mark.parametrize(
    ("completed", "whose", "compared"), [(5, "ray_keepalive", 2), (4, "ray_keepalive", 1), (4, "pensieve", 0)]
)
def test_who_lost_most_of_its_turns_is_not_compared_by_those_that_are_left(
    completed: float, whose: str, compared: int
) -> None:
    lost = {"statuses": {"completed": completed, "failed": 10 - completed}}
    table = told(
        *(
            {"baseline": name, "turns": turns(FLAT), **(lost if whose == name else {})}
            for name in ("pensieve", "ray_keepalive", "stateless")
        )
    )
    assert len(table.findings) == compared
    above = [note.values["where"] for note in table.notes if note.code == "mostly_lost"]
    assert above == ([f"{whose} {5 * completed} of 50"] if completed < 5 else [])
