"""Text to token ids and back; stop strings at the very token where decoding everything anew would find them; and pieces of a
reply, which are its text."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from pensieve.errors import WeightsMissing
from pensieve.serve.tokenizer import ByteTokenizer, HubTokenizer, TextStream, before_stop

BYTES = ByteTokenizer()


def test_bytes_come_back_and_any_ids_decode():
    text = "Grüße, 世界"
    assert BYTES.encode(text) == list(text.encode()) and BYTES.decode(BYTES.encode(text)) == text
    assert (BYTES.decode([0xC3]), BYTES.decode([72, 257, 105, 319])) == ("\ufffd", "Hi")


def test_a_folders_tokenizer_and_what_ends_a_sequence_beside_it(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsMissing, match="not a readable tokenizer"):
        HubTokenizer(tmp_path)
    backend = Backend(models.WordLevel({"hello": 0, "world": 1, "<end>": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HubTokenizer(tmp_path)
    assert (tokenizer.encode("hello world"), tokenizer.decode([1, 0, 2])) == ([0, 1], "world hello")
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (4, frozenset())
    config = {"eos_token": {"content": "<end>"}, "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = HubTokenizer(tmp_path, eos_ids=[1])
    assert tokenizer.eos_ids == {1, 2}
    assert (tokenizer.vocab_size, tokenizer.encode("[PAD]")) == (4, [3, 3, 3]), "the model has no row for a pad token"


TEXT = ["the cat sat on the mat, don't stop now", "中文 и кириллица 🙂🙃 naïve café", "a  b   c\n\nEND of it. </s> ##x"]


@cache
def hub(kind: str) -> HubTokenizer:
    """byte_level: as GPT-2 and Llama 3; pieces: as Llama 2, a space in front of words and bytes of what it does not know."""
    if kind == "byte_level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<end>"])
        backend.train_from_iterator(TEXT, trainer)
    else:
        words = ["▁", "▁the", "▁cat", "s", "a", "t", "▁sat", "▁mat", ",", "END", "▁END", "中", "."]
        vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
        vocab |= {word: 257 + index for index, word in enumerate(words)}
        backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens(["<end>"])
    with TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        return HubTokenizer(Path(folder))


def first_hit(tokenizer, ids, stops):
    """By decoding all of them anew at every token."""
    return next((n for n in range(1, len(ids) + 1) if any(stop in tokenizer.decode(ids[:n]) for stop in stops)), None)


def found(tokenizer, ids, stops):
    """By a stream, whose pieces are the text of all of them before the stop string. (Bytes that are no text may change what
    stands before them.)"""
    stream, pieces, asked = TextStream(tokenizer.decode, stops), [], iter(ids)
    while not stream.ended and (token := next(asked, None)) is not None:
        pieces.append(stream.push(token))
    said = tokenizer.decode(ids[: len(pieces)])
    if tokenizer is BYTES or "\ufffd" not in said:
        assert "".join(pieces) + stream.finish() == before_stop(said, stops)
    return len(pieces) if stream.ended else None


IDS = st.lists(st.one_of(st.sampled_from([*"abc🙂 é".encode(), 300]), st.integers(0, 299)), max_size=120)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ids=IDS, stops=st.lists(st.text("abc🙂é ", min_size=1, max_size=4), min_size=1, max_size=2))
def test_bytes_as_if_decoded_anew(ids, stops):
    assert found(BYTES, ids, stops) == first_hit(BYTES, ids, stops)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(kind=st.sampled_from(["byte_level", "pieces"]), seed=st.integers(0, 10**6), plain=st.booleans())
def test_a_models_own_tokenizer_as_if_decoded_anew(kind, seed, plain):
    """The stop string is part of what the tokens say, or would be had another one come; so most runs do end with a hit."""
    tokenizer, rng = hub(kind), random.Random(seed)
    known = range(257, tokenizer.vocab_size) if plain and kind == "pieces" else range(tokenizer.vocab_size)
    ids = [rng.choice(known) for _ in range(rng.randint(1, 120))]
    text = tokenizer.decode(ids)
    at = rng.randrange(max(1, len(text)))
    stop = text[at : at + rng.randint(1, 6)].replace("\ufffd", "") or "END"
    assert found(tokenizer, ids, [stop]) == first_hit(tokenizer, ids, [stop])


@pytest.mark.parametrize("unit", [b"word ", b"\x80", b"\xe4\xb8", "🙂".encode(), bytes([255])])
def test_what_is_decoded_a_token_does_not_grow_with_the_reply(unit):
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return BYTES.decode(ids)

    stream = TextStream(decode, ["</s>"])
    for token in unit * 800:
        stream.push(token)
    assert not stream.ended
    assert max(decoded) < 64
    assert sum(decoded) / (800 * len(unit)) < 64


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_are_the_text_of_all_tokens_before_the_first_stop_string(seed):
    """Random bytes are rarely UTF-8; text in many scripts is, and its characters take one to four tokens."""
    rng = random.Random(seed)
    text = "".join(rng.choice("a b\n£ßя日本🙂👩\u200d🚀") for _ in range(300))
    for ids in (list(text.encode()), [rng.randrange(320) for _ in range(500)]):
        stops = rng.choice([(), ("本🙂",), ("zz", "b\n")])
        stream = TextStream(BYTES.decode, stops)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == before_stop(BYTES.decode(ids), stops)
    assert before_stop("one END two STOP", ["STOP", "END"]) == "one "


def test_a_character_is_not_handed_out_by_halves_and_the_start_of_a_stop_string_is_held_back():
    stream = TextStream(BYTES.decode, ("END",))
    assert all(stream.push(ord(c)) == c for c in "plain text, so long that its front is cut " * 3)
    assert [stream.push(byte) for byte in "é".encode()] == ["", "é"]
    assert [stream.push(ord(c)) for c in "aENx"] == ["a", "", "", "ENx"]
    assert [stream.push(ord(c)) for c in "bENDc"] == ["b", "", "", "", ""]
    assert stream.finish() == "" and stream.ended


def test_a_character_of_several_bytes_behind_others_is_not_handed_out_by_halves():
    """The decoder shows each byte of a run that is no text yet as a replacement character, the whole ones before it too."""
    stream, ids = TextStream(hub("pieces").decode), [1 + byte for byte in "🙂中é".encode()]
    assert [piece for piece in map(stream.push, ids) if piece] == ["🙂", "中", "é"]
