"""The loops in C say what those in Python say."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core.cache import loops, victims
from pensieve.core.cache.loops import PLAIN, Head, NativeLoops, Stretch, Victim
from pensieve.core.cache.victims import VictimIndex
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.session import Session, View
from pensieve.errors import EngineMissing
from tests.simulated import policy_context, with_chunks

SCORES = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 1.0, 3.0, float("inf")])
CONVERSATIONS = st.lists(
    st.tuples(
        st.integers(0, 2),  # its bucket
        st.integers(0, 1),  # level
        st.sampled_from([0.0, 1.0]),  # last active
        st.lists(st.tuples(st.integers(1, 3), st.lists(SCORES, min_size=1, max_size=5)), min_size=1, max_size=4),
        st.sampled_from([0.0, 0.0, 2.25]),  # how far its entry in the bucket is below its first score
    ),
    max_size=8,
)  # with stretches of scores, each so many chunks behind the one before


@pytest.fixture(scope="module")
def native() -> NativeLoops:
    try:
        return NativeLoops()
    except EngineMissing as missing:
        pytest.skip(str(missing))


class Buckets:
    """Conversations in buckets, each in the order of their first chunks."""

    def __init__(self, drawn: list[Any], exact: bool = False) -> None:
        self.stretches: dict[int, list[Stretch]] = {}
        self.buckets: dict[tuple[int, int], list[Victim]] = {}
        for number, (bucket, level, active, runs, below) in enumerate(drawn):
            first, own = 0, []
            for gap, scores in runs:
                own.append((level, active, first + gap, scores))
                first += gap + len(scores)
            self.stretches[number] = own
            victim = (level, own[0][3][0] - (0.0 if exact else below), active, number, own[0][2])
            self.buckets.setdefault((level, bucket), []).append(victim)

    def heads(self) -> list[Head]:
        found: list[Head] = []
        for bucket in self.buckets.values():
            first, *behind = sorted(bucket)
            found.append((*first, iter(behind)))
        return found

    def stretch_of(self, number: int, chunk: int) -> Stretch | None:
        for level, active, first, scores in self.stretches[number]:
            if first + len(scores) > chunk:
                start = max(first, chunk)
                return level, active, start, scores[start - first :]
        return None


@settings(max_examples=300, deadline=None)
@given(drawn=CONVERSATIONS, most=st.integers(0, 30), whole=st.booleans())
def test_both_choose_the_same(native: NativeLoops, drawn: list[Any], most: int, whole: bool) -> None:
    buckets = Buckets(drawn)
    plain = PLAIN.choose(buckets.heads(), most, whole, buckets.stretch_of)
    chosen = native.choose(buckets.heads(), most, whole, buckets.stretch_of)
    assert chosen == plain
    if not whole:
        assert plain == PLAIN.choose(Buckets(drawn, exact=True).heads(), most, whole, buckets.stretch_of)
    everything = sum(len(scores) for own in buckets.stretches.values() for *_, scores in own)
    assert len(plain) >= min(most, everything)
    assert native.spans(plain) == PLAIN.spans(plain)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1 << 40)), unique=True).map(sorted))
def test_both_find_the_same_spans(native: NativeLoops, places: list[tuple[int, int]]) -> None:
    victims = [(0, 1.0, 1.0, number, chunk) for number, chunk in places]
    spans = native.spans(victims)
    assert spans == PLAIN.spans(victims)
    assert [(number, chunk) for number, start, stop in spans for chunk in range(start, stop)] == places


def test_what_is_no_float_is_left_to_python(native: NativeLoops) -> None:
    def stretch_of(number: int, chunk: int) -> Stretch | None:
        return (0, 1.0, chunk, [7] * (3 - chunk)) if chunk < 3 else None

    def heads(score: Any) -> list[Head]:
        return [(0, score, 1.0, 0, 0, iter(()))]

    assert native.choose(heads(7), 2, False, stretch_of) is None
    assert native.choose(heads(7.0), 2, False, stretch_of) is None
    assert native.choose(heads(float("nan")), 2, False, stretch_of) is None
    assert PLAIN.choose(heads(7), 2, False, stretch_of) == [(0, 7, 1.0, 0, 0), (0, 7, 1.0, 0, 1)]


def test_an_error_of_a_policy_comes_through(native: NativeLoops) -> None:
    def stretch_of(number: int, chunk: int) -> Stretch | None:
        raise ValueError("no score")

    def broken() -> Iterator[Victim]:
        raise ValueError("no bucket")
        yield

    with pytest.raises(ValueError, match="no score"):
        native.choose([(0, 1.0, 1.0, 0, 0, iter(()))], 2, False, stretch_of)
    with pytest.raises(ValueError, match="no bucket"):
        native.choose([(0, 1.0, 1.0, 0, 0, broken())], 2, False, stretch_of)


class Whole(RetentionValue):
    def scores(self, session: Session, start: int, stop: int, now_s: float) -> list[float]:
        return [round(score) for score in super().scores(session, start, stop, now_s)]

    def score(self, bucket: Any, order: float, now_s: float) -> float:
        return round(super().score(bucket, order, now_s))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("policy", [RetentionValue, Whole])
def test_many_choices_are_the_same_with_and_without_a_compiler(
    policy: type[RetentionValue], compiler: bool, monkeypatch: pytest.MonkeyPatch, native: NativeLoops
) -> None:
    monkeypatch.setattr(victims, "_MANY", 100)
    if not compiler:
        monkeypatch.setattr(loops, "load_library", _missing)
    loops.fastest_loops.cache_clear()
    monkeypatch.setattr(victims, "loops_when_ready", loops.fastest_loops)
    index = VictimIndex(policy(policy_context()), View.DIRTY)
    for number in range(5):
        session = with_chunks(Session(str(number), number, 0.0, number / 2), 90)
        session.leaf.chunks.view = bytearray((View.DIRTY, View.NONE, View.DIRTY)) * 30
        index.changed(session.leaf, 60)
    choices = [index.choose(70, 9.0) for _ in range(5)]
    assert choices == [choices[0]] * 5 and len(choices[0]) == 70
    assert (index._loops is not PLAIN) == (compiler and policy is RetentionValue)
    loops.fastest_loops.cache_clear()


def test_no_choice_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch, native: NativeLoops) -> None:
    monkeypatch.setattr(loops, "_making", None)
    monkeypatch.setattr(loops, "NativeLoops", lambda: compiled.wait(20) and native)
    loops.fastest_loops.cache_clear()
    compiled = Event()
    assert loops.loops_when_ready() is PLAIN
    assert loops.loops_when_ready() is PLAIN
    compiled.set()
    loops._making.join(20)
    assert loops.loops_when_ready() is native
    loops.fastest_loops.cache_clear()


def _missing(*_: object, **__: object) -> None:
    raise EngineMissing("no compiler here")


def test_loops_that_were_made_before_are_there_at_once(monkeypatch: pytest.MonkeyPatch, native: NativeLoops) -> None:
    monkeypatch.setattr(loops, "_making", None)
    monkeypatch.setattr(loops, "NativeLoops", lambda: native)
    loops.fastest_loops.cache_clear()
    loops.fastest_loops()
    assert loops.loops_when_ready() is native
    assert loops._making is None, "no thread was needed"
    loops.fastest_loops.cache_clear()
