"""How many slots llama-server would be given where nobody says it, and which of them a request takes."""

from functools import partial

import pytest

from pensieve.core.request import Length, Request, tokens_of
from pensieve.plugins.caches.slots import SlotCache
from tests.simulated import make_engine, policy_context, run


@pytest.mark.parametrize(
    ("longest", "slots"),
    [(None, 4), (8, 4), (12, 4), (13, 3), (24, 2), (60, 1), (1000, 1)],  # 16 blocks of 4 tokens, one to spare in each
)
def test_as_many_as_hold_the_longest_conversation(longest, slots):
    context = policy_context()
    cache = SlotCache(policy=None, chunk_tokens=4, gpu_blocks=context.gpu_blocks, longest_tokens=longest)
    assert cache.chosen == {"n_slots": slots, "slot_tokens": 16 // slots * 4}


def asked(number: int, name: str, tokens: list[int]) -> Request:
    return Request(number, name, 1, tokens_of(tokens), Length(1))


@pytest.mark.parametrize(("length", "slot"), [(19, 1), (20, 0), (21, 0)])
def test_a_slot_whose_prefix_is_too_small_a_share_of_the_prompt_is_spared(length, slot):
    """Two slots: the first was used least recently, the second shares 2 tokens. Above a tenth, not at it, that one is
    taken."""
    engine = make_engine(cache=partial(SlotCache, n_slots=2), gpu_blocks=32)
    for number, first in ((1, 10), (2, 50)):
        engine.say(asked(number, f"s{number}", [first, first + 1, *range(80, 88)]))
        run(engine)
    engine.say(asked(3, "c", [50, 51, *[7] * (length - 2)]))
    turn = run(engine)[3]
    taken = [number for number, one in enumerate(engine.cache.slots) if list(one.tokens[2:4]) != [80, 81]]
    assert (taken, turn.shared_hit_tokens) == ([slot], 2 if slot else 0)
