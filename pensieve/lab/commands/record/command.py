"""pensieve record: from its arguments to a proxy that serves until it is told to stop, or to a file that was converted.

A process of its own reads what went by and writes it: the proxy does neither, so that no reply waits for either.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from pensieve.errors import ConfigError
from pensieve.lab.commands.record.proxy import Proxy
from pensieve.lab.traffic.journal import COMMIT_S, Journal, finish
from pensieve.lab.traffic.openai import Recorded, Reply
from pensieve.lab.traffic.table import BLOCK_BYTES, Exchange, Facts, Salt, write
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


# -- the process that writes ---------------------------------------------------------------------------------------------

WAITING_BYTES = 256 * 1024 * 1024
"""What may wait for the writer; what comes beyond is not recorded."""

log = logging.getLogger(__name__)


class Writer:
    """The writing process, as the proxy sees it. It is told over a socket of the proxy's own loop: a queue's thread and locks
    cost a third of what the proxy does."""

    def __init__(self, out: Path, upstream: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.lost: Counter[str] = Counter()
        self._ours, theirs = context.Pipe()
        self._transport: asyncio.WriteTransport | None = None
        arguments = (theirs, out, upstream, time.monotonic(), time.time())
        self.process = context.Process(target=_run, args=arguments, name="pensieve-record", daemon=True)
        self.process.start()
        theirs.close()

    async def open(self) -> None:
        """Before the first request."""
        end = socket.socket(fileno=os.dup(self._ours.fileno()))
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, sock=end)

    def tell(self, kind: str, *what: Any) -> bool:
        """See proxy.Tell."""
        if kind == "lost":
            self.lost[what[0]] += 1
            return False
        assert self._transport is not None, "open before the first request"
        message = pickle.dumps((kind, what))
        if self._transport.is_closing() or self._transport.get_write_buffer_size() + len(message) > WAITING_BYTES:
            self.lost["writer_behind"] += 1
            return False
        self._transport.write(struct.pack("!i", len(message)) + message)  # as Connection.recv reads it
        return True

    async def close(self) -> None:
        """Wait until everything is written."""
        if self._transport is not None and self.tell("close", self.lost):
            while self._transport.get_write_buffer_size() and not self._transport.is_closing():
                await asyncio.sleep(0.02)
            await asyncio.to_thread(self.process.join)
            self._transport.close()


def _run(messages: Connection[Any, Any], out: Path, upstream: str, origin_s: float, started_unix_s: float) -> None:
    for one in (signal.SIGINT, signal.SIGTERM):  # the proxy says when
        signal.signal(one, signal.SIG_IGN)
    facts = Facts("proxy", "bytes", BLOCK_BYTES, engine=engine_of(upstream), started_unix_s=started_unix_s)
    journal = Journal(out, facts)
    log.warning("recording to %s", journal.path)
    recorded = Recorded(Salt())
    replies: dict[int, Reply] = {}
    due_s, complete = time.monotonic() + COMMIT_S, False
    while not complete:
        try:
            if messages.poll(max(0.0, due_s - time.monotonic())):
                kind, what = messages.recv()
                complete = kind == "close"
                if complete:
                    journal.lost.update(what[0])
                else:
                    _take(kind, what, recorded, replies, journal, origin_s)
        except (EOFError, OSError):  # the proxy was killed
            break
        except Exception:  # of one request; the others go on
            log.exception("a request is not recorded")
            journal.lost["not_read"] += 1
        if time.monotonic() >= due_s or complete:
            journal.commit()
            due_s = time.monotonic() + COMMIT_S
    journal.close(complete)


def _take(
    kind: str, what: Any, recorded: Recorded, replies: dict[int, Reply], journal: Journal, origin_s: float
) -> None:
    number, *more = what
    if kind == "ask":
        at_s, headers, body = more
        try:
            replies[number] = recorded.asked(number, at_s - origin_s, headers, body)
        except ValueError:
            journal.put(Exchange(number, at_s - origin_s, status="failed", finish_reason="no JSON"))
            return
        journal.put(replies[number].row)
    elif number in replies:
        data, marks, streamed, status, now = more
        reply = replies[number]
        reply.part(data, [(at_s - origin_s, end) for at_s, end in marks], streamed)
        if status is not None:
            journal.put(reply.end(status, now - origin_s, streamed))
            del replies[number]


def engine_of(upstream: str) -> dict[str, Any]:
    """What a server tells of itself: its version, and where it is vLLM its cache. Empty where it tells nothing."""
    try:
        with httpx.Client(base_url=upstream, timeout=2.0, trust_env=False) as client:
            version, metrics = client.get("/version"), client.get("/metrics")
    except httpx.HTTPError as error:
        log.warning("%s says nothing of itself (%s).", upstream, error)
        return {}
    found: dict[str, Any] = {}
    with suppress(ValueError, AttributeError):  # no JSON, or no object
        found["version"] = version.json().get("version")
    if config := re.search(r"^vllm:cache_config_info\{(.*)\}", metrics.text, re.M):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', config[1]))
        block, blocks = (int(labels.get(name, "")) if labels.get(name, "").isdecimal() else None
                         for name in ("block_size", "num_gpu_blocks"))  # fmt: skip
        found |= {"name": "vllm", "block_tokens": block, "cache_config": labels}
        found["gpu_tokens"] = block * (blocks - 1) if block and blocks else None  # the first is vLLM's own
    return found
