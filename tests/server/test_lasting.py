"""The command `serve` in a process of its own: what HTTP adds, whether its memory is level, what a kill -9 leaves.

`-s` prints what was measured. The limits are far from what a quiet machine gives (docs/results/server.md), since this runs
beside other tests.
"""

import asyncio
import gc
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import REAL, process
from tests.server.test_http import ALICE, BOB, KEYS, OPERATOR
from tests.server.test_restart import chat, served
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADDED_MS = 12.0
"""A reply that waits for a timer (Nagle's, an acknowledgement's, a poll's) takes 40 ms or more; a quiet machine adds 2."""
HELD = {"pensieve_python_blocks": 4.0, "pensieve_malloc_bytes": 400.0}
"""What /metrics says is in use, and how much of it more a turn may leave behind: a record that is kept takes far more. Two
blocks and 100 bytes a turn were seen over 4,320 turns, 0.3 and 33 without a state file."""


def http_adds_little_to_the_first_token(client: httpx.Client, requests: int = 20) -> None:
    """What the client waited beyond what the engine says it took, within each request: how fast the engine is cancels out."""
    added = []
    for number in range(requests):
        name = f"wire-{number}"
        body = {"prompt": f"{number:>64}", "max_tokens": 2, "ignore_eos": True, "stream": True, "session_id": name}
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


def test_memory_is_level_once_the_server_has_had_its_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of some turns, then deleted and begun anew by the same names: what is held is the same after every
    round of them. (Of other names the parser of JSON keeps the last 16,384.)"""
    blocks = sys.getallocatedblocks  # counted behind a collection: garbage that waits for the next one is not kept
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: (gc.collect(), blocks())[1])

    async def talk(client: httpx.AsyncClient, name: str, rng: random.Random) -> None:
        for turn in range(3):
            said = [{"role": "user", "content": f"{turn} of {name}"}]
            body = {"messages": said, "max_tokens": 4, "stream": rng.random() < 0.5, "session_id": name}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.delete(f"/v1/sessions/{name}")).status_code == 200

    async def rounds(url: str) -> list[dict[str, float]]:
        rng, found = random.Random(0), []
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            for _ in range(24):
                await asyncio.gather(*(talk(client, f"steady-{i}", rng) for i in range(24)))
                lines = (await client.get("/metrics")).text.splitlines()
                told = (line.split(" ") for line in lines if line.startswith(tuple(HELD)))
                found.append({name: float(value) for name, value in told})
        return found

    with process(tmp_path, "hardware=sim_h100") as (_, client):
        found = asyncio.run(rounds(str(client.base_url)))
    turns = 24 * 3 * 8  # between the middles of the second and the last third
    for name, most in HELD.items():
        before, after = ([one[name] for one in part] for part in (found[8:16], found[16:]))
        more = (statistics.median(after) - statistics.median(before)) / turns
        print(f"{name}: {more:+.3f} a turn, of {after[-1]:,.0f}; {[round(one[name]) for one in found]}")
        assert more < most


def test_kill_9_in_mid_stream_and_a_new_process(tmp_path: Path) -> None:
    """Two processes with tiers that hold one conversation and a disk; the undisturbed run is in this process, which has room
    for all, and answers with the same tokens."""
    import transformers.modeling_utils  # noqa: F401  once, rather than in both processes: eight seconds each

    import pensieve.device.worker  # noqa: F401

    # Together more than the tiers hold, whenever copies are made: 9 blocks for about 15.
    before = [
        ("Tell Alice of the sea", ALICE, 40),
        ("Tell Bob of the hills", BOB, 120),
        ("Tell us of the sky", OPERATOR, 60),
        ("Go on", OPERATOR, 70),
        ("Go on", ALICE, 24),
    ]
    after = [("Go on", BOB, 24), ("And on", ALICE, 24), ("And on", BOB, 24)]

    def ask(client: httpx.Client, asked: list[tuple[str, dict[str, str], int]]) -> list[Any]:
        return [chat(client, text, who, session_id="talk", max_tokens=most) for text, who, most in asked]

    tiers = ("hardware=cpu", "cache.gpu=256 tokens", "cache.cpu=32 tokens", "cache.disk=8192 tokens")
    with process(tmp_path, *tiers, keys=KEYS) as (first, client):
        said = ask(client, before)
        message = {"role": "user", "content": "To be cut"}
        body = {"messages": [message], "max_tokens": 90, "temperature": 0, "stream": True, "session_id": "talk"}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=ALICE) as reply:
            pieces = (line for line in reply.iter_lines() if line.startswith("data: "))
            assert next(pieces) and next(pieces), "it streams"
            first.kill()
            first.join(PATIENCE_S)
    with process(tmp_path, *tiers, keys=KEYS) as (_, client):
        stood = len(client.get("/v1/sessions/talk", headers=ALICE).json()["statistics"]) == 3
        if stood:  # it had ended before the kill came: then it has to be known
            before.append(("To be cut", ALICE, 90))
            said.append(None)
        kept = text_string_to_metric_families(client.get("/metrics", headers=OPERATOR).text)
        chunks = next(sample.value for family in kept for sample in family.samples if "disk_blocks_used" in sample.name)
        said += ask(client, after)
        client.headers.update(OPERATOR)
        http_adds_little_to_the_first_token(client)
    with served(None, REAL) as (_, client):
        undisturbed = ask(client, [*before, *after])
    for here, there in zip(said, undisturbed, strict=True):
        if here is not None:
            assert here["choices"] == there["choices"]
            assert here["usage"]["total_tokens"] == there["usage"]["total_tokens"]
    at = len(before)  # the first turns after the kill
    details = [one["usage"]["prompt_tokens_details"] for one in said[at : at + 2]]
    for found, there in zip(details, undisturbed[at : at + 2], strict=True):
        history = there["usage"]["prompt_tokens_details"]["gpu"]
        assert found["gpu"] == found["cpu"] == 0 and found["disk"] + found["recomputed"] == history > 60
    assert chunks > 0, "the second knows what the first wrote; whether it reads or computes it, measured times decide"
    assert sum(found["recomputed"] for found in details) > 0, "the last chunk of each is partly filled"
