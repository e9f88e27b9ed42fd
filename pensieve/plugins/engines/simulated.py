"""What stands for an engine of others on a simulated machine that computes a token of one request at a time.

Agents (ray_keepalive, ray_serverless): processes take turns on the card, an iteration each, as they do without MPS. CUDA's
own context is left out of their bytes, so that more fit here than in reality.

Disaggregated (semantic_blind, partially_aware, fully_aware): nothing is sent. Messages have the sizes of wire.py for the
model's own shapes, but for norms and biases among the weights (below 0.1 %) and their names in the head. They take
hardware.network_gbps and hardware.network_latency_s; neither direction carries two at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request
from pensieve.core.scheduler.active_request import noise_key
from pensieve.errors import ConfigError, MemoryRanOut
from pensieve.plugins.engines import wire
from pensieve.plugins.engines.wire import KV, LOGITS, Array
from pensieve.serve.record import Transcripts, TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.sim.worker import VirtualClock, drawn_token, simulated_cost
from pensieve.specs import HardwareSpec, ModelSpec
from pensieve.units import ceil_div, format_bytes


@dataclass(frozen=True, slots=True)
class Spent:
    """What one token cost: the nanoseconds that the model computed, those in which messages were under way, and their bytes
    each way as the client counts them (0 received: there is no network)."""

    computed_ns: int
    moved_ns: int = 0
    sent: int = 0
    received: int = 0


@dataclass(slots=True, eq=False)
class Serving:
    """longest: tokens that its KV may come to. ready_ns: when its first token may be computed; None: what it needs is not
    there yet. steps: its tokens, once it is admitted."""

    request: Request
    turn: TurnRecord
    longest: int
    ready_ns: int | None = None
    steps: Iterator[Spent] | None = None


class TokenByToken(ABC):
    """Requests are served in order of arrival, each to its end; or, where it `takes_turns`, a token of each after the other.
    Of a prompt it has nothing but what `_held` says."""

    takes_turns: ClassVar[bool] = False
    engine: ClassVar[str]

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        self.clock = VirtualClock()
        self.can = Capabilities(max_in_flight=None if self.takes_turns else 1)
        self.model, self.hardware, self._chunk_tokens = model, hardware, chunk_tokens
        self._cost = simulated_cost(model, hardware, chunk_tokens)
        self.load_ns = round(model.weight_bytes / hardware.gpus / hardware.h2d_bw * 1e9)  # over the link to the device
        self._said = Transcripts()
        self._queue: deque[Serving] = deque()
        self._untold: list[Event] = []

    @abstractmethod
    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        """What each of `count` tokens after a prompt costs of which so many tokens are held."""

    def _accept(self, one: Serving) -> None:
        """A request arrives. Sets ready_ns; raises MemoryRanOut."""
        one.ready_ns = self.clock.now_ns()

    def _held(self, one: Serving) -> int:
        """Tokens of the history whose KV is there for this request."""
        return 0

    def _leave(self, one: Serving) -> None:
        """A request has ended, however that was."""
        self._said.note(one.request, one.turn)

    # -- the System ---------------------------------------------------------------------------------------------------

    def start(self) -> StartReport:
        return StartReport(self.load_ns / 1e9, 0.0, self.settings())

    def submit(self, request: Request) -> None:
        turn = TurnRecord.arrived(request, request.turn, self.clock.now_s())
        turn.h2d_bytes = turn.d2h_bytes = None
        one = Serving(request, turn, len(request.prompt) + request.output.max_new_tokens)
        try:
            self._accept(one)
        except MemoryRanOut as error:
            self._untold.append(self._ended(one, "failed", error.reason, str(error)))
        else:
            self._queue.append(one)

    def cancel(self, request_id: int, status: str) -> None:
        for one in [one for one in self._queue if one.request.id == request_id]:
            self._queue.remove(one)
            self._untold.append(self._ended(one, status, None))

    def poll(self, until_s: float | None) -> list[Event]:
        until_ns = None if until_s is None else round(until_s * 1e9)
        events, self._untold = self._untold, []
        while not any(event.kind == "finished" for event in events):
            now = self.clock.now_ns()
            if until_ns is not None and now >= until_ns:
                break
            ready = [(one.ready_ns, one) for one in self._queue if one.ready_ns is not None]
            one = next((one for at_ns, one in ready if at_ns <= now), None)
            if one is not None:
                events += self._step(one)
                continue
            coming = [at_ns for at_ns, _ in ready] + ([] if until_ns is None else [until_ns])
            if not coming:
                break
            self.clock.advance_to(min(coming))
        return events

    def forget(self, session: str | None) -> None:
        self._said.forget(session)

    def counters(self) -> dict[str, float]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {
            "engine": f"simulated, {self.engine}",
            "device": self.hardware.name,
            "weight_bytes": self.model.weight_bytes,
            **dict.fromkeys(("gpu_tokens", "gpu_bytes")),
            **dict.fromkeys(("cpu_tokens", "cpu_bytes"), 0),
            "kv_bytes_per_token": self.model.kv_bytes_per_token,
            "dtype": self.model.dtype,
        }

    def close(self) -> None:
        self._queue.clear()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _computed_ns(self, context: int, new: int) -> int:
        return round(self._cost.iteration_s([(context, context + new)], 1) * 1e9)

    def _step(self, one: Serving) -> list[Event]:
        """One token of this request."""
        request, turn = one.request, one.turn
        if one.steps is None:
            prompt, history = len(request.prompt), self._said.history_of(request)
            turn.admitted_s = self.clock.now_s()
            turn.prompt_tokens, turn.history_tokens, turn.new_tokens = prompt, history, prompt - history
            turn.gpu_hit_tokens, turn.shared_hit_tokens = min(history, self._held(one)), 0
            turn.recomputed_tokens = history - turn.gpu_hit_tokens
            one.steps = self.tokens(turn.gpu_hit_tokens, prompt, request.output.max_new_tokens)
        spent = next(one.steps)
        self.clock.advance_to(self.clock.now_ns() + spent.computed_ns + spent.moved_ns)
        if spent.received:
            turn.sent_bytes = (turn.sent_bytes or 0) + spent.sent
            turn.received_bytes = (turn.received_bytes or 0) + spent.received
        turn.step(spent.computed_ns / 1e6, spent.moved_ns / 1e6)
        position = len(request.prompt) + len(turn.token_ids)
        drawn = drawn_token(noise_key(request.sampling, request.session, turn.turn), position, self.model.vocab)
        now_s, first = self.clock.now_s(), not turn.token_ids
        turn.token(drawn, None, now_s)
        events = [Event("first_token" if first else "token", request.id, now_s, token=drawn)]
        done = len(turn.token_ids) == request.output.max_new_tokens
        if done or self.takes_turns:
            self._queue.remove(one)
        if done:
            events.append(self._ended(one, "completed", "length"))
        elif self.takes_turns:
            self._queue.append(one)
        return events

    def _ended(self, one: Serving, status: str, reason: str | None, error: str | None = None) -> Event:
        one.turn.close(status, reason, self.clock.now_s(), error)
        self._leave(one)
        return Event("finished", one.request.id, self.clock.now_s(), turn=one.turn)


# -- agents -----------------------------------------------------------------------------------------------------------------


class _Processes(TokenByToken):
    takes_turns = True
    engine = "a process an agent"

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        super().__init__(model, hardware, chunk_tokens)
        self._memory_bytes = hardware.gpu_memory_bytes * hardware.gpus
        self._link_free_ns = self._starts = self._waited_ns = 0

    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        yield Spent(self._computed_ns(held, prompt - held))
        for context in range(prompt, prompt + count - 1):
            yield Spent(self._computed_ns(context, 1))

    def _bytes(self, longest: int) -> int:
        """Of a process."""
        kv = ceil_div(longest, self._chunk_tokens) * self._chunk_tokens * self.model.kv_bytes_per_token
        return self.model.weight_bytes + kv

    def _loaded_ns(self) -> int:
        """When the weights of a process are there that begins now. They cross the link one process after the other."""
        now = self.clock.now_ns()
        self._link_free_ns = max(now, self._link_free_ns) + self.load_ns
        self._starts += 1
        self._waited_ns += self._link_free_ns - now
        return self._link_free_ns

    def counters(self) -> dict[str, float]:
        return {
            "process_starts": float(self._starts),
            "process_load_ms": self._starts * self.load_ns / 1e6,
            "process_start_ms": self._waited_ns / 1e6,
        }

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "memory_bytes": self._memory_bytes}


@dataclass(slots=True)
class _Actor:
    """longest: tokens that its KV may come to. loaded_ns: when its weights are there. holds: its conversation was served
    before."""

    longest: int
    loaded_ns: int
    warming: bool
    holds: bool = False


class RayKeepalive(_Processes):
    """See ray_agents.RayKeepalive. An actor whose next request has no room ends, and with it the agent's request."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        super().__init__(model, hardware, chunk_tokens)
        self._actors: dict[str, _Actor] = {}

    def _accept(self, one: Serving) -> None:
        session, warming = one.request.session, one.request.phase == "warmup"
        actor = self._actors.pop(session, None) or (None if warming else self._taken_over())
        taken = sum(self._bytes(other.longest) for other in self._actors.values())
        if taken + self._bytes(one.longest) > self._memory_bytes:
            raise MemoryRanOut(
                f"{len(self._actors)} agents' processes hold {format_bytes(taken)}, and one more has no room in "
                f"{format_bytes(self._memory_bytes)}."
            )
        self._actors[session] = actor = actor or _Actor(one.longest, self._loaded_ns(), warming)
        actor.longest = one.longest
        one.ready_ns = max(self.clock.now_ns(), actor.loaded_ns)

    def _held(self, one: Serving) -> int:
        return len(one.request.prompt) if self._actors[one.request.session].holds else 0

    def _leave(self, one: Serving) -> None:
        super()._leave(one)
        actor = self._actors.get(one.request.session)
        if actor is not None:
            actor.holds = actor.holds or one.turn.stands

    def _taken_over(self) -> _Actor | None:
        """An actor that only warm-ups have used."""
        name = next((name for name, actor in self._actors.items() if actor.warming), None)
        if name is None:
            return None
        actor = self._actors.pop(name)
        actor.warming = actor.holds = False
        return actor


