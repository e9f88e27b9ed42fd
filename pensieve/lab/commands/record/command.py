"""pensieve record: from its arguments to a proxy that serves until it is told to stop, or to a file that was converted."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pensieve.errors import ConfigError
from pensieve.lab.commands.record.proxy import Proxy
from pensieve.lab.commands.record.writer import Writer
from pensieve.lab.traffic.journal import finish
from pensieve.lab.traffic.table import Salt, write
from pensieve.lab.workload.formats import FORMATS, rows_of
from pensieve.lab.workload.formats.served import in_order
from pensieve.lab.workload.formats.vllm_events import Events, joined, listen


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="pensieve record", description=description)
    source = made.add_mutually_exclusive_group()
    source.add_argument("--upstream", metavar="URL", help="the server to record, as http://host:8000")
    source.add_argument("--from", dest="source", type=Path, metavar="FILE", help="recorded requests to convert instead")
    made.add_argument("--format", choices=FORMATS, help="of that file (default: as its first entry looks)")
    made.add_argument(
        "--kv-events",
        metavar="ADDRESS",
        help="vLLM's, as tcp://host:5557: taken until Ctrl-C, then read with its log (--from)",
    )
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="recorded traffic, Parquet")
    made.add_argument("--host", default="127.0.0.1", help="where clients find the proxy (default: this machine only)")
    made.add_argument("--port", type=int, default=8001, help="0: any free one (default: 8001)")
    return made


def record(argv: Sequence[str] | None, description: str | None) -> int:
    """Raises ConfigError for arguments that make no sense, MalformedInput for a file that cannot be converted."""
    asked = parser(description).parse_args(argv)
    if asked.kv_events is not None:
        if asked.source is None:
            raise ConfigError("--kv-events needs vLLM's request log too: --from vllm.log.")
        return _follow(asked)
    if asked.source is not None:
        write(asked.out, *rows_of(asked.source, asked.format, Salt()))
        print(f"{asked.out} is written.")
        return 0
    if asked.upstream is None:
        if finish(asked.out) is None:
            raise ConfigError(
                f"Give --upstream=http://host:8000; there is no killed recording of {asked.out} to complete."
            )
        print(f"{asked.out} is complete.")
        return 0
    up = urlsplit(asked.upstream.rstrip("/"))
    if up.scheme not in ("http", "https") or not up.hostname or up.path:
        raise ConfigError(
            f"--upstream={asked.upstream} is no address of a server; give http://host:port without a path."
        )
    writer = Writer(asked.out, asked.upstream)
    try:
        asyncio.run(_serve(Proxy(up, writer.tell), writer, asked.host, asked.port))
    except OSError as error:
        raise ConfigError(f"--port={asked.port} cannot be served ({error}); give another.") from error
    return 0


def _follow(asked: argparse.Namespace) -> int:
    """Until SIGINT or SIGTERM."""
    events, told = Events(Salt()), threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: told.set())
    print(f"Listening to {asked.kv_events}; Ctrl-C writes {asked.out}.", flush=True)
    listen(asked.kv_events, events, told.is_set)
    write(asked.out, *in_order(*joined(events, [asked.source])))
    print(f"{asked.out} is written.")
    return 0


async def _serve(proxy: Proxy, writer: Writer, host: str, port: int) -> None:
    """Until SIGINT or SIGTERM."""
    await writer.open()
    try:
        server = await proxy.serve(host, port)
        gc.freeze()  # what is loaded stays, and need not be looked through again
        told = asyncio.Event()
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(one, told.set)
        address = f"http://{host}:{server.sockets[0].getsockname()[1]}"
        print(f"Clients find {proxy.upstream.geturl()} at {address}; Ctrl-C stops.", flush=True)
        await told.wait()
        server.close()
    finally:
        await writer.close()
