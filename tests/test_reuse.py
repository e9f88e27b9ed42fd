"""One pass over a load against LRU caches that are filled and emptied, of every size."""

import random
from array import array
from collections import OrderedDict

import pytest

from pensieve.core.request import Length, Request
from pensieve.lab.reuse import reuse_of
from pensieve.lab.workload.base import Arrival
from tests.test_replay import Listed

SIZE = 4


def arrivals(seed):
    """Eight conversations that grow: prompts of which some carry all that was said before, and some the new message alone."""
    draw, said, found = random.Random(seed), {}, []
    for number in range(120):
        name = f"c{draw.randrange(8)}"
        known = said.get(name, array("i"))
        message = array("i", [draw.randrange(50) for _ in range(draw.randrange(1, 15))])
        continues, reply = draw.random() < 0.5, draw.randrange(1, 6)
        prompt = message if continues else known + message
        phase = "warmup" if number < 5 else "chat"
        turn = sum(one.request.session == name for one in found) + 1
        request = Request(number, name, turn, prompt, Length(reply), phase=phase)
        found.append(Arrival(number * 0.1, request, continues=continues))
        said[name] = known + message + array("i", (-1,)) * reply
    return found


def found_by_a_cache(requests, chunks):
    """Found and asked tokens of the history, by a cache that is told of one request after the other."""
    cache, said, found, asked = OrderedDict(), {}, 0, 0
    for one in requests:
        name, known = one.request.session, said.get(one.request.session, 0)
        prompt = known + len(one.request.prompt) if one.continues else len(one.request.prompt)
        history = max(0, known - 1)
        there = [i for i in range(-(-history // SIZE)) if (name, i) in cache]
        if one.request.phase != "warmup":
            found += sum(min(SIZE, history - i * SIZE) for i in there)
            asked += history
        said[name] = prompt + one.request.output.tokens
        for i in range(-(-(said[name] - 1) // SIZE)):
            cache[name, i] = None
            cache.move_to_end((name, i))
        while len(cache) > chunks:
            cache.popitem(last=False)
    return found, asked


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_says_what_a_cache_of_each_size_finds(seed):
    requests = arrivals(seed)
    reuse = reuse_of(Listed(*requests), SIZE)
    for chunks in (0, 1, 3, 10, 30, 60, 100, 150, 1000):
        found, asked = found_by_a_cache(requests, chunks)
        assert reuse.found(chunks) == pytest.approx(found / asked), chunks
    assert 0 < reuse.found(60) < reuse.found(1000) == 1.0