class RayServerless(_Processes):
    """See ray_agents.RayServerless. Ray's queue starts as many at a time as memory has room for, in order of arrival."""

    def _accept(self, one: Serving) -> None:
        if self._bytes(one.longest) > self._memory_bytes:
            raise MemoryRanOut(f"One process needs more than {format_bytes(self._memory_bytes)}.")
        self._begin([*self._queue, one])

    def _leave(self, one: Serving) -> None:
        super()._leave(one)
        self._begin([other for other in self._queue if other is not one])

    def _begin(self, wanted: list[Serving]) -> None:
        waiting = sorted((one for one in wanted if one.ready_ns is None), key=lambda one: one.request.id)
        taken = sum(self._bytes(one.longest) for one in wanted if one.ready_ns is not None)
        for one in waiting:
            taken += self._bytes(one.longest)
            if taken > self._memory_bytes:
                return
            one.ready_ns = self._loaded_ns()


# -- a model in another process ---------------------------------------------------------------------------------------------

_WORST = (1.0, 1.0)  # seconds that take as many bytes as any in a head


class _Disaggregated(TokenByToken):
    """One request after the other, in order of arrival, as the real ones are served."""

    engine = "disaggregated"

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        if hardware.network_gbps is None:
            raise ConfigError(
                "hardware.network_gbps has no value, and a disaggregated baseline on a simulated machine needs it; set it."
            )
        super().__init__(model, hardware, chunk_tokens)
        self._bytes_s = hardware.network_gbps * 1e9 / 8

    def settings(self) -> dict[str, Any]:
        h = self.hardware
        return {
            **super().settings(),
            "network": f"simulated: {h.network_gbps:g} Gbps each way and {h.network_latency_s * 1e6:g} us one way",
            "network_gbps": h.network_gbps,
            "network_latency_s": h.network_latency_s,
            "bytes": "computed from the shapes of the model",
        }

    def _flight_ns(self, size: int) -> int:
        return round((size / self._bytes_s + self.hardware.network_latency_s) * 1e9)


