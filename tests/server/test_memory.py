"""What a server's process holds, and what its tenants do."""

from __future__ import annotations

import gc
import random
import weakref
from array import array

import psutil
import pytest

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from pensieve.errors import TooManySessions
from pensieve.serve.record import TurnRecord
from pensieve.serve.server import statistics
from pensieve.serve.server.conversations import Conversations, Mark


def test_pages_of_long_bodies_go_back_to_the_system():
    kept = [b"x" * (100_000 + at) for at in range(1_000)]
    del kept[::2]  # so that they are not the end of the heap, which is given back by itself
    before = psutil.Process().memory_info().rss
    statistics.give_back()
    assert before - psutil.Process().memory_info().rss > 25_000_000 or not hasattr(psutil, "heap_trim")
    assert kept


def test_what_requests_leave_is_collected_however_much_is_here_to_stay():
    """The collector would else wait until a quarter as much has come: 36,000 objects, two a turn."""
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(100, 5, 5)
        gc.unfreeze()
        statistics.settle()
        cycles = [_Cycle() for _ in range(100)]
        gc.collect(1)  # they have been there for a while
        gone = weakref.ref(cycles[0])
        del cycles
        for _ in range(100_000):
            _Cycle()
        assert gone() is None
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        gc.freeze()


class _Cycle:
    def __init__(self):
        self.itself = self


def test_the_tokens_of_a_tenant_are_counted_as_they_come_and_go():
    rng, now = random.Random(0), iter(range(10**6))
    conversations = Conversations(lambda _: None, now=lambda: float(next(now)))
    conversations.limit(10**6, 4_000, None)
    record, refused = TurnRecord("s", 1), 0
    for _ in range(600):
        tenant = rng.choice("ab")
        mine = conversations.of(tenant)
        try:
            one = conversations.open(tenant) if not mine or rng.random() < 0.4 else rng.choice(mine)
            if one.marks and rng.random() < 0.2:
                one = conversations.fork(one, rng.randrange(len(one.tokens)))
        except TooManySessions:
            refused += 1
            continue
        if rng.random() < 0.2:
            conversations.remove(one)
        else:
            tokens = array("i", rng.choices(range(3), k=rng.randrange(1, 300)))
            conversations.settle(one, tokens, Mark(len(tokens), record, 0))
        for name in "ab":
            held = sum(len(each.tokens) for each in conversations.of(name))
            assert conversations._tokens[name] == held
    assert refused == 0, "the one idle longest makes room"
    assert max(len(conversations.of(name)) for name in "ab") < 60, "so there never were many"
