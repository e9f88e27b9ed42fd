"""What is drawn by name alone: numbers, words of the shipped conversations, token ids without a meaning."""

from array import array

import pytest

from pensieve.lab.workload.base import between, exponential, part_of, shuffled, uniform
from pensieve.lab.workload.exact import prose
from pensieve.lab.workload.fit import filler
from tests.scripted import context


def test_draws_are_what_they_were_when_trials_were_recorded():
    """A function of the seed and the names: in every process, whatever was drawn before."""
    assert uniform(3, "think", "bread", 2) == 0.18102052427542858
    assert exponential(2.0, 0, "x") == pytest.approx(2.186199531632759, rel=1e-12) and exponential(0.0, 0, "x") == 0.0
    assert (between(2, 40, 0, "x"), shuffled(6, 0, "x")) == (27, [4, 2, 1, 5, 0, 3])
    assert [part_of(f"mooncake-{number}", 2) for number in range(3)] == [1, 2, 1]
    assert bytes(list(prose(context(3), 40, "a", 1))) == b"overnight lucena lies empty brightest bu"
    assert list(filler(6, 32_000, 0, "a")) == [12447, 8872, 16372, 12906, 16232, 4308]
    assert list(filler(6, 97, 0, "a")) == [31, 48, 40, 34, 52, 63], "a byte each"


def test_prose_has_exactly_the_length_and_may_begin_unlike_another():
    assert [len(prose(context(), tokens, "a")) for tokens in (1, 7, 512)] == [1, 7, 512]
    first = prose(context(), 8, "first")
    assert all(prose(context(), 8, "other", n, unlike=first)[0] != first[0] for n in range(200))
    assert any(prose(context(), 8, "other", n)[0] == first[0] for n in range(200))


@pytest.mark.parametrize("vocab", [2, 97, 256, 259, 32_000, 65_536, 128_256])
def test_ids_lie_in_the_vocabulary_and_fewer_are_the_beginning_of_more(vocab):
    tokens = filler(20_000, vocab, 0, "a")
    assert isinstance(tokens, array) and tokens.typecode == "i" and len(tokens) == 20_000
    assert min(tokens) >= 0 and max(tokens) < vocab
    assert len(set(tokens)) > min(vocab, 10_000) // 4
    assert filler(50, vocab, 0, "a") == tokens[:50] and filler(0, vocab, "a") == array("i")