class PartiallyAware(_Disaggregated):
    """See disaggregated.PartiallyAware."""

    weights_cross = False

    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        model, context, new = self.model, 0, prompt
        logits = {LOGITS: Array(model.dtype, (model.vocab,))}
        for _ in range(count):
            kv = {KV: wire.kv_array(model, context)} if context else {}
            sent = wire.size(wire.step(_ids(new)), kv) + model.weight_bytes * self.weights_cross
            back = {**logits, KV: wire.kv_array(model, context + new)}
            received = wire.size(wire.computed(*_WORST), back)
            flights_ns = self._flight_ns(sent) + self._flight_ns(received)
            yield Spent(self._computed_ns(context, new), flights_ns, sent, received)
            context, new = context + new, 1


class SemanticBlind(PartiallyAware):
    """See disaggregated.SemanticBlind."""

    weights_cross = True


class FullyAware(_Disaggregated):
    """See disaggregated.FullyAware. A token travels while the next is computed: only the first and the way of the prompt are
    waited for."""

    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        vocab, context, new = self.model.vocab, 0, prompt
        sent = wire.size(wire.generate(_ids(prompt), count, [vocab]))
        for left in reversed(range(count)):
            received = wire.size({"token": vocab} if left else wire.computed(*_WORST, vocab))
            moved_ns = self._flight_ns(sent) + self._flight_ns(received) if sent else 0
            yield Spent(self._computed_ns(context, new), moved_ns, sent, received)
            context, new, sent = context + new, 1, 0


def _ids(count: int) -> array[int]:
    return array("i", [0] * count)
