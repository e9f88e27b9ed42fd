"""Recordings fitted to a model, and played."""

import pytest

from pensieve.lab.workload.fit import Fit, fitted, synthesised, warmups
from pensieve.lab.workload.playback import Pauses, Playback, Poisson, Recorded, Users
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Count, hashes_of
from tests.scripted import context
from tests.workload.dry import drive, measured

TIMED = [
    Conversation("a", (Call(Count(10), 3, 5.0, False, 1), Call(Count(12), 3, 9.0, False, 4))),
    Conversation("b", (Call(Count(20), 4, 5.0, False, 0), Call(Count(25), 4, 5.5, False, 3))),
]
TALKS = [Conversation(f"c{n}", tuple(Call(Count(5 + n), 2) for _ in range(1 + n % 3))) for n in range(9)]


def playback(conversations, arrivals, seed=0, pause_s=1.0, **options):
    dialogues, _ = fitted(conversations, Fit(context(seed)))
    if isinstance(arrivals, int):
        arrivals = Users.dealt(dialogues, arrivals)
    warm = warmups(dialogues, 4, 2, context(seed))
    return Playback(context(seed), warm, dialogues, arrivals, Pauses(seed, pause_s), **options)


def test_recorded_times_are_kept_whatever_the_system_does():
    for service_s, scale in ((0.01, 1.0), (100.0, 0.5)):
        seen = measured(drive(playback(TIMED, Recorded(scale)), service_s))
        assert [one.request.session for one in seen] == ["b", "a", "b", "a"]
        assert [one.at_s - seen[0].at_s for one in seen] == pytest.approx([0, 0, 0.5 * scale, 4 * scale])
    assert len(measured(drive(playback(TIMED, Recorded()), fail={("b", 1)}))) == 4, "also where the one before failed"
    assert len(measured(drive(playback(TALKS, Poisson(1.0)), fail={("c2", 1)}))) == sum(len(c.calls) for c in TALKS) - 2


def chat(name, *lengths):
    return Conversation(name, tuple(Call(Count(message), reply) for message, reply in lengths))


def tokens(count, *hashes, seed=0):
    return synthesised(Blocks(hashes_of(list(hashes)), 16, count), 256, seed, ("own",))


def test_equal_hashes_give_equal_tokens_wherever_they_are():
    one, two = tokens(40, 1, 2, 3), tokens(48, 9, 2, 4)
    assert (len(one), len(two)) == (40, 48)
    assert one[16:32] == two[16:32] and one[:16] != two[:16]
    assert tokens(33, 1, 2, 3) == one[:33] and tokens(40, 1, 2, 3, seed=1) != one


def test_replies_are_capped_and_free_ones_may_use_the_cap():
    asked = chat("a", (10, 5), (10, 50))
    for cap, free, replies in ((8, False, [5, 8]), (8, True, [8, 8]), (None, True, [5, 50])):
        steps = Fit(context(), max_new_tokens=cap, free=free).dialogue(asked).steps
        assert [step.reply for step in steps] == replies


def test_what_does_not_fit_is_cut_and_counted():
    found = [
        chat("long", (90, 20)),
        chat("cut", (40, 10), (40, 11), (1, 1)),
        chat("short", (5, 5)),
        chat("ok", (1, 1), (1, 1)),
    ]
    measured, left_out = fitted(found, Fit(context(max_context=100), max_turns=2), min_turns=1)
    assert [(one.session, one.turns) for one in measured] == [("cut", 1), ("short", 1), ("ok", 2)]
    assert left_out == {"conversations_with_too_few_turns": 0, "conversations_too_long_for_the_context": 1}
    told = Playback(context(), (), measured, Poisson(1.0), Pauses(0, 1.0)).describe().facts
    assert (told["conversations_cut_by_context"], told["turns_cut_by_context"]) == (1, 1)
    measured, left_out = fitted(found, Fit(context(max_context=1000)), min_turns=2, wanted=1)
    assert [one.session for one in measured] == ["cut"]
    assert left_out["conversations_with_too_few_turns"] == 1


def test_warmups_have_the_lengths_of_the_measured_and_tokens_of_their_own():
    measured, _ = fitted([chat("a", (10, 5), (7, 3)), chat("b", (20, 6))], Fit(context(max_context=60)))
    warm = warmups(measured, 5, 2, context(max_context=60))
    assert [(one.session, one.phase, one.turns) for one in warm] == [
        ("warmup-0", "warmup", 3),
        ("warmup-1", "warmup", 2),
    ]
    assert [(step.message, step.prompt) for step in warm[0].steps] == [(10, 10), (7, 22), (10, 35)]
    # The second message of 20 fits after 26 tokens; a third would not, and would start from an empty history.
    assert [(step.message, step.continues) for step in warm[1].steps] == [(20, True), (20, True)]
    longer = warmups(measured[1:], 3, 1, context(max_context=60))
    assert [(step.prompt, step.continues) for step in longer[0].steps] == [(20, True), (46, True), (20, False)]
    assert warm[0].steps[0].build() != measured[0].steps[0].build()
    assert len(warmups(measured, 1, 2, context())) == 1
