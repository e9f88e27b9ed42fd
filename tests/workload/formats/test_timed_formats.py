"""Azure, Mooncake, Qwen-Bailian and RAGPulse, from a few lines each."""

import pytest

from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.reading import seconds
from pensieve.lab.workload.formats.timed import continuations, pieces
from tests.workload.dry import lines


def qwen(chat, parent, at_s, tokens, ids, turn=1):
    return {
        "chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "input_length": tokens, "output_length": 7,
        "type": "text", "turn": turn, "hash_ids": ids,
    }  # fmt: skip


READ = {
    "azure": (
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:47,30,4", "2023-11-16 18:15:46,20,3"),
        {"azure-0": [(0.0, 20, 3)], "azure-1": [(1.0, 30, 4)]},
        {},
    ),
    "qwen_bailian": (
        (
            qwen(15, 13, 9.5, 60, [1, 2, 3, 4], turn=4),  # at the time of the turn before it
            qwen(10, -1, 1.0, 20, [1, 2]),
            qwen(11, 10, 5.0, 40, [1, 2, 3], turn=2),
            qwen(12, -1, 2.0, 16, [9]),
            qwen(13, 11, 9.5, 50, [1, 2, 3, 4], turn=3),
            qwen(14, 4, 9.0, 16, [8]),  # its parent was not recorded
        ),
        {
            "qwen-10": [(0.0, 20, 7), (4.0, 40, 7), (8.5, 50, 7), (8.5, 60, 7)],
            "qwen-12": [(1.0, 16, 7)],
            "qwen-14": [(8.0, 16, 7)],
        },
        {"requests_whose_parent_is_not_in_the_file": 1},
    ),
}


@pytest.mark.parametrize(("format", "rows", "found", "facts"), [(name, *case) for name, case in READ.items()], ids=READ)
def test_what_is_read(tmp_path, format, rows, found, facts):
    recording = load(lines(tmp_path / "file", *rows), format)
    shape = {
        one.id: [(call.at_s, call.content.tokens, call.reply) for call in one.calls] for one in recording.conversations
    }
    assert (shape, recording.facts, recording.timed) == (found, facts, True)
    if format == "qwen_bailian":
        assert recording.conversations[0].calls[0].content.block_tokens == 16


def test_times_have_any_number_of_decimals_and_perhaps_a_zone():
    start = seconds("2023-11-16 18:15:46.6805900")
    assert seconds("2023-11-16 18:15:50.9951690+00:00") - start == pytest.approx(4.314579)
    with pytest.raises(ValueError):
        seconds("2023-13-16 18:15:46")


RAG = {
    "timestamp": "27", "input_length": 100, "output_length": 9, "session_id": "a-b",
    "hash_ids": {"sys_prompt": [1, 2], "passages_ids": [3], "history": [], "user_input": [4]},
}  # fmt: skip


def test_ragpulse_uses_the_lengths_of_its_folder(tmp_path):
    lines(tmp_path / "0_trace.jsonl", RAG, {**RAG, "timestamp": "30", "input_length": 85})
    sizes = ({"sys_prompt_id": one, "token_length": length} for one, length in ((1, 30), (2, 10)))
    lines(tmp_path / "1_sys_prompt.jsonl", *sizes)
    lines(tmp_path / "2_passages.jsonl", {"passage_id": 3, "token_length": 40})
    recording = load(tmp_path, "ragpulse")
    (conversation,) = recording.conversations
    assert [(call.at_s, call.content.pieces) for call in conversation.calls] == [
        (0.0, ((1, 30), (2, 10), (3, 40), (4, 20))),
        (3.0, ((1, 30), (2, 10), (3, 40), (4, 5))),
    ]
    assert pieces({"history": [1, 2, 3]}, 10, {1: 50}) == ((1, 10),)


@pytest.mark.parametrize(
    ("requests", "first", "shared"),
    [
        # The fourth goes on from the first, the fifth branches off the second; the sixth shares what everybody shares only.
        ([[0, 1, 2], [0, 10, 11], [0, 1, 2, 3], [0, 10, 12], [0, 20], [0, 1, 2, 3, 4]], [0, 1, 0, 1, 4, 0], 1),
        # 3 and 4 both hold block 5: the last goes on from it, not from their own last blocks, and from the latest of them.
        ([[9], [9], [9], [0, 5, 6], [0, 5, 7], [0, 5, 8]], [0, 0, 0, 3, 3, 3], 0),
        ([[0, n] for n in range(1, 9)] + [[99]], [*range(9)], 1),  # an odd one does not make one of all
        ([[0, 1, 2], [0, 1, 3], [0, 4]], [0, 1, 2], 2),  # more than half begin with 0, 1
        ([[0, 1], [0, 2], [3]], [0, 1, 2], 1),
        ([[1], [2], [3], [1, 2]], [0, 1, 2, 1], 0),  # the last block counts
        ([[0, 1], [0, 2], [0, 3], [5, 1], [5, 1]], [0, 1, 2, 0, 0], 1),  # blocks behind another beginning do not
        ([], [], 0),
    ],
)
def test_a_request_continues_the_one_it_shares_most_with_beyond_the_common_prefix(requests, first, shared):
    assert continuations(requests) == (first, shared)
