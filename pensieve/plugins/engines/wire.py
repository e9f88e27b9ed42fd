"""What a client and a model in another process say to each other, how it is serialised, and the pipes that carry it.

A message is a head, then the bytes of each array. The head is a pickle of plain values: what is said, when the sender began
(time.perf_counter, which all processes of a machine share), and the name, dtype and shape of each array. The simulation sizes
its messages here too, so that a head costs there what it costs in a trial.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import Any, NamedTuple

from pensieve.core.request import TokenArray
from pensieve.specs import DTYPE_BYTES, ModelSpec

KV, LOGITS = "kv", "logits"

PIECE_BYTES = 512 * 2**10
"""multiprocessing.connection receives a large message in one buffer for each read: pieces are ten times as fast."""

Said = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Array:
    """Numbers as they cross. data: their bytes; empty where only the size of a message is asked for."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytearray | bytes = b""

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def step(ids: TokenArray[int]) -> Said:
    """Compute these positions after those of the KV that comes along (none at first), with the weights that do."""
    return {"do": "step", "ids": ids.tobytes()}


def generate(prompt: TokenArray[int], tokens: int, ends: list[int]) -> Said:
    """Decode at most `tokens` tokens, greedily, until one of `ends`."""
    return {"do": "generate", "ids": prompt.tobytes(), "tokens": tokens, "ends": ends}


def computed(waited_s: float, computed_s: float, token: int | None = None) -> Said:
    """The end of an answer: logits of the last position and the KV of all of them come along, or the last token is in it.
    Seconds of the model's process, since the message that it answers was begun: waited for that to arrive, and to send what
    came before; computed from input to output."""
    return ({} if token is None else {"token": token}) | {"waited": waited_s, "computed": computed_s}


def kv_array(model: ModelSpec, positions: int) -> Array:
    """The shape in which KV crosses: [layers, K and V, KV heads, positions, head_dim]."""
    return Array(model.dtype, (model.layers, 2, model.kv_heads, positions, model.head_dim))


def _head(said: Said, arrays: Mapping[str, Array], began_s: float) -> bytes:
    listed = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    return pickle.dumps((dict(said), listed, began_s), protocol=5)


def size(said: Said, arrays: Mapping[str, Array] | None = None) -> int:
    """Bytes of a message as it is serialised."""
    arrays = arrays or {}
    return len(_head(said, arrays, 0.0)) + sum(array.size for array in arrays.values())


class Arrived(NamedTuple):
    """A message. flight_s: from when the sender began until all of it was here."""

    said: Said
    arrays: Mapping[str, Array]
    flight_s: float


class Wire:
    """One end of two pipes. sent_bytes, received_bytes: of all messages so far, as they were handed to the connection and
    came out of it; the 4 bytes with which it frames each piece are not among them.

    gbps: a message arrives no sooner than a network of so many 10^9 bit/s would have brought it: whoever receives it waits.
    None: as soon as it is there.
    """

    def __init__(self, receives: Connection, sends: Connection, gbps: float | None = None) -> None:
        self._receives, self._sends, self._gbps = receives, sends, gbps
        self.sent_bytes = self.received_bytes = 0

    def send(self, said: Said, arrays: Mapping[str, Array] | None = None, began_s: float | None = None) -> None:
        """began_s: when preparing it began (time.perf_counter); None: now. Raises OSError where the other end is gone."""
        arrays = arrays or {}
        pieces: list[bytes | memoryview] = [_head(said, arrays, perf_counter() if began_s is None else began_s)]
        for one in arrays.values():
            data = memoryview(one.data)
            assert data.nbytes == one.size, "an array without its data"
            pieces += (data[start : start + PIECE_BYTES] for start in range(0, data.nbytes, PIECE_BYTES))
        for piece in pieces:
            self._sends.send_bytes(piece)
            self.sent_bytes += len(piece)

    def receive(self) -> Arrived:
        """The next message. Raises EOFError or OSError where the other end is gone."""
        head = self._receives.recv_bytes()
        said, listed, began_s = pickle.loads(head)
        arrays, count = {}, len(head)
        for name, dtype, shape in listed:
            data, filled = bytearray(Array(dtype, shape).size), 0
            while filled < len(data):
                filled += self._receives.recv_bytes_into(data, filled)
            arrays[name] = Array(dtype, shape, data)
            count += filled
        self.received_bytes += count
        if self._gbps is not None:
            sleep(max(0.0, began_s + count * 8 / (self._gbps * 1e9) - perf_counter()))
        return Arrived(said, arrays, perf_counter() - began_s)

    @property
    def waiting(self) -> bool:
        """Something has come that was not received yet."""
        return self._receives.poll(0)
