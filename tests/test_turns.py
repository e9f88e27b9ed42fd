"""Finished turns as columns in a file: what is read back is what was finished, and no record is kept for it."""

from __future__ import annotations

import errno
import math
import os
import random
import tracemalloc
from array import array

import numpy as np
import pytest

from pensieve.lab.turns import TurnLog, Turns
from pensieve.serve.record import TurnRecord


def turn(number: int) -> TurnRecord:
    rng = random.Random(number)

    def perhaps(value):
        return rng.choice([None, value])

    return TurnRecord(
        f"s{number % 7}",
        number // 7 + 1,
        phase=rng.choice(["chat", "warmup", "rewarm"]),
        status=rng.choice(["completed", "timeout"]),
        error=perhaps("a sentence"),
        finished_s=rng.random(),
        ttft_ms=perhaps(rng.random()),
        prompt_tokens=perhaps(rng.randrange(2**40)),
        saved_s=perhaps((rng.random(), 0.0, rng.random())),
        emitted_s=array("d", sorted(rng.random() for _ in range(number % 5))),
    )


RECORDS = [turn(number) for number in range(40)]


def filled(batch: int = 7) -> Turns:
    log = TurnLog()
    for first in range(0, len(RECORDS), batch):
        log.add(RECORDS[first : first + batch])
    return Turns(log)


def known(values):
    return [None if math.isnan(value) else value for value in values]


def gaps(turns: Turns):
    pairs = list(turns.gaps_s())
    return [np.concatenate(part).tolist() for part in zip(*pairs, strict=True)]


def check(turns: Turns, records: list[TurnRecord]) -> None:
    assert len(turns) == len(records)
    for name in ("turn", "ttft_ms", "prompt_tokens"):
        assert known(turns[name]) == [getattr(one, name) for one in records]
    for name in ("session", "phase", "error"):
        words = turns.words(name)
        assert [words[code] for code in turns.codes(name)] == [getattr(one, name) for one in records]
    assert known(turns["saved_disk_s"]) == [one.saved_s and one.saved_s[2] for one in records]
    assert turns["last_token_s"].tolist() == [one.emitted_s[-1] if one.emitted_s else one.finished_s for one in records]
    apart = [np.diff(one.emitted_s).tolist() for one in records]
    assert gaps(turns) == [[gap for own in apart for gap in own], [len(own) for own in apart]]


@pytest.mark.parametrize("batch", [7, 100])
@pytest.mark.parametrize("room", [0, 3, 1000], ids=lambda room: f"room for {room}")
def test_what_is_read_back_is_what_was_finished(batch: int, room: int, monkeypatch: pytest.MonkeyPatch):
    left = [room]

    def pwrite(*arguments) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "full")
        return real(*arguments)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    turns = filled(batch)
    check(turns, RECORDS)
    check(turns.completed, [one for one in RECORDS if one.status == "completed"])
    both = turns.measured.where(turns.measured["turn"] > 2)
    check(both, [one for one in RECORDS if one.phase == "chat" and one.turn > 2])
    assert both.word("session", 1) == [one for one in RECORDS if one.phase == "chat" and one.turn > 2][1].session
    check(turns.where(np.full(len(turns), False)), [])


def test_a_finished_turn_leaves_few_bytes():
    """With names of conversations of 5.5 turns each, which the workload holds."""
    names, log = [f"conversation-{n}" for n in range(1000)], TurnLog()
    log.add([turn(0)])
    tracemalloc.start()
    try:
        for number in range(0, 5500, 500):
            batch = [TurnRecord(names[at * 2 // 11], 1, finished_s=1.0) for at in range(number, number + 500)]
            for one in batch:
                one.emitted_s = array("d", range(200))
            log.add(batch)
            del batch, one
        left = tracemalloc.get_traced_memory()[0] / 5500
    finally:
        tracemalloc.stop()
    print(f"{left:.1f} bytes a turn")
    assert left < 60
