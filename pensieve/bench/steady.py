"""Whether a server's memory stays as it is: `python runners/bench.py target=steady bench.sessions=200 bench.minutes=5`

Conversations over HTTP with a real server process, each of some turns with pauses between them, then deleted and begun anew,
so that what is held is the same at any time. The first minute fills caches and pools; after it the resident memory's slope
has to be zero within its interval.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from scipy import stats

from pensieve.bench.live_server import LiveServer, live_server, load_average
from pensieve.statistics import CONFIDENCE

WARM_UP_S = 60.0
STRETCHES = 8
_EVERY_S = 0.5
_TURNS, _PROMPT, _OUTPUT = 5, 40, 8  # of a conversation; characters; tokens
_PAUSE_S = 4.0  # on average, exponential
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """at_s, bytes: resident memory over time. statuses: of all requests."""

    at_s: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
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
    late = [i for i, at_s in enumerate(seen.at_s) if at_s >= WARM_UP_S]
    grows, low, high = (
        value * 60 / 1e3 for value in slope([seen.at_s[i] for i in late], [seen.bytes[i] for i in late])
    )
    say(
        f"Resident memory {seen.bytes[0] / 1e6:.1f} MB at the start, {seen.bytes[late[0]] / 1e6:.1f} after a minute, "
        f"{seen.bytes[-1] / 1e6:.1f} at the end; after the first minute {grows:+.1f} kB a minute [{low:+.1f}, {high:+.1f}]."
    )
    return int(low > 0 or set(seen.statuses) != {200})


async def _drive(server: LiveServer, sessions: int, seconds: float, seed: int) -> Seen:
    seen, began = Seen(), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def watch() -> None:
        while True:
            seen.at_s.append(time.monotonic() - began)
            seen.bytes.append(server.resident_bytes())
            await asyncio.sleep(_EVERY_S)

    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, limits=limits) as client:
        watching = asyncio.ensure_future(watch())
        ends = began + seconds
        await asyncio.gather(*(_talk(client, number, ends, seen, seed) for number in range(sessions)))
        watching.cancel()
    return seen


async def _talk(client: httpx.AsyncClient, number: int, ends: float, seen: Seen, seed: int) -> None:
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
            await asyncio.sleep(rng.expovariate(1 / _PAUSE_S))
            if time.monotonic() >= ends:
                break
        seen.statuses[(await client.delete(f"/v1/sessions/{name}")).status_code] += 1
