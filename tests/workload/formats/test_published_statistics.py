"""The loaders, held against what is published about real files. Skipped where the files are not beside the checkout."""

from itertools import pairwise
from statistics import mean, pstdev

import pytest

from pensieve.lab.statistics import nearest_rank
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.recording import block_repeats
from tests.shared_data import shared


def lengths(recording):
    calls = [call for conversation in recording.conversations for call in conversation.calls]
    return [call.content.tokens for call in calls], [call.reply for call in calls]


def mean_p50_p99(values):
    return round(mean(values)), nearest_rank(values, 0.5), nearest_rank(values, 0.99)


def test_mooncake():
    recording = load(shared("mooncake/conversation_trace.jsonl"), "mooncake")
    prompts, replies = lengths(recording)
    assert len(prompts) == 12_031
    assert mean_p50_p99(prompts) == pytest.approx((12_035, 6_909, 85_400), rel=1e-3)
    assert mean_p50_p99(replies) == pytest.approx((343, 350, 1_119), rel=2e-3)
    repeats = block_repeats(recording)
    assert (repeats["block_tokens"], repeats["file_unique_blocks"], repeats["file_blocks"]) == (512, 182_790, 288_500)
    assert repeats["file_repeated_blocks_share"] == pytest.approx(0.366, abs=5e-4)


def test_azure():
    recording = load(shared("azure/AzureLLMInferenceTrace_conv.csv"), "azure")
    prompts, replies = lengths(recording)
    assert len(prompts) == len(recording.conversations) == 19_366
    assert mean_p50_p99(prompts) == pytest.approx((1_155, 1_020, 4_142), rel=2e-3)
    assert mean_p50_p99(replies) == pytest.approx((211, 129, 601), rel=4e-3)
    times = [conversation.calls[0].at_s for conversation in recording.conversations]
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0 and times[0] == 0 and 57 * 60 < times[-1] < 59 * 60
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1.09, abs=0.01)


def test_agent_sessions_go_on_where_the_call_before_ended():
    recording = load(shared("agent_sessions"), "agent_jsonl")
    assert len(recording.conversations) == 10
    shares = []
    for conversation in recording.conversations:
        for before, after in pairwise(conversation.calls):
            assert after.content.text.startswith(before.content.text)
            shares.append(len(before.content.text) / len(after.content.text))
    assert mean(shares) == pytest.approx(0.94, abs=0.01)
