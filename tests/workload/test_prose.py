from pensieve.lab.workload.prose import prose, vocabulary
from tests.scripted import context


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
