"""The disaggregated baselines on a simulated machine: bytes from the shapes of the model, seconds from bytes and rates.

Nothing is sent. The sizes of messages are those of wire.py for the model's own shapes, so that they are what a trial
would count, but for what no ModelSpec has: the norms and biases among the weights (below 0.1 %) and their names in the head.
Compute is what the machine's cost model says of the iteration; a message takes its bytes over hardware.network_gbps and
hardware.network_latency_s. Neither direction carries two messages at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pensieve.core.clock import Clock, VirtualClock
from pensieve.core.event import Event
from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Length, Request
from pensieve.core.scheduler.active_request import noise_key
from pensieve.errors import ConfigError
from pensieve.plugins.engines.base import kv_settings
from pensieve.plugins.engines.disaggregated import wire as messages
from pensieve.plugins.engines.disaggregated.wire import KV, LOGITS, Array
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.serve.transcript import Transcripts
from pensieve.sim.cost import simulated_cost
from pensieve.sim.worker import drawn_token
from pensieve.specs import HardwareSpec, ModelSpec

_WORST = (1.0, 1.0)  # seconds that take as many bytes as any in a head


@dataclass(frozen=True, slots=True)
class Spent:
    """What one token cost: bytes each way as the client counts them, and the nanoseconds that passed until it had it, of
    which the model computed so many."""

    sent: int
    received: int
    computed_ns: int
    moved_ns: int


class _Simulated(ABC):
    """One request after the other, in order of arrival, as the real ones are served."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        if hardware.network_gbps is None:
            raise ConfigError(
                "hardware.network_gbps has no value, and a disaggregated baseline on a simulated machine needs it; set it."
            )
        self.clock: Clock = VirtualClock()
        self.can = Capabilities(max_in_flight=1)
        self.model, self._hardware = model, hardware
        self._bytes_s = hardware.network_gbps * 1e9 / 8
        self._cost = simulated_cost(model, hardware, chunk_tokens)
        self._said = Transcripts()
        self._queue: deque[tuple[Request, TurnRecord]] = deque()
        self._steps: Iterator[Spent] | None = None  # of the first in the queue, once it is admitted
        self._untold: list[Event] = []

    @abstractmethod
    def tokens(self, prompt: int, count: int) -> Iterator[Spent]:
        """What each of `count` tokens after a prompt of so many costs."""

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        load_s = self.model.weight_bytes / self._hardware.gpus / self._hardware.h2d_bw
        return StartReport(load_s, 0.0, self.settings())

    def submit(self, request: Request) -> None:
        turn = TurnRecord.arrived(request, request.turn, self.clock.now_s())
        turn.h2d_bytes = turn.d2h_bytes = None
        self._queue.append((request, turn))

    def cancel(self, request_id: int, status: str) -> None:
        for place, (request, turn) in enumerate(self._queue):
            if request.id == request_id:
                del self._queue[place]
                if place == 0:
                    self._steps = None
                self._untold.append(self._ended(request, turn, status, None))
                return

    def poll(self, until_s: float | None) -> list[Event]:
        assert isinstance(self.clock, VirtualClock)
        until_ns = None if until_s is None else round(until_s * 1e9)
        events, self._untold = self._untold, []
        while not any(event.kind == "finished" for event in events):
            if until_ns is not None and self.clock.now_ns() >= until_ns:
                break
            if not self._queue:
                if until_ns is not None:
                    self.clock.advance_to(until_ns)
                break
            events += self._step(self.clock)
        return events

    def forget(self, session: str | None) -> None:
        self._said.forget(session)

    def counters(self) -> dict[str, float]:
        return {}

    def settings(self) -> dict[str, Any]:
        h = self._hardware
        return {
            "engine": "simulated, disaggregated",
            "device": h.name,
            **kv_settings(None, self.model.kv_bytes_per_token, self.model.dtype),
            "network": f"simulated: {h.network_gbps:g} Gbps each way and {h.network_latency_s * 1e6:g} us one way",
            "network_gbps": h.network_gbps,
            "network_latency_s": h.network_latency_s,
            "bytes": "computed from the shapes of the model",
            "weight_bytes": self.model.weight_bytes,
        }

    def close(self) -> None:
        self._queue.clear()

    # -- how ----------------------------------------------------------------------------------------------------------

    def flight_ns(self, size: int) -> int:
        return round((size / self._bytes_s + self._hardware.network_latency_s) * 1e9)

    def computed_ns(self, context: int, new: int) -> int:
        return round(self._cost.iteration_s([(context, context + new)], 1) * 1e9)

    def _step(self, clock: VirtualClock) -> list[Event]:
        """One token of the first in the queue."""
        request, turn = self._queue[0]
        if self._steps is None:
            self._admit(request, turn)
            self._steps = self.tokens(len(request.prompt), request.output.max_new_tokens)
        spent = next(self._steps)
        clock.advance_to(clock.now_ns() + spent.computed_ns + spent.moved_ns)
        turn.sent_bytes = (turn.sent_bytes or 0) + spent.sent
        turn.received_bytes = (turn.received_bytes or 0) + spent.received
        turn.step(spent.computed_ns / 1e6, spent.moved_ns / 1e6)
        position = len(request.prompt) + len(turn.token_ids)
        key = noise_key(request.sampling, request.session, turn.turn)
        drawn = drawn_token(key, position, self.model.vocab)
        now_s = clock.now_s()
        first = not turn.token_ids
        turn.token(drawn, None, now_s)
        events = [Event("first_token" if first else "token", request.id, now_s, token=drawn)]
        if len(turn.token_ids) == request.output.max_new_tokens:
            self._queue.popleft()
            self._steps = None
            events.append(self._ended(request, turn, "completed", "length"))
        return events

    def _admit(self, request: Request, turn: TurnRecord) -> None:
        assert isinstance(request.output, Length | Free), "nothing here has logits to force a token on"
        prompt, history = len(request.prompt), self._said.history_of(request)
        turn.admitted_s = self.clock.now_s()
        turn.prompt_tokens, turn.history_tokens, turn.new_tokens = prompt, history, prompt - history
        turn.gpu_hit_tokens = turn.shared_hit_tokens = 0
        turn.recomputed_tokens = history

    def _ended(self, request: Request, turn: TurnRecord, status: str, reason: str | None) -> Event:
        turn.close(status, reason, self.clock.now_s())
        self._said.note(request, turn)
        return Event("finished", request.id, self.clock.now_s(), turn=turn)


