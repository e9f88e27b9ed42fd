from statistics import mean, median

import pytest

from pensieve.lab.statistics import nearest_rank
from pensieve.lab.workload.sharegpt import SHAREGPT, ULTRACHAT, draw


@pytest.mark.parametrize("published", [SHAREGPT, ULTRACHAT])
def test_the_means_are_the_published_ones_and_the_tails_are_long(published):
    conversations = draw(published, 2_500, seed=0).conversations
    calls = [call for one in conversations for call in one.calls]
    turns = [len(one.calls) for one in conversations]
    messages, replies = [call.content.tokens for call in calls], [call.reply for call in calls]
    assert mean(turns) == pytest.approx(published.turns, rel=0.06)
    assert mean(messages) == pytest.approx(published.message_tokens, rel=0.06)
    assert mean(replies) == pytest.approx(published.reply_tokens, rel=0.04)
    assert min(turns) == 1 and min(messages) >= 1 and min(replies) >= 1
    for values in (turns, messages, replies):
        assert nearest_rank(values, 0.99) > 3.5 * mean(values) > 4 * median(values)


def test_the_seed_decides_and_more_conversations_begin_with_the_same():
    few, more, other = draw(SHAREGPT, 5, 0), draw(SHAREGPT, 9, 0), draw(SHAREGPT, 5, 1)
    assert more.conversations[:5] == few.conversations
    assert other.conversations != few.conversations


def test_min_turns_lengthens_all():
    turns = [len(one.calls) for one in draw(SHAREGPT, 1_000, 0, min_turns=10).conversations]
    assert min(turns) == 10
    assert mean(turns) == pytest.approx(9 + SHAREGPT.turns, rel=0.06)


def test_the_rule_calls_it_synthetic():
    assert draw(ULTRACHAT, 1, 0).rule.startswith("Synthetic, not UltraChat's")
