import json
from array import array

import pytest

from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.mooncake import continuations, shared_prefix


def test_a_request_continues_the_one_it_shares_most_with_beyond_the_common_prefix():
    requests = [
        [0, 1, 2],
        [0, 10, 11],
        [0, 1, 2, 3],  # goes on from the first
        [0, 10, 12],  # branches off the second
        [0, 20],  # shares what everybody shares only
        [0, 1, 2, 3, 4],
    ]
    assert continuations(requests) == ([[0, 2, 5], [1, 3], [4]], 1)


def test_of_several_that_share_as_much_the_latest_is_continued():
    # 1 and 2 both hold block 5; the request in question goes on from it, not from their own last blocks.
    requests = [[9], [9], [9], [0, 5, 6], [0, 5, 7], [0, 5, 8]]
    groups, shared = continuations(requests)
    assert shared == 0
    assert [3, 4, 5] in groups


def test_the_prefix_of_more_than_half_is_shared_by_everybody():
    assert shared_prefix([[0, 1, 2], [0, 1, 3], [0, 4]]) == 2
    assert shared_prefix([[0, 1], [0, 2], [3]]) == 1
    assert shared_prefix([[0], [1]]) == 0
    assert shared_prefix([]) == 0


def test_one_odd_request_does_not_make_one_conversation_of_all():
    requests = [[0, n] for n in range(1, 9)] + [[99]]
    assert len(continuations(requests)[0]) == 9


def test_lines_are_put_in_order_of_time_and_counted_from_the_first(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [(3000, 600, [1, 2]), (1000, 512, [1]), (1000, 100, [5]), (4000, 100, [6])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": n, "output_length": 4, "hash_ids": ids}) for at, n, ids in rows
        )
    )
    recording = load(path, "mooncake")
    assert recording.timed
    first = recording.conversations[0]
    assert [call.at_s for call in first.calls] == [0.0, 2.0]
    assert first.calls[1].content.hashes == array("q", [1, 2])
    assert first.calls[1].content.tokens == 600
    assert not first.calls[0].continues
    assert [call.order for one in recording.conversations for call in one.calls] == [0, 2, 1, 3]
    assert "more than half of all requests share (0 blocks)" in recording.rule


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024])
def test_a_prompt_has_a_hash_for_each_begun_block(tmp_path, tokens):
    path = tmp_path / "trace.jsonl"
    ids = list(range((tokens + 511) // 512))
    path.write_text(json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids}))
    assert load(path, "mooncake").conversations[0].calls[0].content.tokens == tokens
