"""How many slots llama-server would be given where nobody says it."""

import pytest

from pensieve.cache.slots import SlotCache
from tests.simulated import policy_context


@pytest.mark.parametrize(
    ("longest", "slots"),
    [(None, 4), (8, 4), (12, 4), (13, 3), (24, 2), (60, 1), (1000, 1)],  # 16 blocks of 4 tokens, one to spare in each
)
def test_as_many_as_hold_the_longest_conversation(longest, slots):
    context = policy_context()
    cache = SlotCache(policy=None, chunk_tokens=4, gpu_blocks=context.gpu_blocks, longest_tokens=longest)
    assert cache.chosen == {"n_slots": slots, "slot_tokens": 16 // slots * 4, "slot_prompt_similarity": 0.1}


def test_a_number_that_is_given_stands():
    assert SlotCache(policy=None, chunk_tokens=4, gpu_blocks=16, n_slots=8, longest_tokens=1000).chosen["n_slots"] == 8
