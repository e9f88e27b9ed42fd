"""The offline bound against every way of keeping tokens, and against what policies reach."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.bound import Idle, bound_metrics, most_kept, offline_bound
from pensieve.record import TurnRecord

intervals = st.lists(
    st.builds(
        lambda start, length, tokens: Idle(float(start), float(start + length), tokens),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
    max_size=5,
)


def exhaustive(idle: list[Idle], capacity: int) -> int:
    """By trying every number of tokens kept of every interval."""
    best = 0
    for kept in product(*(range(one.tokens + 1) for one in idle)):
        fits = all(
            sum(k for k, one in zip(kept, idle, strict=True) if one.start_s <= at < one.end_s) <= capacity
            for at in {one.start_s for one in idle}
        )
        best = max(best, sum(kept) if fits else 0)
    return best


@settings(max_examples=200, deadline=None)
@given(intervals, st.integers(0, 6))
def test_nothing_keeps_more(idle: list[Idle], capacity: int) -> None:
    assert most_kept(idle, capacity) == exhaustive(idle, capacity)


def turn(session: str, number: int, at_s: float, prompt: int, history: int, **other: object) -> TurnRecord:
    record = TurnRecord(session, number, phase=str(other.pop("phase", "chat")))
    record.admitted_s, record.finished_s = at_s, at_s + 0.5
    record.prompt_tokens, record.history_tokens, record.new_tokens = prompt, history, prompt - history
    record.output_tokens, record.shared_hit_tokens = 10, 0
    record.elsewhere_tokens, record.anywhere_tokens = 0, history
    for name, value in other.items():
        setattr(record, name, value)
    return record


TURNS = [
    turn("a", 1, 0.0, 100, 0),
    turn("b", 1, 1.0, 100, 0),
    turn("a", 2, 2.0, 150, 109),
    turn("b", 2, 3.0, 150, 109),
]


@pytest.mark.parametrize(("capacity", "hits"), [(0, 0), (100, 100), (109, 109), (150, 150), (218, 218), (999, 218)])
def test_two_conversations_idle_at_once(capacity: int, hits: int) -> None:
    bound = offline_bound(TURNS, capacity)
    assert bound is not None
    assert (bound.hit_tokens, bound.history_tokens, bound.prompt_tokens) == (hits, 218, 500)


def test_one_after_the_other_needs_room_for_one() -> None:
    one_by_one = [TURNS[0], turn("a", 2, 1.0, 150, 109), turn("b", 1, 2.0, 100, 0), turn("b", 2, 3.0, 150, 109)]
    bound = offline_bound(one_by_one, 109)
    assert bound is not None
    assert bound.hit_tokens == 218


def test_warm_up_turns_prepare_and_are_not_counted() -> None:
    turns = [turn("a", 1, 0.0, 100, 0, phase="warmup"), turn("a", 2, 2.0, 150, 109)]
    bound = offline_bound(turns, 50)
    assert bound is not None
    assert (bound.hit_tokens, bound.history_tokens, bound.prompt_tokens) == (50, 109, 150)


def test_what_another_conversation_has_had_may_be_found_there_at_any_time() -> None:
    later = turn("c", 2, 5.0, 100, 30, elsewhere_tokens=20, anywhere_tokens=64)
    alone, found = offline_bound(TURNS, 0), offline_bound([*TURNS, later], 0)
    assert alone is not None and found is not None
    assert (found.hit_tokens, found.prompt_hit_tokens) == (alone.hit_tokens + 20, alone.prompt_hit_tokens + 20 + 34)


def test_a_system_that_does_not_say_what_conversations_share_has_no_bound() -> None:
    unknown = turn("c", 2, 5.0, 100, 30, elsewhere_tokens=None, anywhere_tokens=None)
    assert offline_bound([*TURNS, unknown], 1000) is None
    assert [metric.value for metric in bound_metrics([*TURNS, unknown], 1000)] == [None, None, None]


def test_metrics_have_the_denominators_of_the_rates_they_bound() -> None:
    rate, of_prompts, seconds = bound_metrics(TURNS, 109)
    assert (seconds.name, seconds.value) == ("bound_recomputed_s", None), "nothing prices a position"
    assert (rate.name, rate.value, rate.n) == ("bound_hit_rate", 109 / 218, 218)
    assert (of_prompts.name, of_prompts.value, of_prompts.n) == ("bound_prompt_hit_rate", 109 / 500, 500)


def test_turns_that_were_never_admitted_do_not_count() -> None:
    refused = TurnRecord("d", 1, status="refused")
    assert offline_bound([*TURNS, refused], 109) == offline_bound(TURNS, 109)
