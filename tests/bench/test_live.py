"""Benchmarks of a served model, without their server: what they make of what they saw."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hydra import compose

from pensieve.errors import ConfigError
from pensieve.lab.bench import overload as overload_module
from pensieve.lab.bench import run_target
from pensieve.lab.bench import steady as steady_module
from pensieve.lab.bench import wire as wire_module
from pensieve.lab.bench.live_server import hardware_overrides
from pensieve.lab.bench.overload import Outcome, overload
from pensieve.lab.bench.steady import Seen, slope, steady
from pensieve.lab.bench.wire import Timed, wire
from pensieve.lab.compose import resolved
from tests.composed import hydra_session

EVERY_S, SAMPLES = 0.5, 480


def wandering(rng: np.random.Generator) -> Any:
    """Resident memory that goes nowhere, each sample close to the one before."""
    noise, value = np.empty(SAMPLES), 0.0
    for i in range(SAMPLES):
        value = 0.9 * value + rng.normal(0, 1e5)
        noise[i] = value
    return 2e8 + noise


def test_an_interval_of_a_slope_holds_the_truth_though_samples_follow_each_other() -> None:
    at_s, rng = np.arange(SAMPLES) * EVERY_S, np.random.default_rng(0)
    holds, naive = 0, 0
    for _ in range(200):
        values = wandering(rng) + 1e3 * at_s
        estimate, low, high = slope(list(at_s), list(values))
        assert low < estimate < high
        holds += low <= 1e3 <= high
        x = at_s - at_s.mean()
        plain = np.sqrt((values - values.mean() - estimate * x).var() / (x @ x))
        naive += abs(estimate - 1e3) < 1.96 * plain
    assert holds >= 180, "of 200, as an interval of 95 % should"
    assert naive < 140, "errors taken for independent would be trusted far too much"


def test_a_leak_is_told_from_noise_and_nothing_from_nothing() -> None:
    at_s, rng = np.arange(SAMPLES) * EVERY_S, np.random.default_rng(1)
    leaking = wandering(rng) + 2e4 * at_s  # 1.2 MB a minute
    assert slope(list(at_s), list(leaking))[1] > 0
    assert slope(list(at_s), [5.0] * SAMPLES) == (0.0, 0.0, 0.0)
    falling = wandering(rng) - 2e4 * at_s
    assert slope(list(at_s), list(falling))[2] < 0


@contextmanager
def no_server(*_: Any) -> Any:
    yield None


@pytest.mark.parametrize(
    ("growth", "leak", "statuses", "status"),
    [(0.0, 0.0, {200: 9}, 0), (2e4, 0.0, {200: 9}, 1), (0.0, 2e4, {200: 9}, 1), (0.0, 0.0, {200: 8, 503: 1}, 1)],
)
def test_memory_that_grows_or_a_reply_that_fails_is_the_status(
    growth: float, leak: float, statuses: dict[int, int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_s = np.arange(600) * EVERY_S
    values = np.concatenate([np.linspace(1e8, 2e8, 120), wandering(np.random.default_rng(2)) + growth * at_s[120:]])

    used = np.concatenate(
        [values[:120], wandering(np.random.default_rng(3)) + leak * at_s[120:]]
    )  # a leak that finds room in pages that are there

    async def drive(*_: Any) -> Seen:
        held = {"pensieve_python_blocks": [5.0] * len(at_s), "pensieve_malloc_bytes": list(used)}
        return Seen(list(at_s), [int(value) for value in values], list(at_s), held, Counter(statuses))

    monkeypatch.setattr(steady_module, "live_server", no_server)
    monkeypatch.setattr(steady_module, "_drive", drive)
    said: list[str] = []
    assert steady({}, 200, 5, 0, said.append) == status
    assert "9 requests" in said[0] and "kB of resident memory" in said[1], said


@pytest.mark.parametrize(("over_ms", "status"), [(2.0, 0), (5.0, 1)])
def test_the_price_of_http_is_what_a_client_waited_beyond_the_engine(
    over_ms: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)

    def timed(stream: bool) -> Timed:
        first, rest, extra = rng.uniform(10, 500), rng.uniform(20, 40), rng.uniform(-0.2, 0.2)
        over = over_ms + extra
        return Timed(first + over if stream else None, first + rest + over + stream, first, first + rest)

    def measure(_: Any, rounds: int, __: int) -> Any:
        return [timed(True) for _ in range(rounds)], [timed(False) for _ in range(rounds)], 4.0

    monkeypatch.setattr(wire_module, "live_server", no_server)
    monkeypatch.setattr(wire_module, "measure", measure)
    said: list[str] = []
    assert wire({}, 100, 0, said.append) == status
    assert f": {over_ms:.1f}"[:3] in said[1], "though the engine took 10 to 500 ms"
    by_round = next(line for line in said if "by round" in line)
    assert 0.9 < float(by_round.split(": ")[1].split(" ")[0]) < 1.1


@pytest.mark.parametrize(
    ("during", "after_rate", "status"),
    [
        (Outcome(Counter({200: 50, 429: 200}), 0, 10.0), 9.0, 0),
        (Outcome(Counter({200: 250}), 0, 10.0), 9.0, 1),
        (Outcome(Counter({200: 50, 429: 199, 500: 1}), 0, 10.0), 9.0, 1),
        (Outcome(Counter({200: 50, 429: 200}), 3, 10.0), 9.0, 1),
        (Outcome(Counter({200: 50, 429: 200}), 0, 10.0), 2.0, 1),
    ],
)
def test_who_does_not_shed_or_does_not_recover_is_told(
    during: Outcome, after_rate: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def phases(*_: Any) -> Any:
        return Outcome(Counter({200: 99}), 0, 10.0), during, Outcome(Counter({200: 99}), 0, after_rate)

    monkeypatch.setattr(overload_module, "live_server", no_server)
    monkeypatch.setattr(overload_module, "_phases", phases)
    assert overload({}, 0, lambda _: None) == status


def test_requests_come_as_often_as_they_should_whatever_becomes_of_them() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        arrived.append(request)
        return httpx.Response(429, headers={"Retry-After": "1"} if len(arrived) % 2 else {})

    async def run() -> Outcome:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(reply)) as client:
            return await overload_module._open(client, 200.0, 0.5, random.Random(0))

    arrived: list[httpx.Request] = []
    outcome = asyncio.run(run())
    rng, due, expected = random.Random(0), 0.0, -1
    while due < 0.5:
        due, expected = due + rng.expovariate(200.0), expected + 1
    assert abs(len(arrived) - expected) <= 1 and outcome.statuses == {429: len(arrived)}
    assert outcome.unsaid == len(arrived) // 2


@pytest.mark.parametrize("field", ["sessions", "minutes"])
def test_what_is_no_number_is_refused_before_a_server_is_started(field: str) -> None:
    bench = {"turns": 300, "sessions": 200, "minutes": 5, "seed": 0, "repeats": None, field: 0}
    with pytest.raises(ConfigError, match=f"bench.{field}"):
        run_target({"target": "steady", "bench": bench}, {})


@pytest.mark.parametrize(
    "typed",
    [
        ("hardware=cpu", "hardware.threads=2", "hardware.cpu_memory='4 GiB'", "hardware.depth=1"),
        ("hardware=sim_rtx4090", "hardware.h2d_bw=1e9", "+hardware.failure_s=30", "hardware.gpus=2"),
    ],
)
def test_the_server_gets_the_machine_that_was_asked_for(typed: tuple[str, ...]) -> None:
    with hydra_session():
        asked = resolved(compose("bench", [*typed]))["hardware"]
        plain = resolved(compose("serve", [typed[0]]))["hardware"]
        found = resolved(compose("serve", hardware_overrides(asked)))["hardware"]
    assert found == asked != plain
