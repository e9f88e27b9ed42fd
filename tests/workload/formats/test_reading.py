import logging

import pytest

from pensieve.errors import MalformedInput
from pensieve.lab.workload.formats import load
from tests.workload.dry import lines

GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [7]}'
BAD = {
    "no JSON": "{timestamp",
    "no object": "[1, 2]",
    "a field lacks": '{"timestamp": 0, "input_length": 5, "hash_ids": [7]}',
    "a text for a number": '{"timestamp": 0, "input_length": "many", "output_length": 2, "hash_ids": [7]}',
    "nothing asked": '{"timestamp": 0, "input_length": 0, "output_length": 2, "hash_ids": []}',
    "a fraction": '{"timestamp": 0, "input_length": 5.5, "output_length": 2, "hash_ids": [7]}',
    "not finite": '{"timestamp": NaN, "input_length": 5, "output_length": 2, "hash_ids": [7]}',
    "too few hashes": '{"timestamp": 0, "input_length": 513, "output_length": 2, "hash_ids": [7]}',
    "no list": '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": 7}',
    "a hash beyond 64 bits": '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [9223372036854775808]}',
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD.keys())
def test_a_malformed_line_is_fatal_with_file_line_and_reason(tmp_path, line):
    path = lines(tmp_path / "trace.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(MalformedInput, match=r"trace\.jsonl:3: .+; correct it, or set workload\.on_malformed=skip"):
        load(path, "mooncake")


def test_skipped_lines_are_counted_warned_about_and_kept_as_examples(tmp_path, caplog):
    path = lines(tmp_path / "trace.jsonl", GOOD, *BAD.values(), GOOD)
    with caplog.at_level(logging.WARNING):
        recording = load(path, "mooncake", "skip")
    assert recording.requests == 2
    assert recording.malformed == len(BAD)
    assert len(recording.examples) == len(caplog.records) == 5
    assert recording.examples[0].startswith(f"{path}:2: it is no JSON")
    assert "output_length: Field required" in recording.examples[2]


def test_a_csv_of_another_format_and_a_row_of_the_wrong_width(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(MalformedInput, match=r"trace\.csv:2: TIMESTAMP: Field required"):
        load(path, "azure")
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,3,4\n2023-11-16 18:15:47,3\n")
    with pytest.raises(MalformedInput, match=r"trace\.csv:3: GeneratedTokens"):
        load(path, "azure")
    assert load(path, "azure", "skip").malformed == 1
