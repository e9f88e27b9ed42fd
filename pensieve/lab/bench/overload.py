"""A server that is asked five times as much as it can do: `python runners/bench.py target=overload`

How much it can do is measured first, by clients that each wait for their reply. Then requests come at random times, five
times as often, whatever becomes of them: those beyond the queue have to be turned away with 429 and Retry-After, and nothing
else may happen to them. Afterwards the same clients as before have to be served as fast as before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pensieve.lab.bench.live_server import LiveServer, live_server, load_average

TIMES = 5.0
AS_FAST = 0.6  # of the rate before; a machine that others use varies by as much
_CLIENTS, _QUEUE, _OUTPUT = 8, 32, 32
_PHASE_S = 20.0
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Outcome:
    """statuses: of all requests of a phase. unsaid: 429 without Retry-After. rate: served in a second."""

    statuses: Counter[int] = field(default_factory=Counter)
    unsaid: int = 0
    rate: float = 0.0


def overload(
    config: Mapping[str, Any], seed: int, say: Callable[[str], None] = print, phase_s: float = _PHASE_S
) -> int:
    """Exit status: 0 where it sheds and recovers."""
    with live_server(config, [f"serve.max_queue={_QUEUE}"]) as server:
        say(f"The machine's load: {load_average()}.")
        before, during, after = asyncio.run(_phases(server, seed, phase_s, say))
    served, shed = during.statuses[200], during.statuses[429]
    say(f"{_CLIENTS} clients before: {before.rate:.1f} a second, statuses {dict(before.statuses)}")
    say(f"{TIMES:g} times as many requests: {served} served ({during.rate:.1f} a second), {shed} shed with 429,")
    say(f"  {during.unsaid} of them without Retry-After; statuses {dict(during.statuses)}")
    say(f"{_CLIENTS} clients after: {after.rate:.1f} a second, statuses {dict(after.statuses)}")
    sheds = shed > 0 and served > 0 and set(during.statuses) <= {200, 429} and not during.unsaid
    recovers = set(before.statuses) == set(after.statuses) == {200} and after.rate >= AS_FAST * before.rate
    return int(not (sheds and recovers))


async def _phases(
    server: LiveServer, seed: int, phase_s: float, say: Callable[[str], None]
) -> tuple[Outcome, Outcome, Outcome]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, limits=limits) as client:
        await _closed(client, phase_s / 4)  # warm
        before = await _closed(client, phase_s)
        during = await _open(client, TIMES * before.rate, phase_s, random.Random(seed))
        after = await _closed(client, phase_s)
    return before, during, after


async def _ask(client: httpx.AsyncClient, outcome: Outcome) -> None:
    body = {"prompt": "a question of some words", "max_tokens": _OUTPUT, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    outcome.statuses[reply.status_code] += 1
    outcome.unsaid += reply.status_code == 429 and "Retry-After" not in reply.headers


async def _closed(client: httpx.AsyncClient, seconds: float) -> Outcome:
    """Each client asks again when it has its reply."""
    outcome, began = Outcome(), time.monotonic()

    async def one() -> None:
        while time.monotonic() < began + seconds:
            await _ask(client, outcome)

    await asyncio.gather(*(one() for _ in range(_CLIENTS)))
    outcome.rate = outcome.statuses[200] / (time.monotonic() - began)
    return outcome


async def _open(client: httpx.AsyncClient, rate: float, seconds: float, rng: random.Random) -> Outcome:
    """Requests at random times, `rate` of them in a second."""
    outcome, began = Outcome(), time.monotonic()
    asked, due = [], began
    while (due := due + rng.expovariate(rate)) < began + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        asked.append(asyncio.ensure_future(_ask(client, outcome)))
    await asyncio.gather(*asked)
    outcome.rate = outcome.statuses[200] / (time.monotonic() - began)
    return outcome
