"""A server over a real socket, in a thread of this process."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
import uvicorn

from pensieve.core.request import Event
from pensieve.plugins.engines.process import free_port
from pensieve.serve.server import create_server
from pensieve.serve.server.api import Server
from pensieve.serve.server.app import App, ServeSettings, uvicorn_config
from pensieve.serve.server.state import StateFile
from tests.typed import typed_process
from tests.waiting import PATIENCE_S, until

REAL = {"device": "cpu", "weights": "random", "gpu_cache": "1024 tokens", "cpu_cache": "2048 tokens"}
"""A GPU tier so small that few lengths are measured when it starts."""
SIMULATED = {"device": "sim_h100", "gpu_cache": "4096 tokens", "cpu_cache": "4096 tokens"}


@contextmanager
def serving(
    server: Server, keys: dict[str, str] | None = None, state: StateFile | None = None, **fields: Any
) -> Iterator[tuple[App, str]]:
    """The state of the HTTP server, and its address. state: where it keeps conversations."""
    app = App(ServeSettings(port=0, **fields), keys or {}, "tiny")
    app.prepare(server, state)
    app.on_close = None if state is None else state.close
    app.server = server
    http = uvicorn.Server(uvicorn_config(app))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    try:
        ends = time.monotonic() + PATIENCE_S
        while not http.started:
            assert time.monotonic() < ends and thread.is_alive()
            time.sleep(0.01)
        port = http.servers[0].sockets[0].getsockname()[1]
        yield app, f"http://127.0.0.1:{port}"
    finally:
        http.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def simulated(keys: dict[str, str] | None = None, **fields: Any) -> Iterator[tuple[App, httpx.Client]]:
    with create_server(**SIMULATED) as server, serving(server, keys, **fields) as (state, url):  # noqa: SIM117
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            yield state, client


@contextmanager
def process(
    outputs: Path, *arguments: str, keys: Mapping[str, str] | None = None
) -> Iterator[tuple[ForkProcess, httpx.Client]]:
    """The command in a fork of this interpreter, killed at the end, and a client of it."""
    words = ("model.weights=random", "hardware.threads=1", f"serve.port={free_port()}", *arguments)
    given = ",".join(f"{tenant}:{key}" for key, tenant in (keys or {}).items())
    with (outputs / "said.txt").open("w+") as said:
        running = typed_process("runners/serve.py", *words, outputs=outputs, to=(said, said), PENSIEVE_API_KEYS=given)
        try:
            url = f"http://127.0.0.1:{words[2].partition('=')[2]}"
            assert until(lambda: running.exitcode is not None or healthy(url))
            assert running.exitcode is None, (outputs / "said.txt").read_text()
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                yield running, client
        finally:
            running.kill()
            running.join()


class Hold:
    """A listener that holds up the engine's thread from an event on, until it is released."""

    def __init__(self, events: int = 1) -> None:
        self._events = events
        self.reached, self._released = threading.Event(), threading.Event()

    def __call__(self, _: Event) -> None:
        self._events -= 1
        if self._events == 0:
            self.reached.set()
            assert self._released.wait(PATIENCE_S)

    def release(self) -> None:
        self._released.set()


@contextmanager
def held(server: Server) -> Iterator[None]:
    """Meanwhile the engine's thread stands still."""
    hold = Hold()
    turn = server.asking(max_new_tokens=1, ignore_eos=True)
    turn.on_event = hold
    server.say("~held", turn, text="x")
    assert hold.reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        hold.release()
    turn.future.result(PATIENCE_S)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
