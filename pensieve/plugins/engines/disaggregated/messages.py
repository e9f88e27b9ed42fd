"""What client and model say to each other, and how it is serialised: a head, then the bytes of each array.

The head is a pickle of plain values: what is said, when the sender began, and the name, dtype and shape of each array. Both
ends were started by one trial on one machine, and the connection is authenticated (wire.py). The simulation sizes its
messages here too, so that a head costs there what it costs in a trial.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from pensieve.core.request import TokenArray
from pensieve.specs import DTYPE_BYTES, ModelSpec

STEP, GENERATE, STOP = "step", "generate", "stop"
KV = "kv"
LOGITS = "logits"


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


Said = Mapping[str, Any]


def step(ids: TokenArray[int]) -> Said:
    """Compute these positions after those of the KV that comes along (none at first), with the weights that do."""
    return {"do": STEP, "ids": ids.tobytes()}


def stepped(waited: float, computed: float) -> Said:
    """Logits of the last position and the KV of all of them come along. Seconds of the model's process, since the message
    that it answers was begun: waited for that to arrive, and to send what came before; computed from input to output."""
    return {"waited": waited, "computed": computed}


def generate(prompt: TokenArray[int], tokens: int, ends: list[int]) -> Said:
    """Decode at most `tokens` tokens, greedily, until one of `ends`."""
    return {"do": GENERATE, "ids": prompt.tobytes(), "tokens": tokens, "ends": ends}


def token(drawn: int) -> Said:
    return {"token": drawn}


def last_token(drawn: int, waited: float, computed: float) -> Said:
    return {**token(drawn), **stepped(waited, computed)}


def failed(sentence: str) -> Said:
    return {"error": sentence}


def kv_array(model: ModelSpec, positions: int) -> Array:
    """The shape in which KV crosses: [layers, K and V, KV heads, positions, head_dim]."""
    return Array(model.dtype, (model.layers, 2, model.kv_heads, positions, model.head_dim))


def logits_array(model: ModelSpec) -> Array:
    return Array(model.dtype, (model.vocab,))


def head(said: Said, arrays: Mapping[str, Array], began_s: float) -> bytes:
    """began_s: a reading of time.perf_counter, which all processes of a machine share."""
    listed = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    return pickle.dumps((dict(said), listed, began_s), protocol=5)


def read_head(data: bytes) -> tuple[Said, dict[str, Array], float]:
    """The arrays still lack their data."""
    said, listed, began_s = pickle.loads(data)
    return said, {name: Array(dtype, shape) for name, dtype, shape in listed}, began_s


def size(said: Said, arrays: Mapping[str, Array] | None = None) -> int:
    """Bytes of a message as it is serialised."""
    arrays = arrays or {}
    return len(head(said, arrays, 0.0)) + sum(array.size for array in arrays.values())
