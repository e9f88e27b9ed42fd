"""What stands for an engine of others on a simulated machine that computes a token of one request at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pensieve.core.machine import Clock, VirtualClock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Free, Length, Request
from pensieve.core.scheduler.active_request import noise_key
from pensieve.errors import MemoryRanOut
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.serve.transcript import Transcripts
from pensieve.sim.cost import simulated_cost
from pensieve.sim.worker import drawn_token
from pensieve.specs import HardwareSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Spent:
    """What one token cost: the nanoseconds that the model computed, those in which messages were under way, and their bytes
    each way as the client counts them (None: there is no network)."""

    computed_ns: int
    moved_ns: int = 0
    sent: int | None = None
    received: int | None = None


@dataclass(slots=True, eq=False)
class Serving:
    """ready_ns: when its first token may be computed; None: what it needs is not there yet. steps: its tokens, once it is
    admitted."""

    request: Request
    turn: TurnRecord
    ready_ns: int | None = None
    steps: Iterator[Spent] | None = None


class TokenByToken(ABC):
    """Requests are served in order of arrival, each to its end; or, where `takes_turns`, a token of each after the other."""

    takes_turns: ClassVar[bool] = False

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        self.clock: Clock = VirtualClock()
        self.can = Capabilities(max_in_flight=None if self.takes_turns else 1)
        self.model, self.hardware = model, hardware
        self._cost = simulated_cost(model, hardware, chunk_tokens)
        self.said = Transcripts()
        self.queue: deque[Serving] = deque()
        self._untold: list[Event] = []

    @abstractmethod
    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        """What each of `count` tokens after a prompt costs of which so many tokens are held."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """As the engine itself would report them."""

    def accept(self, one: Serving) -> None:
        """A request arrives. Sets ready_ns; raises MemoryRanOut."""
        one.ready_ns = self.clock.now_ns()

    def held_of(self, one: Serving) -> int:
        """Tokens of the history whose KV is there for this request."""
        return 0

    def leave(self, one: Serving) -> None:
        """A request has ended, however that was."""
        self.said.note(one.request, one.turn)

    # -- the System ---------------------------------------------------------------------------------------------------

    @property
    def load_ns(self) -> int:
        """Of the weights, over the link to the device."""
        return round(self.model.weight_bytes / self.hardware.gpus / self.hardware.h2d_bw * 1e9)

    def start(self) -> StartReport:
        return StartReport(self.load_ns / 1e9, 0.0, self.settings())

    def submit(self, request: Request) -> None:
        turn = TurnRecord.arrived(request, request.turn, self.clock.now_s())
        turn.h2d_bytes = turn.d2h_bytes = None
        one = Serving(request, turn)
        try:
            self.accept(one)
        except MemoryRanOut as error:
            self._untold.append(self._ended(one, "failed", error.reason, str(error)))
        else:
            self.queue.append(one)

    def cancel(self, request_id: int, status: str) -> None:
        one = next((one for one in self.queue if one.request.id == request_id), None)
        if one is not None:
            self.queue.remove(one)
            self._untold.append(self._ended(one, status, None))

    def poll(self, until_s: float | None) -> list[Event]:
        assert isinstance(self.clock, VirtualClock)
        until_ns = None if until_s is None else round(until_s * 1e9)
        events, self._untold = self._untold, []
        while not any(event.kind == "finished" for event in events):
            now = self.clock.now_ns()
            if until_ns is not None and now >= until_ns:
                break
            one = next((one for one in self.queue if one.ready_ns is not None and one.ready_ns <= now), None)
            if one is not None:
                events += self._step(one, self.clock)
                continue
            coming = [one.ready_ns for one in self.queue if one.ready_ns is not None]
            coming += [] if until_ns is None else [until_ns]
            if not coming:
                break
            self.clock.advance_to(min(coming))
        return events

    def forget(self, session: str | None) -> None:
        self.said.forget(session)

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.queue.clear()

    # -- how ----------------------------------------------------------------------------------------------------------

    def computed_ns(self, context: int, new: int) -> int:
        return round(self._cost.iteration_s([(context, context + new)], 1) * 1e9)

    def _step(self, one: Serving, clock: VirtualClock) -> list[Event]:
        """One token of this request."""
        request, turn = one.request, one.turn
        if one.steps is None:
            self._admit(one)
            one.steps = self.tokens(turn.gpu_hit_tokens or 0, len(request.prompt), request.output.max_new_tokens)
        spent = next(one.steps)
        clock.advance_to(clock.now_ns() + spent.computed_ns + spent.moved_ns)
        if spent.sent is not None and spent.received is not None:
            turn.sent_bytes = (turn.sent_bytes or 0) + spent.sent
            turn.received_bytes = (turn.received_bytes or 0) + spent.received
        turn.step(spent.computed_ns / 1e6, spent.moved_ns / 1e6)
        position = len(request.prompt) + len(turn.token_ids)
        drawn = drawn_token(noise_key(request.sampling, request.session, turn.turn), position, self.model.vocab)
        now_s, first = clock.now_s(), not turn.token_ids
        turn.token(drawn, None, now_s)
        events = [Event("first_token" if first else "token", request.id, now_s, token=drawn)]
        if len(turn.token_ids) == request.output.max_new_tokens:
            self.queue.remove(one)
            events.append(self._ended(one, "completed", "length"))
        elif self.takes_turns:
            self.queue.remove(one)
            self.queue.append(one)
        return events

    def _admit(self, one: Serving) -> None:
        request, turn = one.request, one.turn
        assert isinstance(request.output, Length | Free), "nothing here has logits to force a token on"
        prompt, history = len(request.prompt), self.said.history_of(request)
        turn.admitted_s = self.clock.now_s()
        turn.prompt_tokens, turn.history_tokens, turn.new_tokens = prompt, history, prompt - history
        turn.gpu_hit_tokens, turn.shared_hit_tokens = min(history, self.held_of(one)), 0
        turn.recomputed_tokens = history - turn.gpu_hit_tokens

    def _ended(self, one: Serving, status: str, reason: str | None, error: str | None = None) -> Event:
        one.turn.close(status, reason, self.clock.now_s(), error)
        self.leave(one)
        return Event("finished", one.request.id, self.clock.now_s(), turn=one.turn)
