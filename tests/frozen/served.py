"""The server's own books: conversations over HTTP whose client goes on, edits, branches, regenerates and deletes."""

from itertools import count
from typing import Any

import pytest

from pensieve.serve.record import TurnRecord
from tests.frozen.play import rows_of as rows_of_turns
from tests.frozen.rows import Rows
from tests.server.live import serving


def rows() -> Rows:
    """Who speaks names the conversation by `session_id`, or by what it has said so far alone."""
    import httpx

    from pensieve.serve.server import create_server

    turns: list[TurnRecord] = []
    numbers = count()
    caches = {"gpu_cache": "1024 tokens", "cpu_cache": "1024 tokens"}
    with (
        pytest.MonkeyPatch.context() as patch,
        create_server(device="sim_h100", **caches) as server,
        serving(server) as (_, url),
    ):
        patch.setattr(
            "secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}"
        )  # the names of unnamed conversations
        server.observe(lambda _, record: turns.append(record))
        with httpx.Client(base_url=url, timeout=100) as client:
            held: dict[str, list[dict[str, str]]] = {}
            for name in "abcdabc":
                _say(client, held.setdefault(name, []), f"Hello, here is {name}. " * 4, session_id=name)
            for number in range(3):  # nobody is named: found again by the messages
                _say(client, held.setdefault("unnamed", []), f"And another thing, number {number}. " * 3)
            branch = held["unnamed"][:2]
            _say(client, branch, "Rather something else. " * 3)
            _say(client, held["unnamed"], "As before. ")
            _say(client, held["a"][:2], "Edited: another question. ", session_id="a")  # shorter than what it holds
            _say(client, held["b"][:-2], held["b"][-2]["content"], session_id="b")  # regenerated
            client.delete("/v1/sessions/c")
            _say(client, held["c"], "Back again. ", session_id="c")
            _say(client, held["d"], "Too much. " * 200, session_id="d")  # refused
            _say(client, held["d"], "Less. ", session_id="d")
        counted = server.system.counters()
    return rows_of_turns(turns, counted)


def _say(client: Any, messages: list[dict[str, str]], text: str, **fields: Any) -> None:
    """Add a message and its reply to the client's own transcript; a refusal adds nothing."""
    asked = [*messages, {"role": "user", "content": text}]
    reply = client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 8, "seed": 0, **fields})
    if reply.status_code == 200:
        messages[:] = [*asked, reply.json()["choices"][0]["message"]]
