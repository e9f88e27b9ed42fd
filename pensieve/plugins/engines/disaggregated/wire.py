"""Messages over a connection: each is counted as it is serialised, and may be held back to the rate of a slower network."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from pensieve.plugins.engines.disaggregated.messages import Array, Said, head, read_head

PIECE_BYTES = 512 * 2**10
"""multiprocessing.connection receives a large message in one buffer for each read of the socket: pieces are ten times as
fast."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """flight_s: from when the sender began until all of it was here."""

    said: Said
    arrays: Mapping[str, Array]
    flight_s: float


class Wire:
    """One end of a connection. sent_bytes, received_bytes: of all messages so far, as they were handed to the connection and
    came out of it; the 4 bytes with which it frames each piece are not among them.

    gbps: a message arrives no sooner than a network of so many 10^9 bit/s would have brought it: whoever receives it waits.
    None: as soon as it is there.
    """

    def __init__(self, connection: Connection, gbps: float | None = None) -> None:
        self._connection, self._gbps = connection, gbps
        _send_at_once(connection)
        self.sent_bytes = self.received_bytes = 0

    def send(self, said: Said, arrays: Mapping[str, Array] | None = None, began_s: float | None = None) -> None:
        """began_s: when preparing it began (time.perf_counter); None: now. Raises OSError where the other end is gone."""
        arrays = arrays or {}
        self._put(head(said, arrays, time.perf_counter() if began_s is None else began_s))
        for array in arrays.values():
            data = memoryview(array.data)
            assert data.nbytes == array.size, "an array without its data"
            for start in range(0, data.nbytes, PIECE_BYTES):
                self._put(data[start : start + PIECE_BYTES])

    def receive(self) -> Arrived:
        """The next message. Raises EOFError or OSError where the other end is gone."""
        before = self.received_bytes
        said, arrays, began_s = read_head(self._get())
        filled = {name: replace(array, data=self._fill(array.size)) for name, array in arrays.items()}
        if self._gbps is not None:
            due_s = began_s + (self.received_bytes - before) * 8 / (self._gbps * 1e9)
            time.sleep(max(0.0, due_s - time.perf_counter()))
        return Arrived(said, filled, time.perf_counter() - began_s)

    @property
    def waiting(self) -> bool:
        """Something has come that was not received yet."""
        return self._connection.poll(0)

    def close(self) -> None:
        self._connection.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._connection.send_bytes(data)
        self.sent_bytes += len(data)

    def _get(self) -> bytes:
        data = self._connection.recv_bytes()
        self.received_bytes += len(data)
        return data

    def _fill(self, size: int) -> bytearray:
        data, filled = bytearray(size), 0
        while filled < size:
            filled += self._connection.recv_bytes_into(data, filled)
        self.received_bytes += filled
        return data


def _send_at_once(connection: Connection) -> None:
    """Without it a small piece waits until the one before is acknowledged, which takes the other end 40 ms (Nagle)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
