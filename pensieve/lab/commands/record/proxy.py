"""A proxy that passes bytes on as they are and tells a recorder, in another process, what went by."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic
from typing import Any
from urllib.parse import SplitResult

from pensieve.lab.traffic.openai import PATHS

PART_BYTES = 64 * 1024
"""Of a reply that wait until they are told, at most."""
BODY_BYTES = 8 * 1024 * 1024
"""Of a request that is recorded, at most."""
MARKS = 64
"""Of the beginning of a reply it is known when each piece came."""
HEAD_BYTES = 256 * 1024
WAITING_BYTES = 1024 * 1024
"""Of a client that wait for the connection to the upstream."""

Tell = Callable[..., bool]
"""Takes what is recorded, and never waits. False: it cannot, and the request is lost."""


class Unframed(Exception):
    """The bytes are no HTTP/1.1 that is known here."""


class Framing:
    """Where messages of HTTP/1.1 begin and end in the bytes of one direction. held: bytes that were fed and not yielded.

    bodiless: whether the message with this head has no body, whatever it says. to_end: whether a body without a length lasts
    to the end of the connection.
    """

    def __init__(self, bodiless: Callable[[bytes], bool], to_end: bool) -> None:
        self._bodiless, self._to_end = bodiless, to_end
        self.held = b""
        self.left: int | None = None  # of the body or of a chunk; None: to the end of the connection
        self.state = "head"  # length; of a body in chunks: size, chunk, trailer

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes, bytes]]:
        """(head, body or end; the bytes as they came; what of a body they hold). Raises Unframed."""
        data, self.held = self.held + data, b""
        at = 0
        while at < len(data):
            if self.state == "chunk":  # it ends with a line's end
                left = self.left or 0
                piece = data[at : at + left + 2]
                yield "body", piece, piece[: max(left, 0)]
                at += len(piece)
                self.left = left - len(piece)
                if self.left == -2:
                    self.state = "size"
            elif self.state == "length":
                piece = data[at:] if self.left is None else data[at : at + self.left]
                yield "body", piece, piece
                at += len(piece)
                self.left = None if self.left is None else self.left - len(piece)
            else:
                ending = b"\r\n\r\n" if self.state == "head" else b"\r\n"
                stop = data.find(ending, at)
                if stop < 0:
                    if len(data) - at > HEAD_BYTES:
                        raise Unframed
                    self.held = data[at:]
                    return
                line, raw = data[at:stop], data[at : stop + len(ending)]
                at += len(raw)
                if self.state == "head":
                    self.state, self.left = self._body_of(line)
                    yield "head", raw, line
                else:
                    if self.state == "size":
                        if not re.match(rb"[0-9a-fA-F]+\s*(;|$)", line):
                            raise Unframed
                        self.left = int(line.split(b";")[0], 16)
                        self.state = "chunk" if self.left else "trailer"
                    elif not line:  # the end of the trailer
                        self.state, self.left = "length", 0
                    yield "body", raw, b""
            if self.state == "length" and self.left == 0:
                self.state = "head"
                yield "end", b"", b""

    def _body_of(self, head: bytes) -> tuple[str, int | None]:
        fields = headers_of(head)
        if self._bodiless(head):
            return "length", 0
        if "chunked" in fields.get("transfer-encoding", ""):
            return "size", 0
        if "content-length" in fields:
            if not fields["content-length"].isdecimal():
                raise Unframed
            return "length", int(fields["content-length"])
        return "length", None if self._to_end else 0


def headers_of(head: bytes) -> dict[str, str]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.decode("latin-1").strip().lower(): value.decode("latin-1").strip() for name, _, value in lines}


@dataclass(slots=True)
class _Passing:
    """A request on its way. number: None: it is not recorded."""

    number: int | None
    arrived_s: float
    method: bytes
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)
    marks: list[tuple[float, int]] = field(default_factory=list)
    streamed: bool = False
    failed: bool = False
    told: int = 0


@dataclass(slots=True)
class Proxy:
    """What all connections share."""

    upstream: SplitResult
    tell: Tell
    requests: int = 0

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(lambda: Client(self), host, port, backlog=1024)


class _Side(asyncio.Protocol):
    """One end of a pair: bytes that come here go out there. While the other end takes no more, nothing is read here."""

    other: _Side | None = None
    transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()


class Client(_Side):
    """A client's connection, and with it one to the upstream: what happens to one of them happens to the other."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy, self._waiting = proxy, bytearray()
        self._passing: deque[_Passing] = deque()
        self._asking: _Passing | None = None
        self._asked = Framing(lambda _: False, to_end=False)
        self._answered = Framing(self._has_no_body, to_end=True)
        self._opaque = self._interim = self._leaving = False
        self._connecting: asyncio.Task[None] | None = None
        self._late: list[tuple[float, bytes]] = []  # of the upstream: when it came
        self._late_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        up = self._proxy.upstream
        tls = ssl.create_default_context() if up.scheme == "https" else None
        try:
            _, side = await asyncio.get_running_loop().create_connection(
                lambda: _Upstream(self), up.hostname or "", up.port or (443 if tls else 80), ssl=tls
            )
        except OSError as error:
            body = json.dumps({"error": {"message": f"{up.geturl()} cannot be reached: {error}", "type": "upstream"}})
            head = f"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(f"{head}Connection: close\r\n\r\n{body}".encode())
            self._over("failed")
            self.transport.close()
            return
        self.other = side
        if self.transport.is_closing():
            side.transport.close()
        side.transport.write(bytes(self._waiting))
        self._waiting.clear()
        self.transport.resume_reading()

    def eof_received(self) -> bool:
        """A client may have said all and still listen; an upstream that has said all is done."""
        self._leaving = True
        if self.other is None or not self.other.transport.can_write_eof():
            return False
        self.other.transport.write_eof()
        return True

    def _send(self, data: bytes) -> None:
        if self.other is None:
            self._waiting += data
            if len(self._waiting) > WAITING_BYTES:
                self.transport.pause_reading()
        else:
            self.other.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._opaque:
            self._send(data)
            return
        out = bytearray()
        now, taken, given = monotonic(), 0, self._asked.held + data
        try:
            for kind, raw, body in self._asked.feed(data):
                out += self._ask(kind, raw, body, now)
                taken += len(raw)
        except Unframed:
            self._unframed()
            out += given[taken:]
        if out:
            self._send(bytes(out))

    def _ask(self, kind: str, raw: bytes, body: bytes, now: float) -> bytes:
        """Take a part of a request; returns what goes to the upstream now."""
        if kind == "head":
            method, path, *_ = [*raw.split(b" ", 2), b""]
            host = self._proxy.upstream.netloc.rpartition("@")[2].encode()
            raw = re.sub(rb"(?im)^host:[^\r\n]*", lambda _: b"Host: " + host, raw, count=1)
            recorded = method == b"POST" and path.split(b"?")[0].decode("latin-1").rstrip("/") in PATHS
            number = self._proxy.requests if recorded else None
            self._proxy.requests += recorded
            self._asking = _Passing(number, now, method, headers_of(raw[:-4]))
            self._passing.append(self._asking)
            return raw
        one = self._asking
        assert one is not None
        if one.number is not None and len(one.body) + len(body) <= BODY_BYTES:
            one.body += body
        elif one.number is not None:
            self._proxy.tell("lost", "body_too_long")
            one.number = None
        if kind == "end":
            self._asking = None
            if one.number is not None:
                told = self._proxy.tell("ask", one.number, one.arrived_s, one.headers, bytes(one.body))
                one.number = one.number if told else None
                one.body.clear()
        return raw

    def answer(self, data: bytes) -> None:
        """Take bytes of the upstream, which the client has already been sent. A body in chunks waits until it ends or is
        long, and is read at once."""
        if self._opaque:
            return
        self._late.append((monotonic(), data))
        self._late_bytes += len(data)
        if (
            self._answered.state in ("size", "chunk", "trailer")
            and data[-4:] != b"\r\n\r\n"
            and len(data) >= 4
            and self._late_bytes < PART_BYTES
        ):
            return
        self._read()

    def _read(self) -> None:
        """What came of the upstream and was not read."""
        late, self._late, self._late_bytes = self._late, [], 0
        came = zip([now for now, _ in late], accumulate(len(data) for _, data in late), strict=True)
        now, here = next(came, (0.0, 0))
        at = -len(self._answered.held)
        try:
            for kind, raw, body in self._answered.feed(b"".join(data for _, data in late)):
                at += len(raw)
                while at > here:
                    now, here = next(came)
                one = self._passing[0] if self._passing else None
                if one is None:
                    raise Unframed
                if kind == "head":
                    code = _code(body)
                    if code == 101:  # another protocol from here on
                        raise Unframed
                    one.failed = code >= 400
                    one.streamed = "event-stream" in headers_of(body).get("content-type", "")
                elif kind == "end":
                    if not self._interim:
                        self._tell(one, "failed" if one.failed else "completed", now)
                        self._passing.popleft()
                elif one.number is not None and body:
                    one.reply += body
                    if len(one.marks) < MARKS:
                        one.marks.append((now, one.told + len(one.reply)))
                    if len(one.reply) >= PART_BYTES:
                        self._tell(one, None, now)
        except Unframed:
            self._unframed()

    def _has_no_body(self, head: bytes) -> bool:
        code = _code(head)
        self._interim = 100 <= code < 200
        asked = self._passing[0].method if self._passing else b""
        return self._interim or code in (204, 304) or asked == b"HEAD"

    def _tell(self, one: _Passing, status: str | None, now: float) -> None:
        if one.number is None:
            return
        if not self._proxy.tell("reply", one.number, bytes(one.reply), one.marks, one.streamed, status, now):
            one.number = None
        one.told += len(one.reply)
        one.reply.clear()
        one.marks = [] if one.told else one.marks

    def _unframed(self) -> None:
        """From here on the bytes are passed on, and nothing of this connection is recorded."""
        self._opaque = True
        self._over("failed", unframed=True)

    def _over(self, status: str, unframed: bool = False) -> None:
        for one in self._passing:
            if unframed and one.number is not None:
                self._proxy.tell("lost", "not_understood")
            self._tell(one, status, monotonic())
        self._passing.clear()

    def upstream_lost(self) -> None:
        self._read()
        if self._passing and self._answered.state == "length" and self._answered.left is None:
            one = self._passing.popleft()
            self._tell(one, "failed" if one.failed else "completed", monotonic())
        self._over("cancelled" if self._leaving else "failed")
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._read()
        self._over("cancelled")
        if self.other is not None:
            self.other.transport.close()


class _Upstream(_Side):
    def __init__(self, client: Client) -> None:
        self.other: Client = client

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)
        self.other.answer(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.other.upstream_lost()


def _code(head: bytes) -> int:
    found = re.match(rb"HTTP/1\.[01] (\d{3})", head)
    if found is None:
        raise Unframed
    return int(found[1])
