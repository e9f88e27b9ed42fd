"""What a model of time makes of a load: how much of it saturates a machine."""

import pytest

from pensieve.lab.compose.build import stateless_capacity


class Cost:
    """An iteration takes a millisecond for each position that it computes, and 10 ms."""

    def iteration_s(self, runs, sampled):
        return 0.01 + 0.001 * sum(stop - start for start, stop in runs)


HELD = (10 * (10 + 5) + 100 * (10 + 50)) / 110
"""The long reply holds its KV ten times as long: (1 x 15 + 10 x 60) tokens x iterations over 11 iterations."""


@pytest.mark.parametrize(
    ("lengths", "bounds", "expected"),
    [
        ([(90, 10)], {"kv_tokens": 950}, 1 / 0.11),  # 10 of 90 + 10 / 2 tokens fit; 10 decodes, 90 positions, one ends
        ([(90, 10)] * 7, {"kv_tokens": 950}, 1 / 0.11),  # means, however many they are of
        ([(90, 10)], {"requests": 10}, 1 / 0.11),
        ([(90, 10)], {"positions": 100}, 1 / 0.11),
        ([(9, 10)], {"requests": 10}, 1 / 0.029),  # history that need not be computed
        ([(10, 10), (10, 100)], {"kv_tokens": round(6 * HELD)}, 6 * 2 / 110 / (0.01 + 0.001 * (6 + round(6 * 20 / 110)))),
    ],
)  # fmt: skip
def test_what_bounds_the_batch_bounds_the_capacity(lengths, bounds, expected):
    free = {"kv_tokens": 10**6, "requests": 10**6, "positions": 10**6}
    assert stateless_capacity(Cost(), lengths, **(free | bounds)) == pytest.approx(expected)
