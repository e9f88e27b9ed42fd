"""Disaggregated serving as engines: the client in this process, the model in another, three ways to divide what they hold.
docs/disaggregation.md has a table of them. KV lives as long as its request in all three: none is kept for the next turn.
"""

from abc import abstractmethod
from array import array
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import ContextLengthError, RequestFailed
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.process import EngineProcess
from pensieve.plugins.engines.transformers_peers import end_tokens
from pensieve.plugins.engines.weights import plain_module
from pensieve.plugins.engines.wire import KV, LOGITS, Array, Arrived, Wire, generate, step
from pensieve.serve.systems.base import Capabilities

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
        whole, most = len(request.prompt) + request.output.max_new_tokens, self._setup.model.max_context
        if whole > most:
            raise ContextLengthError(f"Prompt and output are {whole} tokens, and the model's context is {most}.")
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
