"""Disaggregated serving as engines: the client in this process, the model in another, three ways to divide what they hold.

| baseline        | weights      | KV           | what crosses, a token                                   |
|-----------------|--------------|--------------|---------------------------------------------------------|
| semantic_blind  | the client's | the client's | weights, KV of the context, back: logits and all the KV |
| partially_aware | stay         | the client's | KV of the context, back: logits and all the KV          |
| fully_aware     | stay         | stays        | the token id, back                                      |

KV lives as long as its request in all three, so nothing is kept from one turn to the next.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import ContextLengthError, RequestFailed
from pensieve.plugins.engines import wire as messages
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply, kv_settings
from pensieve.plugins.engines.process import EngineProcess
from pensieve.plugins.engines.transformers_peers import end_tokens
from pensieve.plugins.engines.weights import plain_module
from pensieve.plugins.engines.wire import KV, LOGITS, Array, Arrived, Wire
from pensieve.serve.systems.base import Capabilities

CODE = "from pensieve.plugins.engines.remote_model import main; main()"


@dataclass(slots=True)
class _Spent:
    """Seconds of one request: what the model computed, and what was waited for on the way to it and back."""

    computed: float = 0.0
    moved: float = 0.0

    def add(self, arrived: Arrived) -> None:
        """A reply that the client waited for: the model computed nothing meanwhile."""
        self.computed += arrived.said["computed"]
        self.moved += arrived.said["waited"] + arrived.flight_s


class _Disaggregated(OutsideEngine):
    """start_timeout_s: until the model's process must be ready.

    hardware.network_gbps paces what crosses, as a network of that rate would; without it, it goes as fast as pipes take it.
    Bytes are those of the messages as they are serialised, their heads included.
    """

    keeps_weights = True
    crosses: str
    wire: Wire

    def __init__(self, setup: EngineSetup, *, start_timeout_s: float = 120.0) -> None:
        self.can = Capabilities(max_in_flight=1)
        self.at_once = 1
        self._setup, self._timeout_s = setup, start_timeout_s
        self._process: EngineProcess | None = None

    def start(self) -> StartReport:
        began, setup = perf_counter(), self._setup
        said, self.wire = self._begin(replace(setup, tokenizer=None), self.keeps_weights)
        load_s, gbps = said.pop("load_s"), setup.network_gbps
        paced = "as fast as they are" if gbps is None else f"paced to at most {gbps:g} Gbps: simulated by waiting"
        settings = {
            "engine": "transformers, disaggregated",
            **said,
            "crosses": self.crosses,
            "network_gbps": gbps,
            "network": f"pipes between two processes, {paced}",
            **kv_settings(None, setup.model.kv_bytes_per_token, setup.model.dtype),
        }
        return StartReport(load_s, (perf_counter() - began - load_s) * 1e3, settings)

    def _begin(self, *asked: Any) -> tuple[dict[str, Any], Wire]:
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
        spent = _Spent()
        try:
            reason = self._serve(request, channel, spent)
        except (EOFError, OSError) as error:
            assert self._process is not None
            raise self._process.failed("ended while it served requests") from error
        return Reply(
            reason,
            cached_tokens=0,
            admitted_s=admitted_s,
            compute_ms=spent.computed * 1e3,
            transfer_ms=spent.moved * 1e3,
            sent_bytes=wire.sent_bytes - sent,
            received_bytes=wire.received_bytes - received,
        )

    @abstractmethod
    def _serve(self, request: Request, channel: Channel, spent: _Spent) -> str | None:
        """Tell the tokens; returns why there are no more, None where nobody wants more."""

    def _receive(self) -> Arrived:
        arrived = self.wire.receive()
        if "error" in arrived.said:
            raise RequestFailed(arrived.said["error"])
        return arrived

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class PartiallyAware(_Disaggregated):
    """The model's process knows which arguments of a step are weights and keeps those. KV is an argument and a result like
    any other: the client sends what it got back with the next step, and draws the tokens from the logits. arguments: what
    comes along with each step beside KV."""

    crosses = "KV and logits, each step"
    arguments: dict[str, Array]

    def start(self) -> StartReport:
        self.arguments = {}
        return super().start()

    def _serve(self, request: Request, channel: Channel, spent: _Spent) -> str | None:
        from pensieve.device.sampler import greedy
        from pensieve.plugins.engines.remote_model import tensor_of

        ends, ids, kv = end_tokens(self._setup, request), request.prompt, dict[str, Array]()
        for number in range(1, request.output.max_new_tokens + 1):
            self.wire.send(messages.step(ids), {**self.arguments, **kv})
            arrived = self._receive()
            spent.add(arrived)
            kv = {KV: arrived.arrays[KV]}
            drawn = int(greedy(tensor_of(arrived.arrays[LOGITS])))
            wanted = channel.tell(drawn)
            if drawn in ends:
                return "eos"
            if number < request.output.max_new_tokens and not wanted:
                return None
            ids = array("i", [drawn])
        return "length"


class SemanticBlind(PartiallyAware):
    """The model's process runs a function on what it is given and keeps nothing: weights are arguments too."""

    keeps_weights = False
    crosses = "weights, KV and logits, each step"

    def start(self) -> StartReport:
        from pensieve.plugins.engines.remote_model import weight_arrays

        report = super().start()
        self.arguments = weight_arrays(plain_module(self._setup))
        return report


class FullyAware(_Disaggregated):
    """The model's process decodes: it keeps weights and KV, draws the tokens, and sends each id as soon as it has it.
    Whatever is sent meanwhile means that nobody wants more."""

    crosses = "token ids"

    def _serve(self, request: Request, channel: Channel, spent: _Spent) -> str | None:
        ends = end_tokens(self._setup, request)
        self.wire.send(messages.generate(request.prompt, request.output.max_new_tokens, ends))
        stopped = False
        while True:
            arrived = self._receive()
            drawn = arrived.said["token"]
            wanted = channel.tell(drawn)
            if "computed" in arrived.said:  # the last one
                spent.add(arrived)
                break
            if not wanted and not stopped:
                self.wire.send({})
                stopped = True
        if drawn in ends:
            return "eos"
        return None if stopped else "length"
