"""What a request may ask: refused in one sentence where it makes no sense, whoever makes it."""

from array import array

import numpy as np
import pytest

from pensieve.core.request import Forced, Free, Length, Request, Sampling, tokens_of
from pensieve.errors import ConfigError
from pensieve.serve.record import TurnRecord

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [2**31, 2**70, -1, -(2**70), 97, True, np.True_, 1.0, np.float32(1), "1", None, [1]])
def test_a_prompt_outside_the_vocabulary_is_refused_by_its_name(value):
    with pytest.raises(ConfigError, match=r"\[0, 97\), the model's vocabulary"):
        tokens_of([5, value, 6], vocab=97)


@pytest.mark.parametrize(
    "values",
    [[0, 96], (0, 96), np.array([0, 96]), np.array([0, 96], dtype=np.uint64), array("q", [0, 96]), iter([0, 96])],
)
def test_whole_numbers_of_any_kind_are_token_ids(values):
    tokens = tokens_of(values, vocab=97)
    assert (tokens.typecode, list(tokens)) == ("i", [0, 96])


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": value} for value in (NAN, INF, -INF, -0.5, 1e-310, 10**400, True, "1", None, 1j)),
        *({"top_p": value} for value in (NAN, 0, 0.0, -0.1, 1.0001, INF, True, "1", None)),
        *({"top_k": value} for value in (-1, -(10**50), 1.0, NAN, True, "1", None)),
        *({"seed": value} for value in (10**50, 2**63, -(2**63) - 1, 1.0, NAN, True, "1", None)),
    ],
)
def test_sampling_that_makes_no_sense(fields):
    [(name, _)] = fields.items()
    with pytest.raises(ConfigError, match=name):
        Sampling(**fields)


def test_numbers_of_numpy_become_pythons():
    sampling = Sampling(np.float32(0.5), np.float64(1), np.int32(3), np.int64(-7))
    assert sampling == Sampling(0.5, 1.0, 3, -7)
    assert [type(value) for value in (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)] == [
        float, float, int, int,
    ]  # fmt: skip
    length = Length(np.int64(2**63 - 1)).tokens
    assert length + 1 == 2**63, "no overflow into a negative length"
    assert Sampling(top_k=2**62).top_k < 2**31, "more than any vocabulary is no limit"


@pytest.mark.parametrize("value", [0, -1, 1.0, NAN, INF, True, "4", None])
@pytest.mark.parametrize("output", [Length, Free])
def test_an_output_length_is_a_whole_number_of_at_least_one(output, value):
    with pytest.raises(ConfigError, match="max_new_tokens"):
        output(value)
    with pytest.raises(ConfigError, match="forced"):
        Forced(tokens_of([]))


@pytest.mark.parametrize("stop", [("",), ("a", ""), (b"x",), (1,), ("\ud800",)])
def test_a_stop_string_that_is_none(stop):
    with pytest.raises(ConfigError, match=r"[Ss]top string"):
        Free(4, stop)


@pytest.mark.parametrize("session", [7, None, b"a", ["a"], "\ud800"])
def test_a_conversation_has_a_name(session):
    with pytest.raises(ConfigError, match="session_id"):
        Request(1, session, 1, tokens_of([1]), Length(1))


@pytest.mark.parametrize(
    ("status", "tokens", "stands"),
    [
        ("completed", 3, True), ("timeout", 3, True), ("cancelled", 1, True),
        ("timeout", 0, False), ("cancelled", 0, False), ("failed", 3, False), ("refused", 0, False),
    ],
)  # fmt: skip
def test_a_turn_stands_with_what_it_generated(status, tokens, stands):
    assert TurnRecord("a", 1, status=status, token_ids=tokens_of([5] * tokens)).stands is stands
