"""An agent a process on a simulated machine: memory is counted, starts take what weights take over the link.

Processes take turns on the card, an iteration each, as they do without MPS. Bytes of a process are its weights and the KV of
what its request may come to; CUDA's own context is left out, so that more fit here than in reality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pensieve.errors import MemoryRanOut
from pensieve.plugins.engines.base import kv_settings
from pensieve.plugins.engines.token_by_token import Serving, Spent, TokenByToken
from pensieve.specs import HardwareSpec, ModelSpec
from pensieve.units import ceil_div, format_bytes


class _Processes(TokenByToken):
    takes_turns = True

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        super().__init__(model, hardware, chunk_tokens)
        self._chunk_tokens = chunk_tokens
        self._link_free_ns = self._starts = self._waited_ns = 0

    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        context, new = held, prompt - held
        for _ in range(count):
            yield Spent(self.computed_ns(context, new))
            context, new = context + new, 1

    def bytes_for(self, tokens: int) -> int:
        """Of a process whose conversation comes to so many tokens."""
        kv = ceil_div(tokens, self._chunk_tokens) * self._chunk_tokens * self.model.kv_bytes_per_token
        return self.model.weight_bytes + kv

    @property
    def memory_bytes(self) -> int:
        return self.hardware.gpu_memory_bytes * self.hardware.gpus

    def loaded_ns(self) -> int:
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
        return {
            "engine": "simulated, a process an agent",
            "device": self.hardware.name,
            "memory_bytes": self.memory_bytes,
            "weight_bytes": self.model.weight_bytes,
            **kv_settings(None, self.model.kv_bytes_per_token, self.model.dtype),
        }


def _tokens(one: Serving) -> int:
    return len(one.request.prompt) + one.request.output.max_new_tokens


@dataclass(slots=True)
class _Actor:
    """tokens: that its KV may come to. loaded_ns: when its weights are there. holds: its conversation was served before."""

    tokens: int
    loaded_ns: int
    warming: bool
    holds: bool = False


class RayKeepalive(_Processes):
    """See ray_agents.RayKeepalive. An actor whose next request has no room ends, and with it the agent's request."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        super().__init__(model, hardware, chunk_tokens)
        self._actors: dict[str, _Actor] = {}

    def accept(self, one: Serving) -> None:
        request, tokens = one.request, _tokens(one)
        actor = self._actors.pop(request.session, None) or self._taken_over(request.phase == "warmup")
        taken = sum(self.bytes_for(other.tokens) for other in self._actors.values())
        if taken + self.bytes_for(tokens) > self.memory_bytes:
            raise MemoryRanOut(
                f"{len(self._actors)} agents' processes hold {format_bytes(taken)}, and one more has no room in "
                f"{format_bytes(self.memory_bytes)}."
            )
        if actor is None:
            actor = _Actor(tokens, self.loaded_ns(), request.phase == "warmup")
        actor.tokens = tokens
        self._actors[request.session] = actor
        one.ready_ns = max(self.clock.now_ns(), actor.loaded_ns)

    def held_of(self, one: Serving) -> int:
        return len(one.request.prompt) if self._actors[one.request.session].holds else 0

    def leave(self, one: Serving) -> None:
        super().leave(one)
        actor = self._actors.get(one.request.session)
        if actor is not None:
            actor.holds = actor.holds or one.turn.stands

    def forget(self, session: str | None) -> None:
        super().forget(session)
        for name, actor in self._actors.items():
            actor.holds = actor.holds and session not in (None, name)

    def _taken_over(self, warming: bool) -> _Actor | None:
        """An actor that only warm-ups have used, where this request is none."""
        name = None if warming else next((name for name, actor in self._actors.items() if actor.warming), None)
        if name is None:
            return None
        actor = self._actors.pop(name)
        actor.warming = actor.holds = False
        return actor


class RayServerless(_Processes):
    """See ray_agents.RayServerless. Ray's queue starts as many at a time as memory has room for, in order of arrival."""

    def accept(self, one: Serving) -> None:
        if self.bytes_for(_tokens(one)) > self.memory_bytes:
            raise MemoryRanOut(f"One process needs more than {format_bytes(self.memory_bytes)}.")
        one.ready_ns = None
        self._begin([*self.queue, one])

    def leave(self, one: Serving) -> None:
        super().leave(one)
        self._begin([other for other in self.queue if other is not one])

    def _begin(self, wanted: list[Serving]) -> None:
        waiting = sorted((one for one in wanted if one.ready_ns is None), key=lambda one: one.request.id)
        taken = sum(self.bytes_for(_tokens(one)) for one in wanted if one.ready_ns is not None)
        for one in waiting:
            taken += self.bytes_for(_tokens(one))
            if taken > self.memory_bytes:
                return
            one.ready_ns = self.loaded_ns()
