"""The offline bound against every way of keeping tokens, and against what policies reach."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.lab.bound import LEVELS, Idle, Prices, bound_metrics, most_saved, offline_bound
from pensieve.lab.turns import Turns
from pensieve.serve.record import TurnRecord


class Chunks:
    """A cost model by what each chunk takes; the last one goes on."""

    def __init__(self, *seconds):
        self.each = seconds

    def recompute_s(self, context_tokens):
        return self.each[min(context_tokens - 1, len(self.each) - 1)]


# When each begins, how long it lasts, its tokens and the first one's position
placed = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.integers(0, 4)), max_size=4)


def most_worth(idle, capacity, prices):
    """By trying every set of positions kept of every interval."""
    sets = [[[p for p in range(n) if mask >> p & 1] for mask in range(1 << n)] for _, _, n, _ in idle]
    best = 0.0
    for chosen in product(*sets):
        fits = all(
            sum(len(part) for part, (start, lasts, *_) in zip(chosen, idle, strict=True) if start <= at < start + lasts)
            <= capacity
            for at in {start for start, *_ in idle}
        )
        if fits:
            worth = sum(
                prices.seconds(first + p, first + p + 1)
                for part, (*_, first) in zip(chosen, idle, strict=True)
                for p in part
            )
            best = max(best, worth)
    return best


@settings(max_examples=200, deadline=None)
@given(placed, st.integers(0, 6), st.just([1.0]) | st.lists(st.floats(0.1, 5.0), min_size=1, max_size=8))
def test_nothing_saves_more_seconds(idle, capacity, chunks):
    """Whatever positions cost, also where later ones cost less."""
    prices = Prices(Chunks(*chunks), 1)
    rows = Idle.of([(start, start + lasts, tokens, first) for start, lasts, tokens, first in idle])
    bound, best = most_saved(rows, capacity, prices), most_worth(idle, capacity, prices)
    assert bound >= best - 1e-9
    if len(set(chunks)) == 1:
        assert bound == pytest.approx(best), "exact where all positions cost the same"


def test_levels_of_worth_are_never_below_the_price_and_few():
    prices = Prices(Chunks(*(1.0 + 0.01 * n for n in range(500))), 1)
    levels = prices.levels(400)
    assert len(levels) <= LEVELS
    for position in range(400):
        charged = sum(step for first, step in levels if first <= position)
        price = prices.seconds(position, position + 1)
        assert price - 1e-9 <= charged <= price + 0.01 * 400 / LEVELS + 0.011
    assert prices.levels(0) == []


def test_the_seconds_of_two_conversations_by_hand():
    """Room for 109 of 218 history tokens: the bound keeps one conversation, and each position costs its number."""
    prices = Prices(Chunks(*range(1, 300)), 1)
    whole = 2 * sum(range(1, 110))
    for capacity, least in ((0, whole), (218, 0.0)):
        bound = offline_bound(Turns.of(TURNS), capacity, prices)
        assert (
            bound is not None and bound.recompute_s == pytest.approx(least) and bound.history_s == pytest.approx(whole)
        )
    half = offline_bound(Turns.of(TURNS), 109, prices)
    # The dearest 109 of both are 54 and 55 of each: nothing could save more. Rounding adds less than a level to each.
    least = sum(range(1, 55)) + sum(range(1, 56))
    assert half is not None and half.recompute_s is not None
    assert least - 109 * (109 - 1) / LEVELS <= half.recompute_s <= least


def turn(session, number, at_s, prompt, history, **other):
    record = TurnRecord(session, number, phase=str(other.pop("phase", "chat")))
    record.admitted_s, record.finished_s = at_s, at_s + 0.5
    record.prompt_tokens, record.history_tokens, record.new_tokens = prompt, history, prompt - history
    record.output_tokens, record.shared_hit_tokens = 10, 0
    record.elsewhere_tokens, record.anywhere_tokens = 0, history
    for name, value in other.items():
        setattr(record, name, value)
    return record


TURNS = [turn("a", 1, 0.0, 100, 0), turn("b", 1, 1.0, 100, 0), turn("a", 2, 2.0, 150, 109), turn("b", 2, 3.0, 150, 109)]


ONE_BY_ONE = [TURNS[0], turn("a", 2, 1.0, 150, 109), turn("b", 1, 2.0, 100, 0), turn("b", 2, 3.0, 150, 109)]
PREPARED = [turn("a", 1, 0.0, 100, 0, phase="warmup"), turn("a", 2, 2.0, 150, 109)]
REFUSED = TurnRecord("d", 1, status="refused")


@pytest.mark.parametrize(
    ("turns", "capacity", "hits", "history", "prompt"),
    [
        *(
            (TURNS, capacity, hits, 218, 500)
            for capacity, hits in ((0, 0), (100, 100), (109, 109), (150, 150), (999, 218))
        ),
        (ONE_BY_ONE, 109, 218, 218, 500),  # one after the other: room for one
        (PREPARED, 50, 50, 109, 150),  # the warm-up's prompt does not count
        ([*TURNS, REFUSED], 109, 109, 218, 500),  # it was never admitted
    ],
)
def test_what_is_kept_hits(turns, capacity, hits, history, prompt):
    bound = offline_bound(Turns.of(turns), capacity)
    assert bound is not None
    assert (bound.hit_tokens, bound.history_tokens, bound.prompt_tokens) == (hits, history, prompt)


def test_what_another_conversation_has_had_may_be_found_there_at_any_time():
    later = turn("c", 2, 5.0, 100, 30, elsewhere_tokens=20, anywhere_tokens=64)
    alone, found = offline_bound(Turns.of(TURNS), 0), offline_bound(Turns.of([*TURNS, later]), 0)
    assert alone is not None and found is not None
    assert (found.hit_tokens, found.prompt_hit_tokens) == (alone.hit_tokens + 20, alone.prompt_hit_tokens + 20 + 34)


def test_a_system_that_does_not_say_what_conversations_share_has_no_bound():
    unknown = turn("c", 2, 5.0, 100, 30, elsewhere_tokens=None, anywhere_tokens=None)
    assert offline_bound(Turns.of([*TURNS, unknown]), 1000) is None
    assert [metric.value for metric in bound_metrics(Turns.of([*TURNS, unknown]), 1000)] == [None, None, None]


def test_metrics_have_the_denominators_of_the_rates_they_bound():
    rate, of_prompts, seconds = bound_metrics(Turns.of(TURNS), 109)
    assert (seconds.name, seconds.value) == ("bound_recomputed_s", None), "nothing prices a position"
    assert (rate.name, rate.value, rate.n) == ("bound_hit_rate", 109 / 218, 218)
    assert (of_prompts.name, of_prompts.value, of_prompts.n) == ("bound_prompt_hit_rate", 109 / 500, 500)
