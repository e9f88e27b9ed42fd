"""History that a trial found under each rule of reuse, computed anew from the rows of its database."""

from collections import OrderedDict

import pytest

from tests.trial.running import run

CHUNK, BLOCKS = 16, 96
LOAD = (
    "baseline=pensieve", "model=tiny", "eviction=lru", f"cache.chunk_tokens={CHUNK}", "cache.cpu='0 tokens'",
    "workload=rounds", "workload.order=random", "workload.rounds=6", "workload.message_tokens=37", "workload.reply_tokens=9",
    "workload.conversations=12",
)  # fmt: skip


def expected(turns, blocks, reuse):
    """The conversation unused longest gives up its blocks before the next one: from its head (any), or its tail (prefix)."""
    held = OrderedDict()  # by conversation, the tokens in each of its blocks; unused longest first
    for turn in turns:
        found = sum(held.pop(turn.session, ()))
        stop = turn.prompt_tokens + turn.output_tokens - 1  # the last token has no KV
        own = [min(CHUNK, stop - start) for start in range(0, stop, CHUNK)]
        while len(own) + sum(map(len, held.values())) > blocks:
            oldest = next(iter(held))
            held[oldest].pop(0 if reuse == "any" else -1)
            if not held[oldest]:
                del held[oldest]
        held[turn.session] = own
        yield found


@pytest.mark.parametrize("blocks", [BLOCKS, 4 * BLOCKS])
def test_the_rows_of_a_trial_say_what_each_rule_should_have_found(tracking, blocks):
    """Where nothing is evicted the rules are one, to the last digit of each first token."""
    seen = {}
    for reuse in ("any", "prefix"):
        size = f"cache.gpu='{blocks * CHUNK} tokens'"
        outcome = run(tracking, *LOAD, size, f"baseline.cache.reuse={reuse}", words=(), folder=reuse)
        assert outcome.completed, outcome.error
        turns = tracking.store.turns_of(outcome.trial_id)
        hits = [(turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) for turn in turns]
        assert hits == list(expected(turns, blocks, reuse))
        seen[reuse] = hits, [turn.ttft_ms for turn in turns]
    assert (seen["any"] == seen["prefix"]) == (blocks > BLOCKS)
    if blocks > BLOCKS:
        assert hits == [turn.history_tokens for turn in turns]
