"""What is drawn by name alone: numbers, words of the shipped conversations, token ids without a meaning."""

import hashlib
import subprocess
import sys
from array import array

import pytest

from pensieve.lab.workload.chance import between, exponential, part_of, shuffled, uniform
from pensieve.lab.workload.fit import filler
from pensieve.lab.workload.prose import prose, shipped, vocabulary
from tests.scripted import context


def test_draws_depend_on_seed_and_names_alone():
    assert uniform(0, "think", "a", 1) == uniform(0, "think", "a", 1)
    assert len({uniform(0, "a"), uniform(1, "a"), uniform(0, "b"), uniform(0, "a", 1)}) == 4


def test_draws_are_the_same_in_another_process():
    code = "from pensieve.lab.workload.chance import uniform; print(repr(uniform(3, 'think', 'bread', 2)))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert other.stdout.strip() == repr(uniform(3, "think", "bread", 2))


def test_a_part_is_by_the_first_byte_of_the_hash():
    assert part_of("mooncake-0", 2) == 1 + hashlib.sha256(b"mooncake-0").digest()[0] % 2
    halves = [part_of(f"mooncake-{number}", 2) for number in range(2000)]
    assert set(halves) == {1, 2} and 900 < halves.count(1) < 1100


def test_exponential_has_its_mean_and_is_memoryless():
    draws = [exponential(2.0, 0, index) for index in range(20_000)]
    assert abs(sum(draws) / len(draws) - 2.0) < 0.05
    assert abs(sum(draw > 2.0 for draw in draws) / len(draws) - 0.3679) < 0.01
    assert exponential(0.0, 0, "x") == 0.0


def test_between_reaches_both_ends_and_nothing_else():
    assert {between(2, 4, 0, index) for index in range(200)} == {2, 3, 4}


def test_shuffled_is_a_permutation_that_the_seed_changes():
    assert sorted(shuffled(12, 0, "x")) == list(range(12))
    assert shuffled(12, 0, "x") != shuffled(12, 1, "x")


def test_prose_has_exactly_the_length_and_is_a_function_of_seed_and_names():
    for tokens in (1, 7, 512):
        assert len(prose(context(), tokens, "a")) == tokens
    assert prose(context(), 99, "a", 1) == prose(context(), 99, "a", 1)
    assert prose(context(), 99, "a", 1) != prose(context(), 99, "a", 2)
    assert prose(context(), 99, "a", 1) != prose(context(1), 99, "a", 1)


def test_prose_is_words_of_the_vocabulary():
    words = bytes(list(prose(context(), 400, "x"))).decode().split(" ")
    assert set(words[:-1]) <= set(vocabulary())
    assert len(set(words)) > 40


def test_unlike_begins_with_another_token():
    first = prose(context(), 8, "first")
    assert all(prose(context(), 8, "other", n, unlike=first)[0] != first[0] for n in range(200))
    assert any(prose(context(), 8, "other", n)[0] == first[0] for n in range(200))


def test_the_shipped_conversations_are_distinct_english_with_replies_of_many_lengths():
    ids = [conversation.id for conversation in shipped()]
    assert len(set(ids)) == len(ids) >= 10
    assert all(name.isascii() and name.replace("-", "").isalnum() for name in ids), "they are names of sessions"
    assert all(len(conversation.turns) >= 10 for conversation in shipped())
    turns = [turn for conversation in shipped() for turn in conversation.turns]
    assert len({turn.user for turn in turns}) == len(turns)
    assert all(60 <= len(turn.user) <= 200 and turn.user == turn.user.strip() for turn in turns)
    assert {turn.user[-1] for turn in turns} <= set(".?!")
    words = {turn.reply_words for turn in turns}
    assert 20 <= min(words) < max(words) <= 120 and len(words) >= 8


@pytest.mark.parametrize("vocab", [2, 97, 256, 259, 32_000, 65_536, 128_256])
def test_ids_lie_in_the_vocabulary_and_use_most_of_it(vocab):
    tokens = filler(20_000, vocab, 0, "a")
    assert isinstance(tokens, array) and tokens.typecode == "i" and len(tokens) == 20_000
    assert min(tokens) >= 0 and max(tokens) < vocab
    assert len(set(tokens)) > min(vocab, 10_000) // 4


def test_fewer_tokens_are_the_beginning_of_more():
    assert filler(500, 32_000, 0, "a")[:50] == filler(50, 32_000, 0, "a")
    assert filler(0, 97, "a") == array("i")


def test_ids_are_pairs_of_bytes_under_a_mask():
    """Drawn by hand: low byte first, of a digest of the names."""
    pairs = hashlib.shake_256(b"0/a").digest(2 * 300)
    by_hand = [(pairs[2 * i] + 256 * pairs[2 * i + 1]) % 16_384 for i in range(300)]
    assert list(filler(300, 32_000, 0, "a")) == by_hand
    assert list(filler(300, 97, 0, "a")) == [byte % 64 for byte in hashlib.shake_256(b"0/a").digest(300)]
