"""Disaggregated serving as engines: the client in this process, the model in another, three ways to divide what they hold.

| baseline        | weights      | KV           | what crosses, a token                                   |
|-----------------|--------------|--------------|---------------------------------------------------------|
| semantic_blind  | the client's | the client's | weights, KV of the context, back: logits and all the KV |
| partially_aware | stay         | the client's | KV of the context, back: logits and all the KV          |
| fully_aware     | stay         | stays        | the token id, back                                      |

KV lives as long as its request in all three, so nothing is kept from one turn to the next.

A message is a head, then the bytes of each array. The head is a pickle of plain values: what is said, when the sender began
(time.perf_counter, which all processes of a machine share), and the name, dtype and shape of each array. The simulation sizes
its messages here too, so that a head costs there what it costs in a trial.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import Any, NamedTuple

from pensieve.core.plan import StartReport
from pensieve.core.request import Request, TokenArray
from pensieve.errors import ContextLengthError, RequestFailed
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.process import EngineProcess
from pensieve.plugins.engines.transformers_peers import end_tokens
from pensieve.plugins.engines.weights import plain_module
from pensieve.serve.systems.base import Capabilities
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


# -- the client, as an engine ------------------------------------------------------------------------------------------------

CODE = """
from pensieve.plugins.engines.process import own_pipes
from pensieve.plugins.engines.remote_model import host
host(*own_pipes())
"""


class _Disaggregated(OutsideEngine):
    """start_timeout_s: until the model's process must be ready.

    hardware.network_gbps paces what crosses, as a network of that rate would; without it, it goes as fast as pipes take it.
    Bytes are those of the messages as they are serialised, their heads included.
    """

    can = Capabilities(max_in_flight=1)
    at_once = 1
    keeps_weights = True
    crosses: str

    def __init__(self, setup: EngineSetup, *, start_timeout_s: float = 120.0) -> None:
        self._setup, self._timeout_s = setup, start_timeout_s
        self._process: EngineProcess | None = None

    def start(self) -> StartReport:
        began, gbps = perf_counter(), self._setup.network_gbps
        said, self.wire = self._begin((replace(self._setup, tokenizer=None), self.keeps_weights))
        load_s = said.pop("load_s")
        paced = "as fast as they are" if gbps is None else f"paced to at most {gbps:g} Gbps: simulated by waiting"
        settings = {
            "engine": "transformers, disaggregated",
            **said,
            "crosses": self.crosses,
            "network_gbps": gbps,
            "network": f"pipes between two processes, {paced}",
            **self._setup.kv_settings(None),
        }
        return StartReport(load_s, (perf_counter() - began - load_s) * 1e3, settings)

    def _begin(self, asked: object) -> tuple[dict[str, Any], Wire]:
        """Start the model's process: what it says once it is ready, and the way to it."""
        threads = {"OMP_NUM_THREADS": str(self._setup.threads)}
        self._process = process = EngineProcess.ours(self._setup.baseline, CODE, threads, talk=True)
        with suppress(BrokenPipeError):  # it has ended, as the next line finds
            process.sends.send(asked)
        said: dict[str, Any] = process.first_word(self._timeout_s)
        return said, Wire(process.receives, process.sends, self._setup.network_gbps)

    def answer(self, request: Request, channel: Channel) -> Reply:
        """Raises ContextLengthError for more positions than the model has, RequestFailed, EngineFailed."""
        admitted_s, wire = perf_counter(), self.wire
        whole = len(request.prompt) + request.output.max_new_tokens
        if whole > self._setup.model.max_context:
            raise ContextLengthError(
                f"Prompt and output are {whole} tokens, and the model's context is {self._setup.model.max_context}; use a "
                "shorter prompt or a smaller output."
            )
        sent, received = wire.sent_bytes, wire.received_bytes
        self._computed_s = self._moved_s = 0.0
        try:
            reason = self._serve(request, channel)
        except (EOFError, OSError) as error:
            assert self._process is not None
            raise self._process.gone() from error
        return Reply(
            reason,
            cached_tokens=0,
            admitted_s=admitted_s,
            compute_ms=self._computed_s * 1e3,
            transfer_ms=self._moved_s * 1e3,
            sent_bytes=wire.sent_bytes - sent,
            received_bytes=wire.received_bytes - received,
        )

    @abstractmethod
    def _serve(self, request: Request, channel: Channel) -> str | None:
        """Tell the tokens; returns why there are no more, None where nobody wants more."""

    def _receive(self) -> Arrived:
        arrived = self.wire.receive()
        if "error" in arrived.said:
            raise RequestFailed(arrived.said["error"])
        if "computed" in arrived.said:  # the client waited for it: the model computed nothing meanwhile
            self._computed_s += arrived.said["computed"]
            self._moved_s += arrived.said["waited"] + arrived.flight_s
        return arrived

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class PartiallyAware(_Disaggregated):
    """The model's process knows which arguments of a step are weights and keeps those. KV is an argument and a result like
    any other: the client sends what it got back with the next step, and draws the tokens from the logits."""

    crosses = "KV and logits, each step"

    def _arguments(self) -> dict[str, Array]:
        """What comes along with each step beside KV."""
        return {}

    def _serve(self, request: Request, channel: Channel) -> str | None:
        from pensieve.device.sampler import greedy
        from pensieve.plugins.engines.remote_model import tensor_of

        ends, ids, kv = end_tokens(self._setup, request), request.prompt, dict[str, Array]()
        for left in reversed(range(request.output.max_new_tokens)):
            self.wire.send(step(ids), {**self._arguments(), **kv})
            arrays = self._receive().arrays
            drawn = int(greedy(tensor_of(arrays[LOGITS])))
            wanted = channel.tell(drawn)
            if drawn in ends:
                return "eos"
            if left and not wanted:
                return None
            ids, kv = array("i", [drawn]), {KV: arrays[KV]}
        return "length"


class SemanticBlind(PartiallyAware):
    """The model's process runs a function on what it is given and keeps nothing: weights are arguments too."""

    keeps_weights = False
    crosses = "weights, KV and logits, each step"

    def start(self) -> StartReport:
        from pensieve.plugins.engines.remote_model import weight_arrays

        report = super().start()
        self._weights = weight_arrays(plain_module(self._setup))
        return report

    def _arguments(self) -> dict[str, Array]:
        return self._weights


class FullyAware(_Disaggregated):
    """The model's process decodes: it keeps weights and KV, draws the tokens, and sends each id as soon as it has it.
    Whatever is sent meanwhile means that nobody wants more."""

    crosses = "token ids"

    def _serve(self, request: Request, channel: Channel) -> str | None:
        ends = end_tokens(self._setup, request)
        self.wire.send(generate(request.prompt, request.output.max_new_tokens, ends))
        stopped = last = False
        while not last:
            said = self._receive().said
            last, drawn = "computed" in said, said["token"]
            wanted = channel.tell(drawn)
            if not (wanted or last or stopped):
                self.wire.send({})
                stopped = True
        if drawn in ends:
            return "eos"
        return None if stopped else "length"
