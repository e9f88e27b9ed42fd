"""The command `serve` in a process of its own under load: what HTTP adds, and whether its memory is level.

`-s` prints what was measured. The limits are far from what a quiet machine gives (docs/results/server.md), since this runs
beside other tests.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from pensieve.plugins.engines.process import EngineProcess, free_port
from tests.server.live import PATIENCE_S, healthy

pytestmark = pytest.mark.slow

ADDED_MS = 12.0
"""A reply that waits for a timer (Nagle's, an acknowledgement's, a poll's) takes 40 ms or more; a quiet machine adds 2."""
HELD = {"pensieve_python_blocks": 4.0, "pensieve_malloc_bytes": 400.0}
"""What /metrics says is in use, and how much of it more a turn may leave behind: a record that is kept takes far more. Two
blocks and 100 bytes a turn were seen over 4,320 turns, 0.3 and 33 without a state file."""


SERVE = """
import gc, sys
from pensieve.cli import main

blocks = sys.getallocatedblocks
sys.getallocatedblocks = lambda: (gc.collect(), blocks())[1]
main()
"""
"""The command. Blocks are counted behind a collection: garbage that waits for the next one is not kept."""


@pytest.fixture(scope="module", params=["cpu"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """params: the option of hardware."""
    port, outputs = free_port(), tmp_path_factory.mktemp("serve")
    fields = f"hardware={request.param} hardware.threads=1 model.weights=random serve.port={port}"
    command = [sys.executable, "-c", SERVE, "serve", *fields.split()]
    process = EngineProcess("serve", command, {"PENSIEVE_OUTPUTS": str(outputs), "PENSIEVE_API_KEYS": ""})
    address = f"http://127.0.0.1:{port}"
    try:
        process.wait_until(lambda: healthy(address), PATIENCE_S)
        yield address
    finally:
        process.close()


def test_http_adds_little_to_the_first_token(url: str) -> None:
    """What the client waited beyond what the engine says it took, within each request: how fast the engine is cancels out."""
    added = []
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for number in range(60):
            name = f"wire-{number}"
            body = {"prompt": f"{number:>64}", "max_tokens": 8, "ignore_eos": True, "stream": True, "session_id": name}
            began = time.perf_counter()
            # The first token is told by its number, be it half a character.
            with client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as reply:
                lines = reply.iter_lines()
                next(lines)
                waited_ms = (time.perf_counter() - began) * 1e3
                assert reply.status_code == 200
                list(lines)
            added.append(waited_ms - client.get(f"/v1/sessions/{name}").json()["statistics"][-1]["ttft_ms"])
            client.delete(f"/v1/sessions/{name}")
    tenth = statistics.quantiles(added, n=10)[0]
    print(f"HTTP adds {statistics.median(added):.2f} ms to the first token, the lowest tenth {tenth:.2f}")
    assert tenth < ADDED_MS


@pytest.mark.parametrize("url", ["sim_h100"], indirect=True)
def test_memory_is_level_once_the_server_has_had_its_load(url: str) -> None:
    """Conversations of some turns, then deleted and begun anew by the same names: what is held is the same after every
    round of them. (Of other names the parser of JSON keeps the last 16,384.)"""

    async def talk(client: httpx.AsyncClient, name: str, rng: random.Random) -> None:
        for turn in range(3):
            said = [{"role": "user", "content": f"{turn} of {name}"}]
            body = {"messages": said, "max_tokens": 4, "stream": rng.random() < 0.5, "session_id": name}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.delete(f"/v1/sessions/{name}")).status_code == 200

    async def rounds(count: int) -> list[dict[str, float]]:
        rng, found = random.Random(0), []
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            for _ in range(count):
                await asyncio.gather(*(talk(client, f"steady-{i}", rng) for i in range(24)))
                lines = (await client.get("/metrics")).text.splitlines()
                told = (line.split(" ") for line in lines if line.startswith(tuple(HELD)))
                found.append({name: float(value) for name, value in told})
        return found

    found = asyncio.run(rounds(24))
    turns = 24 * 3 * 8  # between the middles of the second and the last third
    for name, most in HELD.items():
        before, after = ([one[name] for one in part] for part in (found[8:16], found[16:]))
        more = (statistics.median(after) - statistics.median(before)) / turns
        print(f"{name}: {more:+.3f} a turn, of {after[-1]:,.0f}; {[round(one[name]) for one in found]}")
        assert more < most
