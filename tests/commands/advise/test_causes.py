"""Every missed prompt token of recorded traffic has one cause, and the causes are the right ones."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.lab.commands.advise.causes import Reading, parts, split
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.serve.books.books import PositionPrices

SIZE = 4
FACTS = Facts("proxy", block=SIZE)


class Cost:
    def recompute_s(self, context_tokens):
        return 1e-3 * (1 + context_tokens / 100)


NUMBERS = count()
PRICES = PositionPrices(Cost(), SIZE)


def asked(blocks, session="a", at_s=0.0, rest=1, **more):
    """A request with a prompt of these blocks and `rest` tokens."""
    given = {"first_token_s": at_s + 0.1, "end_s": at_s + 1.0, "output_tokens": 1, "cached_tokens": 0, **more}
    tokens = SIZE * len(blocks) + rest
    return Exchange(next(NUMBERS), arrival_s=at_s, session=session, prompt_tokens=tokens, blocks=blocks, **given)


def lines_of(rows, capacity=10**6, found=None):
    """Tokens by cause (None: unknown), and what was read."""
    reading = Reading(FACTS, [(one, f"{one.tenant}/{one.session}") for one in rows])
    own = [one.found or 0 for one in reading.sent] if found is None else found
    told = split(reading, own, capacity, PRICES)
    known = [one for one in told.causes.values() if one is not None]
    assert sum(one.tokens for one in known) == told.missed_tokens
    assert sum(one.seconds for one in known) == pytest.approx(told.missed_s)
    return {cause: one and one.tokens for cause, one in told.causes.items()}, reading


@st.composite
def recordings(draw):
    rows = []
    for place in range(draw(st.integers(1, 12))):
        blocks = draw(st.lists(st.integers(0, 3), max_size=6))
        at_s, end_s = place * draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from([None, 0.5, 3.0]))
        row = asked(blocks, draw(st.sampled_from("abc")), at_s, draw(st.integers(1, SIZE)))
        row.tenant, row.replica = draw(st.sampled_from([None, "t"])), draw(st.sampled_from([None, "r", "s"]))
        row.first_token_s, row.end_s = (None, None) if end_s is None else (at_s + end_s / 2, at_s + end_s)
        row.output_tokens, row.cached_tokens = draw(st.integers(0, 9)), draw(st.integers(0, 30))
        row.output_blocks = draw(st.none() | st.lists(st.integers(0, 3), max_size=2))
        rows.append(row)
    return sorted(rows, key=lambda one: one.arrival_s)


@settings(max_examples=120, deadline=None)
@given(recordings(), st.integers(0, 100))
def test_the_causes_of_every_prompt_are_its_missed_positions_each_once(rows, capacity):
    _, reading = lines_of(rows, capacity)
    for one in reading.sent:
        at = one.found
        for _, start, stop in parts(one, one.found):
            assert start == at and stop >= start
            at = stop
        assert at == one.prompt


def chats(conversations=6, turns=4, first=3, change=None, **more):
    """Conversations in strict turn that begin alike. change: a block that differs in every prompt."""
    fresh, rows, said = count(1000), [], {}
    for _ in range(turns):
        for name in range(conversations):
            blocks = [*said.get(name, range(first)), next(fresh), next(fresh)]
            said[name] = blocks
            sent = list(blocks)
            if change is not None:
                sent[change] = next(fresh)
            rows.append(asked(sent, str(name), at_s=10.0 * len(rows), rest=2, **more))
    return rows


def test_with_room_for_everything_nothing_is_missed_for_capacity_and_without_it_is():
    everything = [one.in_time for one in lines_of(chats())[1].sent]
    assert lines_of(chats(), 10**6, everything)[0]["capacity"] == 0
    assert lines_of(chats(), 10**6)[0]["capacity"] == 0 < lines_of(chats(), 10**6)[0]["order"]
    small = [lines_of(chats(), blocks * SIZE)[0] for blocks in (3, 9, 27)]
    assert small[0]["capacity"] > small[1]["capacity"] > small[2]["capacity"] > 0


def test_a_timestamp_in_the_system_prompt_is_named_by_its_position():
    told, reading = lines_of(chats(change=1))
    assert reading.edges == {SIZE: 6}
    assert told["edited"] == sum(one.before - SIZE for one in reading.sent if one.pause_s is not None)
    assert lines_of(chats())[0]["edited"] == 0 and not lines_of(chats())[1].edges


def test_a_reply_that_comes_back_shorter_is_an_edit_and_one_without_hashes_is_unknown():
    for said, told in ((6, (0, 6, 2, 0)), (60, (9, 0, 0, 1))):
        first = asked([1, 2], rest=2, output_tokens=said)
        found, reading = lines_of([first, asked([1, 2, 3, 4], at_s=5.0)])
        assert (found["edited"], found["answer"], found["late"], reading.shortened) == told


def test_a_reply_with_hashes_can_be_found_once_it_has_ended():
    first = asked([1, 2], rest=2, output_tokens=7, output_blocks=[3, 4], end_s=4.0)
    assert lines_of([first, asked([1, 2, 3, 4, 5], at_s=5.0)])[1].sent[1].in_time == 4 * SIZE
    told, reading = lines_of([first, asked([1, 2, 3, 4, 5], at_s=3.0)])
    assert reading.sent[1].in_time == 2 * SIZE and reading.unique_tokens == 5 * SIZE
    assert told["late"] == 2 * SIZE + 1  # and one of the reply that is less than a block


def test_other_replicas_and_what_comes_too_early_find_nothing():
    same = [1, 2, 3]
    whole = lines_of([asked(same, "a", rest=0), asked(same, "b", 5.0, rest=0)])[1].sent[1]
    assert whole.ever == 2 * SIZE, "the last token is always computed, and with it its block"
    there = lines_of([asked(same, "a", replica="r"), asked(same, "b", 5.0, replica="s")])[0]
    assert there["routed"] == 3 * SIZE
    assert lines_of([asked(same, "a"), asked(same, "b", 5.0)])[0]["routed"] is None
    assert lines_of([asked(same, "a"), asked(same, "b", 0.05)])[0]["late"] == 3 * SIZE


def test_what_the_recording_lacks_is_counted_and_nothing_is_dropped_in_silence():
    lacking = ({"end_s": None}, {"first_token_s": None, "end_s": None}, {"cached_tokens": None})
    rows = [*(asked([1], **fields) for fields in lacking), asked([1])]
    rows[3].prompt_tokens = None
    reading = Reading(FACTS, [(one, "a") for one in rows])
    told = {what.partition(",")[0]: number for what, number in reading.unknown.items() if number}
    assert len(reading.sent) == 3
    lacks = {"an end": 2, "a first token": 1, "what the engine found": 1, "hashes of the reply": 3, "a time": 1}
    assert told == lacks


def test_a_request_of_which_nobody_knows_what_was_found_does_not_count():
    rows = [asked([1, 2]), asked([1, 2, 3], at_s=10.0), asked([1, 9], "b", 20.0)]
    reading = Reading(FACTS, [(one, f"{one.tenant}/{one.session}") for one in rows])
    every, without = (split(reading, found, 10**6, PRICES) for found in ([0, 8, 4], [0, 8, None]))
    left = reading.sent[2]
    assert every.prompt_tokens - without.prompt_tokens == left.prompt
    assert every.missed_tokens - without.missed_tokens == left.prompt - 4
    assert without.bound_tokens <= without.unlimited_tokens < every.bound_tokens, "nor in the bound"
