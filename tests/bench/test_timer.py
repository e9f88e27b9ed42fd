from __future__ import annotations

import pytest
import torch

from pensieve.lab.bench import timer
from pensieve.lab.bench.timer import interleaved

CPU = torch.device("cpu")


class Stopped:
    """A clock that only `run` moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 3.0
        monkeypatch.setattr(timer, "perf_counter", lambda: self.now_s)

    def run(self, seconds: float) -> None:
        self.now_s += seconds


def test_rounds_alternate_and_each_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Stopped(monkeypatch), list[str]()

    def slow(name: str) -> None:
        calls.append(name)
        clock.run(0.002)

    times = interleaved({"a": lambda: slow("a"), "b": lambda: slow("b")}, 2, CPU, at_least_ms=0.0)
    assert calls == [*"aaabbb", "a", "b", "b", "a"]  # two warm calls and one to size each
    assert [len(t.values) for t in times.values()] == [2, 2]
    assert all(value == pytest.approx(2.0) for t in times.values() for value in t.values)


def test_short_runs_are_repeated_and_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Stopped(monkeypatch), [0]

    def short() -> None:
        calls[0] += 1
        clock.run(0.001)

    times = interleaved({"short": short}, 1, CPU, at_least_ms=10.0)["short"]
    assert calls[0] == 2 + 1 + 10, "two warm calls, one to size it, and as many as take 10 ms"
    assert times.values == [pytest.approx(1.0)]


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