class PartiallyAware(_Simulated):
    """See client.PartiallyAware."""

    weights_cross = False

    def tokens(self, prompt: int, count: int) -> Iterator[Spent]:
        context, new = 0, prompt
        for _ in range(count):
            kv = {KV: messages.kv_array(self.model, context)} if context else {}
            sent = messages.size(messages.step(_ids(new)), kv)
            if self.weights_cross:
                sent += self.model.weight_bytes
            back: dict[str, Array] = {LOGITS: messages.logits_array(self.model)}
            received = messages.size(
                messages.stepped(*_WORST), {**back, KV: messages.kv_array(self.model, context + new)}
            )
            flights = self.flight_ns(sent) + self.flight_ns(received)
            yield Spent(sent, received, self.computed_ns(context, new), flights)
            context, new = context + new, 1


class SemanticBlind(PartiallyAware):
    """See client.SemanticBlind."""

    weights_cross = True


class FullyAware(_Simulated):
    """See client.FullyAware. A token travels while the next is computed: only the first and the way of the prompt are waited
    for."""

    def tokens(self, prompt: int, count: int) -> Iterator[Spent]:
        asked = messages.size(messages.generate(_ids(prompt), count, [self.model.vocab]))
        context, new = 0, prompt
        for number in range(1, count + 1):
            said = messages.token(self.model.vocab)
            if number == count:
                said = messages.last_token(self.model.vocab, *_WORST)
            received = messages.size(said)
            first = number == 1
            moved = self.flight_ns(asked) + self.flight_ns(received) if first else 0
            yield Spent(asked if first else 0, received, self.computed_ns(context, new), moved)
            context, new = context + new, 1


def _ids(count: int) -> array[int]:
    return array("i", [0] * count)
