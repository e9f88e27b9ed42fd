"""Whether a server's memory stays as it is: `python runners/bench.py target=steady bench.sessions=200 bench.minutes=5`

Conversations over HTTP with a real server process, each of some turns with pauses between them, then deleted and begun anew,
so that what is held is the same at any time. The first minute fills caches and pools, and three times in it all speak at
once: memory has then been what that many conversations can ever need, by whatever chance they meet. After it nothing may
grow beyond the interval of its slope: resident memory, nor what of it is in use, objects of Python and bytes of the C
library. What is in use tells a leak that still finds room in pages that were needed before; resident memory that grows
without it is fragmentation.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from scipy import stats

from pensieve.lab.bench.live_server import LiveServer, live_server, load_average
from pensieve.lab.statistics import CONFIDENCE

WARM_UP_S = 60.0
STRETCHES = 8
HELD = {"pensieve_python_blocks": "objects of Python", "pensieve_malloc_bytes": "bytes of the C library in use"}
_EVERY_S, _HELD_EVERY_S = 0.5, 2.0
_TURNS, _PROMPT, _OUTPUT = 5, 40, 8  # of a conversation; characters; tokens
_PAUSE_S = 4.0  # on average, exponential
_TOGETHER_S = (20.0, 35.0, 50.0)  # moments at which whoever pauses speaks
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """at_s, bytes: resident memory over time. held_at_s, held: what /metrics says is held, over time. statuses: of all
    requests."""

    at_s: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    held_at_s: list[float] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HELD})
    statuses: Counter[int] = field(default_factory=Counter)


def slope(at_s: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Change a second by least squares over the means of STRETCHES stretches, with its interval (Student's t). One sample is
    close to the one before it; the means of half a minute each are not, beyond what the slope explains."""
    x, y = _means(at_s), _means(values)
    x, y = x - x.mean(), y - y.mean()
    estimate = float(x @ y / (x @ x))
    left = y - estimate * x
    error = float(np.sqrt(left @ left / (STRETCHES - 2) / (x @ x)))
    width = float(stats.t.ppf((1 + CONFIDENCE) / 2, df=STRETCHES - 2)) * error
    return estimate, estimate - width, estimate + width


def _means(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray([part.mean() for part in np.array_split(np.asarray(values, dtype=float), STRETCHES)])


def steady(
    config: Mapping[str, Any], sessions: int, minutes: int, seed: int, say: Callable[[str], None] = print
) -> int:
    """Exit status: 1 where memory grows, or a request was answered with anything but 200."""
    with live_server(config) as server:
        before = load_average()
        seen = asyncio.run(_drive(server, sessions, 60.0 * minutes, seed))
    say(
        f"{sessions} sessions for {minutes} minutes: {seen.statuses.total()} requests, statuses {dict(seen.statuses)}; "
        f"the machine's load {before} before, {load_average()} after."
    )
    after = next(i for i, at_s in enumerate(seen.at_s) if at_s >= WARM_UP_S)
    grows = [_growth("kB of resident memory", seen.at_s, [value / 1e3 for value in seen.bytes])]
    grows += [_growth(what, seen.held_at_s, seen.held[name]) for name, what in HELD.items() if seen.held[name]]
    say(
        f"Resident memory {seen.bytes[0] / 1e6:.1f} MB at the start, {seen.bytes[after] / 1e6:.1f} after a minute, "
        f"{seen.bytes[-1] / 1e6:.1f} at the end. A minute, after the first one: {'; '.join(map(str, grows))}."
    )
    say(f"Its mean in each minute, MB: {', '.join(f'{mean / 1e6:.2f}' for mean in _by_minute(seen))}.")
    return int(any(growth.low > 0 for growth in grows) or set(seen.statuses) != {200})


def _by_minute(seen: Seen) -> list[float]:
    minutes: dict[int, list[int]] = {}
    for at_s, resident in zip(seen.at_s, seen.bytes, strict=True):
        minutes.setdefault(int(at_s // 60), []).append(resident)
    return [sum(values) / len(values) for values in minutes.values() if len(values) * _EVERY_S > 30]


@dataclass(frozen=True, slots=True)
class _Growth:
    """A minute, with its interval. level: the mean."""

    what: str
    estimate: float
    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.estimate:+,.1f} [{self.low:+,.1f}, {self.high:+,.1f}] {self.what} (of {self.level:,.0f})"


def _growth(what: str, at_s: Sequence[float], values: Sequence[float]) -> _Growth:
    late = [(at, value) for at, value in zip(at_s, values, strict=True) if at >= WARM_UP_S]
    estimate, low, high = slope([at for at, _ in late], [value for _, value in late])
    return _Growth(what, 60 * estimate, 60 * low, 60 * high, sum(value for _, value in late) / len(late))


async def _drive(server: LiveServer, sessions: int, seconds: float, seed: int) -> Seen:
    seen, began = Seen(), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def watch() -> None:
        while True:
            seen.at_s.append(time.monotonic() - began)
            seen.bytes.append(server.resident_bytes())
            await asyncio.sleep(_EVERY_S)

    async def ask_what_is_held() -> None:
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            told = dict(line.rsplit(" ", 1) for line in lines if line.startswith(tuple(HELD)))
            seen.held_at_s.append(time.monotonic() - began)
            for name, value in told.items():
                seen.held[name].append(float(value))
            await asyncio.sleep(_HELD_EVERY_S)

    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, limits=limits) as client:
        watching = [asyncio.ensure_future(one) for one in (watch(), ask_what_is_held())]
        ends = began + seconds
        await asyncio.gather(*(_talk(client, number, began, ends, seen, seed) for number in range(sessions)))
        for one in watching:
            one.cancel()
    return seen


async def _talk(client: httpx.AsyncClient, number: int, began: float, ends: float, seen: Seen, seed: int) -> None:
    rng, conversation = random.Random(f"{seed}/{number}"), 0
    await asyncio.sleep(rng.uniform(0, _PAUSE_S))
    while time.monotonic() < ends:
        conversation += 1
        name = f"steady-{number}-{conversation}"
        for _ in range(_TURNS):
            said = "".join(rng.choices("abcdefghij ", k=_PROMPT))
            body = {
                "messages": [{"role": "user", "content": said}],
                "max_tokens": _OUTPUT,
                "stream": rng.random() < 0.5,
                "session_id": name,
            }
            reply = await client.post("/v1/chat/completions", json=body)
            seen.statuses[reply.status_code] += 1
            await asyncio.sleep(_pause_s(rng, time.monotonic() - began))
            if time.monotonic() >= ends:
                break
        seen.statuses[(await client.delete(f"/v1/sessions/{name}")).status_code] += 1


def _pause_s(rng: random.Random, at_s: float) -> float:
    together_s = next((moment - at_s for moment in _TOGETHER_S if at_s < moment), math.inf)
    return min(rng.expovariate(1 / _PAUSE_S), together_s)
