import json
from array import array

import pytest

from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.mooncake import continuations


@pytest.mark.parametrize(
    ("requests", "groups", "shared"),
    [
        # The fourth goes on from the first, the fifth branches off the second; the sixth shares what everybody shares only.
        ([[0, 1, 2], [0, 10, 11], [0, 1, 2, 3], [0, 10, 12], [0, 20], [0, 1, 2, 3, 4]], [[0, 2, 5], [1, 3], [4]], 1),
        # 3 and 4 both hold block 5: the last goes on from it, not from their own last blocks, and from the latest of them.
        ([[9], [9], [9], [0, 5, 6], [0, 5, 7], [0, 5, 8]], [[0, 1, 2], [3, 4, 5]], 0),
        ([[0, n] for n in range(1, 9)] + [[99]], [[n] for n in range(9)], 1),  # an odd one does not make one of all
        ([[0, 1, 2], [0, 1, 3], [0, 4]], [[0], [1], [2]], 2),  # more than half begin with 0, 1
        ([[0, 1], [0, 2], [3]], [[0], [1], [2]], 1),
        ([[0], [1]], [[0], [1]], 0),
        ([[1], [2], [3], [1, 2]], [[0], [1, 3], [2]], 0),  # the last block counts
        ([[0, 1], [0, 2], [0, 3], [5, 1], [5, 1]], [[0, 3, 4], [1], [2]], 1),  # blocks behind another beginning do not
        ([], [], 0),
    ],
)
def test_a_request_continues_the_one_it_shares_most_with_beyond_the_common_prefix(requests, groups, shared):
    assert continuations(requests) == (groups, shared)


def write(path, *rows):
    """rows: (ms, input_length, hash_ids)."""
    names = ("timestamp", "input_length", "hash_ids", "output_length")
    path.write_text("\n".join(json.dumps(dict(zip(names, (*row, 4), strict=True))) for row in rows))
    return load(path, "mooncake")


def test_lines_are_put_in_order_of_time_and_counted_from_the_first(tmp_path):
    rows = [(3000, 600, [1, 2]), (1000, 512, [1]), (1000, 100, [5]), (4000, 100, [6])]
    recording = write(tmp_path / "trace.jsonl", *rows)
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
    recording = write(tmp_path / "trace.jsonl", (0, tokens, list(range((tokens + 511) // 512))))
    assert recording.conversations[0].calls[0].content.tokens == tokens
