"""Finished turns in a file: what is read back is what was finished, and memory holds the last of them only."""

from __future__ import annotations

import dataclasses
import errno
import gc
import random
from array import array

import pytest

from pensieve.lab.turn_log import Chosen, TurnLog, chosen
from pensieve.serve.record import Miss, ScratchFile, TurnRecord

LET_GO = {"token_ids", "margins", "emitted_s", "stored"}


def turn(number: int) -> TurnRecord:
    rng = random.Random(number)

    def perhaps(value):
        return rng.choice([None, value])

    return TurnRecord(
        f"s{number % 7}",
        number // 7 + 1,
        ordinal=number,
        phase=rng.choice(["chat", "warmup"]),
        status=rng.choice(["completed", "timeout"]),
        error=perhaps("a sentence"),
        ttft_ms=perhaps(rng.random()),
        prompt_tokens=perhaps(rng.randrange(2**40)),
        saved_s=perhaps((rng.random(), 0.0)),
        misses=tuple(Miss("evicted", 3, rng.random(), f"s{i}", 1.5) for i in range(rng.randrange(3))),
        token_ids=array("i", range(number % 5)),
        margins=array("d", [0.5] * (number % 5)),
        emitted_s=array("d", [rng.random() for _ in range(number % 5)]),
    )


def told(one: TurnRecord) -> dict[str, object]:
    return {f.name: getattr(one, f.name) for f in dataclasses.fields(TurnRecord) if f.name not in LET_GO}


def filled(count: int, batch: int = 8, held: int = 0) -> TurnLog:
    log = TurnLog(held)
    for number in range(count):
        log.append(turn(number))
        if len(log.recent) == batch:
            log.store()
    return log


@pytest.mark.parametrize("held", [0, 8, 15, 1000], ids=lambda held: f"{held} held")
def test_what_is_read_back_is_what_was_finished(held: int):
    log, expected = filled(20, held=held), [turn(number) for number in range(20)]
    assert len(log) == 20
    assert len(log.recent) == 4
    for found in (list(log), [log[place] for place in range(20)], list(reversed(log))[::-1], list(log[:])):
        assert [told(one) for one in found] == [told(one) for one in expected]
        assert [one.times_s() for one in found] == [one.emitted_s for one in expected]
        assert all(not one.token_ids and not one.margins for one in found[:16]), "let go"
    assert [told(one) for one in log[5:18:3]] == [told(one) for one in expected[5:18:3]]
    assert told(log[-1]) == told(expected[-1])
    with pytest.raises(IndexError):
        log[20]


def test_memory_holds_the_last_turns_only():
    def there() -> int:
        gc.collect()
        return sum(issubclass(type(one), TurnRecord) for one in gc.get_objects())  # isinstance asks the objects, too

    before = there()
    log = filled(400, held=100)
    assert there() - before == 96, "the first ones, for trials that are summarised in many passes"
    del log
    log = filled(400)
    assert there() - before == len(log.recent) == 0
    assert len({one.session for one in log}) == 7, "they can be asked"
    assert there() == before, "and are not kept for that"


def test_turns_stay_in_memory_where_there_is_no_room_for_them(monkeypatch: pytest.MonkeyPatch):
    left = [10]

    def append(self: ScratchFile, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "full")
        return real(self, data)

    real = ScratchFile.append
    monkeypatch.setattr(ScratchFile, "append", append)
    log, expected = filled(24), [turn(number) for number in range(24)]
    assert [told(one) for one in log] == [told(one) for one in expected]
    assert [one.times_s() for one in log] == [one.emitted_s for one in expected]
    assert told(log[20]) == told(expected[20])


def test_a_choice_of_stored_turns_is_looked_for_again_and_is_no_list():
    log, listed = filled(30), [turn(number) for number in range(30)]
    warm, same = (chosen(turns, lambda one: one.phase == "warmup") for turns in (log, listed))
    assert isinstance(warm, Chosen)
    assert isinstance(same, list)
    assert [told(one) for one in warm] == [told(one) for one in warm] == [told(one) for one in same]
    assert len(warm) == len(same) > 0
    assert told(warm[2]) == told(same[2])
    assert [told(one) for one in warm[1:3]] == [told(one) for one in same[1:3]]
    assert not chosen(log, lambda one: False)
