import pytest

from pensieve.sim.cost import Batches, stateless_capacity


class Cost:
    """An iteration takes a millisecond for each position that it computes, and 10 ms."""

    def iteration_s(self, runs, sampled):
        return 0.01 + 0.001 * sum(stop - start for start, stop in runs)


def capacity(lengths, kv_tokens=1_000_000, requests=1_000_000, positions=1_000_000):
    return stateless_capacity(Cost(), lengths, Batches(kv_tokens, requests, positions))


def test_memory_bounds_the_batch():
    """10 requests of 90 + 10 / 2 tokens fit; an iteration decodes 10 tokens, prefills 90 positions, and one of them ends."""
    assert capacity([(90, 10)], kv_tokens=950) == pytest.approx(1 / 0.11)
    assert capacity([(90, 10)] * 7, kv_tokens=950) == pytest.approx(1 / 0.11)  # means, however many they are of


def test_the_batch_is_bounded_by_requests_and_by_positions_too():
    assert capacity([(90, 10)], requests=10) == pytest.approx(1 / 0.11)
    assert capacity([(90, 10)], positions=100) == pytest.approx(1 / 0.11)


def test_a_history_that_need_not_be_computed_would_raise_it():
    assert capacity([(9, 10)], requests=10) == pytest.approx(1 / 0.029)


def test_long_replies_weigh_in_what_a_request_holds():
    """The long reply holds its KV ten times as long: (1 x 15 + 10 x 60) tokens x iterations over 11 iterations."""
    held = (10 * (10 + 5) + 100 * (10 + 50)) / 110
    running = 6
    expected = running * 2 / 110 / (0.01 + 0.001 * (running + round(running * 20 / 110)))
    assert capacity([(10, 10), (10, 100)], kv_tokens=round(running * held)) == pytest.approx(expected)
