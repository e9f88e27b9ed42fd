from __future__ import annotations

import time

import torch

from pensieve.bench.timer import interleaved

CPU = torch.device("cpu")


def test_rounds_alternate_and_each_begins_with_another() -> None:
    calls: list[str] = []

    def slow(name: str) -> None:
        calls.append(name)
        time.sleep(0.002)

    times = interleaved({"a": lambda: slow("a"), "b": lambda: slow("b")}, 2, CPU, at_least_ms=0.0)
    assert calls[6:] == ["a", "b", "b", "a"]  # after two warm calls and one to size each
    assert [len(t.values) for t in times.values()] == [2, 2]
    assert all(value >= 2.0 for t in times.values() for value in t.values)


def test_short_runs_are_repeated_and_divided() -> None:
    calls = [0]

    def short() -> None:
        calls[0] += 1
        time.sleep(0.001)

    times = interleaved({"short": short}, 1, CPU, at_least_ms=10.0)["short"]
    assert 5 <= calls[0] <= 13
    assert 1.0 <= times.values[0] < 10.0


def test_a_backend_that_raises_costs_only_itself() -> None:
    state = [0]

    def late() -> None:
        state[0] += 1
        if state[0] > 4:
            raise ValueError("no more\nsecond line")

    def never() -> None:
        raise NotImplementedError

    times = interleaved({"late": late, "never": never, "fine": lambda: None}, 3, CPU, at_least_ms=0.0)
    assert times["late"].error == "ValueError: no more" and times["late"].values == ()
    assert times["never"].error == "NotImplementedError"
    assert len(times["fine"].values) == 3
