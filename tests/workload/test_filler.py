import hashlib
from array import array

import pytest

from pensieve.lab.workload.fit import filler


@pytest.mark.parametrize("vocab", [2, 97, 256, 259, 32_000, 65_536, 128_256])
def test_ids_lie_in_the_vocabulary_and_use_most_of_it(vocab):
    tokens = filler(20_000, vocab, 0, "a")
    assert isinstance(tokens, array) and tokens.typecode == "i" and len(tokens) == 20_000
    assert min(tokens) >= 0 and max(tokens) < vocab
    assert len(set(tokens)) > min(vocab, 10_000) // 4


def test_names_decide_and_fewer_tokens_are_the_beginning_of_more():
    assert filler(50, 32_000, 0, "a") == filler(50, 32_000, 0, "a")
    assert filler(500, 32_000, 0, "a")[:50] == filler(50, 32_000, 0, "a")
    others = [filler(50, 32_000, *names) for names in ((0, "a"), (1, "a"), (0, "b"))]
    assert all(others[i] != others[j] for i in range(3) for j in range(i))
    assert filler(0, 97, "a") == array("i")


def test_ids_are_pairs_of_bytes_under_a_mask():
    """Drawn by hand: low byte first, of a digest of the names."""
    pairs = hashlib.shake_256(b"0/a").digest(2 * 300)
    by_hand = [(pairs[2 * i] + 256 * pairs[2 * i + 1]) % 16_384 for i in range(300)]
    assert list(filler(300, 32_000, 0, "a")) == by_hand
