"""What HTTP costs: `python runners/bench.py target=wire`

One client on a kept connection asks a real server process. A request's own record says how long the engine took from the
moment it was asked to the first token and to the last, so the price of HTTP is what the client waited beyond that, within the
same request: how fast the engine was then cancels out. Streamed and whole replies alternate in random order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from time import perf_counter
from typing import Any

from pensieve.lab.bench.case import Measured
from pensieve.lab.bench.live_server import LiveServer, live_server, load_average

GOAL_MS = 3.0
ROUNDS, _WARM_UP = 200, 10
PROMPT, OUTPUT = 64, 16  # tokens
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of one request: what the client waited for the first token (None: not streamed) and in all, and what the
    engine says it took."""

    first_ms: float | None
    all_ms: float
    engine_first_ms: float
    engine_all_ms: float

    @property
    def over_first_ms(self) -> float:
        assert self.first_ms is not None
        return self.first_ms - self.engine_first_ms

    @property
    def over_all_ms(self) -> float:
        return self.all_ms - self.engine_all_ms


class Client:
    def __init__(self, port: int, seed: int = 0) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        self._rng = random.Random(seed)
        self._asked = 0

    def ask(self, stream: bool) -> Timed:
        """A prompt of a new conversation, which is deleted afterwards."""
        self._asked += 1
        name = f"wire-{self._asked}"
        body = {
            "prompt": "".join(self._rng.choices("abcdefghij ", k=PROMPT)),
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "return_token_ids": True,  # so that the first token is told, be it half a character
            "stream": stream,
            "session_id": name,
        }
        first_ms = None
        sent = json.dumps(body).encode()
        began = perf_counter()
        self._connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        if stream:
            reply.readline()
            first_ms = (perf_counter() - began) * 1e3
        reply.read()
        all_ms = (perf_counter() - began) * 1e3
        assert reply.status == 200, f"status {reply.status}"
        told = self._call("GET", f"/v1/sessions/{name}")["statistics"][-1]
        self._call("DELETE", f"/v1/sessions/{name}")
        return Timed(first_ms, all_ms, told["ttft_ms"], told["latency_ms"])

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, path: str) -> Any:
        self._connection.request(method, path)
        return json.loads(self._connection.getresponse().read())


def measure(server: LiveServer, rounds: int, seed: int) -> tuple[list[Timed], list[Timed], float]:
    """Streamed and whole requests, one of each a round; and the CPU milliseconds of the HTTP thread for a round, its two
    looks at the sessions included."""
    client, order = Client(server.port, seed), random.Random(seed)
    asked: dict[bool, list[Timed]] = {True: [], False: []}
    try:
        for _ in range(_WARM_UP):
            client.ask(True), client.ask(False)
        before_s = server.http_cpu_s()
        for _ in range(rounds):
            for stream in order.sample((True, False), 2):
                asked[stream].append(client.ask(stream))
        return asked[True], asked[False], (server.http_cpu_s() - before_s) * 1e3 / rounds
    finally:
        client.close()


def wire(config: Mapping[str, Any], rounds: int, seed: int, say: Callable[[str], None] = print) -> int:
    """Exit status: 1 where HTTP takes more than GOAL_MS of the first token, beyond the interval of its median."""
    with live_server(config) as server:
        before = load_average()
        streamed, whole, cpu_ms = measure(server, rounds, seed)
    say(
        f"{rounds} streamed and {rounds} whole requests of {PROMPT} + {OUTPUT} tokens, one client; the machine's load "
        f"{before} before, {load_average()} after. Medians, milliseconds, with intervals of 95 %:"
    )
    over = [one.over_first_ms for one in streamed]
    say(f"  first token, beyond the engine's {_shown([one.engine_first_ms for one in streamed])}: {_shown(over)}")
    say(f"  lowest tenth of these: {sorted(over)[rounds // 10]:.2f} (a busy machine adds to the others)")
    say(f"  whole reply, beyond the engine's: streamed {_shown([one.over_all_ms for one in streamed])}")
    say(f"                                    at once  {_shown([one.over_all_ms for one in whole])}")
    pairs = list(zip(streamed, whole, strict=True))
    say(f"  streamed less at once, by round: {_shown([a.over_all_ms - b.over_all_ms for a, b in pairs])}")
    say(f"  CPU of the HTTP thread for one of each, with looking at both sessions and deleting them: {cpu_ms:.2f}")
    interval = Measured("", over).interval
    return int(interval is not None and interval[0] > GOAL_MS)


def _shown(values: list[float]) -> str:
    measured = Measured("", values)
    low, high = measured.interval or (float("nan"), float("nan"))
    return f"{measured.value:.2f} [{low:.2f}, {high:.2f}]"
