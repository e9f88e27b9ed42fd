"""The command `serve` in a process of its own, for benchmarks that are its clients."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from pensieve.plugins.engines.process import EngineProcess, free_port

START_S = 600.0


class LiveServer:
    """port: on the loopback interface. The process is the server's own, not that of its guard."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self.port, self.url, self._process = port, f"http://127.0.0.1:{port}", process

    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def http_cpu_s(self) -> float:
        """CPU time so far of the thread that serves HTTP, the first of the process; in ticks of the system, mostly 10 ms."""
        first = next(thread for thread in self._process.threads() if thread.id == self._process.pid)
        return float(first.user_time + first.system_time)


@contextmanager
def live_server(config: Mapping[str, Any], fields: Sequence[str] = ()) -> Iterator[LiveServer]:
    """Warm. config: of the bench command, whose hardware and model it takes. fields: further overrides of serve. Its outputs
    are in a folder of their own, which goes with it. Raises EngineFailed."""
    model, port = config["bench"]["model"], free_port()
    chosen = [*hardware_overrides(config["hardware"]), f"serve.port={port}", *fields]
    chosen += ["model.weights=random"] if model == "auto" else [f"model={model}", "model.weights=random"]
    command = [sys.executable, "-c", "from pensieve.cli import main; main()", "serve", *chosen]
    with tempfile.TemporaryDirectory(prefix="pensieve-serve-") as outputs:
        process = EngineProcess("serve", command, {"PENSIEVE_OUTPUTS": outputs, "PENSIEVE_API_KEYS": ""})
        try:
            process.wait_until(lambda: _healthy(port), START_S)
            [server] = psutil.Process(process.pid).children()
            yield LiveServer(port, server)
        finally:
            process.close()


def hardware_overrides(hardware: Mapping[str, Any]) -> list[str]:
    """What makes another command compose this very machine, whatever of it was typed. hardware: resolved."""
    fields = _flat("++hardware", {name: value for name, value in hardware.items() if name != "name"})
    return [f"hardware={hardware['name']}", *fields]


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}", inner)
    else:
        yield f"{path}={json.dumps(value, ensure_ascii=False)}"


def _healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


def load_average() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())
