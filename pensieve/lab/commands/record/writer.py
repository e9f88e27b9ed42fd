"""The process that reads what went by and writes it: the proxy does neither, so that no reply waits for either."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from pensieve.lab.traffic.journal import COMMIT_S, Journal
from pensieve.lab.traffic.openai import Recorded, Reply
from pensieve.lab.traffic.table import BLOCK_BYTES, Exchange, Facts, Salt

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


def _run(
    messages: Connection[Any, Any],
    out: Path,
    upstream: str,
    origin_s: float,
    started_unix_s: float,
) -> None:
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
    found: dict[str, Any] = {}
    try:
        with httpx.Client(base_url=upstream, timeout=2.0, trust_env=False) as client:
            version, metrics = client.get("/version"), client.get("/metrics")
    except httpx.HTTPError as error:
        log.warning("%s says nothing of itself (%s).", upstream, error)
        return found
    try:
        told = version.json()
        found["version"] = told.get("version") if isinstance(told, Mapping) else None
    except ValueError:
        pass
    config = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics.text, re.M)
    if config is not None:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', config[1]))
        block, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        found |= {"name": "vllm", "block_tokens": int(block) if block.isdecimal() else None}
        known = block.isdecimal() and blocks.isdecimal()
        found["gpu_tokens"] = int(block) * (int(blocks) - 1) if known else None  # the first is vLLM's own
        found["cache_config"] = labels
    return found
