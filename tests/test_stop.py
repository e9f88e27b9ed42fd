"""Stop strings found token by token, at the very token where decoding everything anew would find them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from pensieve.serve.tokenizer import ByteTokenizer, HubTokenizer, StopSearch, before_stop

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
    search = StopSearch(tokenizer.decode, stops)
    return next((n for n, token in enumerate(ids, start=1) if search.push(token)), None)


IDS = st.lists(st.one_of(st.sampled_from([*"abc🙂 é".encode(), 300]), st.integers(0, 299)), max_size=120)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ids=IDS, stops=st.lists(st.text("abc🙂é ", min_size=1, max_size=4), min_size=1, max_size=2))
def test_bytes_as_if_decoded_anew(ids, stops):
    assert found(ByteTokenizer(), ids, stops) == first_hit(ByteTokenizer(), ids, stops)


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
    tokenizer, decoded = ByteTokenizer(), []

    def decode(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    search = StopSearch(decode, ["</s>"])
    for token in unit * 800:
        assert not search.push(token)
    assert max(decoded) < 64
    assert sum(decoded) / (800 * len(unit)) < 64


def test_the_reply_ends_before_the_first_stop_string():
    assert before_stop("one END two STOP", ["STOP", "END"]) == "one "
    assert before_stop("one", ["END"]) == "one"
