"""Pieces of a reply are its text, whatever its tokens are."""

from __future__ import annotations

import random

import pytest

from pensieve.serve.tokenizer import ByteTokenizer, TextStream, before_stop

decode = ByteTokenizer().decode


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_are_the_text_of_all_tokens(seed: int) -> None:
    """Random bytes are rarely UTF-8; text in many scripts is, and its characters take one to four tokens."""
    rng = random.Random(seed)
    text = "".join(rng.choice("a b\n£ßя日本🙂👩\u200d🚀") for _ in range(300))
    for ids in (list(text.encode()), [rng.randrange(320) for _ in range(500)]):
        stops = rng.choice([(), ("本🙂",), ("zz", "b\n")])
        stream = TextStream(decode, stops)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == before_stop(decode(ids), stops)


def test_a_character_is_not_handed_out_by_halves_and_the_start_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, ("END",))
    assert [stream.push(byte) for byte in "é".encode()] == ["", "é"]
    assert [stream.push(ord(c)) for c in "aENx"] == ["a", "", "", "ENx"]
    assert [stream.push(ord(c)) for c in "bENDc"] == ["b", "", "", "", ""]
    assert stream.finish() == ""
    assert stream.text == "éaENxb"


def test_most_text_is_handed_out_at_once() -> None:
    stream = TextStream(decode)
    assert all(
        stream.push(ord(c)) == c for c in "plain text of more than sixty-four characters, so that its front is cut" * 3
    )
