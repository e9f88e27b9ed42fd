"""What runs in the process of a replica: one engine, and the calls that reach it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pensieve.core.event import Event
from pensieve.core.plan import StartReport
from pensieve.core.request import History, Request
from pensieve.errors import WorkerError
from pensieve.lab.compose import build_system, build_tokenizer, check, check_free_memory, plan_trial
from pensieve.plugins.replicas.call_routing import CallRouting
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import AnsweringSystem
from pensieve.serve.systems.engine_system import EngineSystem

CRASHED = 70  # the exit status of a replica whose engine stopped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """The first thing that a turn's stream tells. request_id: by which it can be cancelled, at this replica."""

    replica: str
    request_id: int


@dataclass(frozen=True, slots=True)
class Described:
    """A replica that is ready."""

    replica: str
    report: StartReport
    settings: dict[str, Any]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica counts and holds at a moment. places: of each conversation that was asked for and is known."""

    replica: str
    counters: dict[str, float]
    gauges: dict[str, tuple[float, str]]
    places: dict[str, str]


class EngineReplica:
    """An actor of Ray Serve. Times that come and go are seconds since 1970, which processes agree on. Each call's first
    argument is for the router.

    An engine that crashed serves nobody any more, so it ends its process: Ray starts another, and whoever asked asks again.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """fields: of a trial's configuration."""
        from ray import serve

        self._id = str(serve.get_replica_context().replica_id.unique_id)
        self._system, self._report = _started(fields)
        clock = self._system.clock
        self._origin_s = time.time() - clock.now_s()

    async def __call__(self, _: CallRouting) -> Described:
        return Described(self._id, self._report, self._system.settings(), self._system.chunk_tokens)

    async def answer(self, routing: CallRouting, request: Request) -> AsyncIterator[Begun | list[Event]]:
        """One turn. Where the conversation's last one was served elsewhere, what was said before is its history here, found
        or computed again."""
        known = request.history
        if routing.home and routing.home != self._id and known is not None and known.lost != "edited":
            computed = min(known.tokens, max(routing.held_tokens - 1, 0))
            if computed:
                request = replace(request, history=History(computed, "restarted"))
        request = replace(request, intended_s=request.intended_s - self._origin_s)
        relay = _Relay(asyncio.get_running_loop())
        self._system.begin(request, relay)
        ended = False
        try:
            yield Begun(self._id, request.id)
            while not ended:
                events = await relay.happenings()
                ended = events[-1].turn is not None
                yield [self._as_told(event) for event in events]
        finally:
            if not ended:  # whoever asked has gone
                self._system.cancel(request.id, "cancelled")

    async def cancel(self, _: CallRouting, request_id: int, status: str) -> None:
        self._system.cancel(request_id, status)

    async def release(self, _: CallRouting, session: str) -> None:
        self._system.release(session)

    async def forget(self, _: CallRouting) -> None:
        """Everything; returns when it is done."""
        await asyncio.to_thread(self._system.forget, None)

    async def tell(self, _: CallRouting, sessions: tuple[str, ...]) -> ReplicaReport:
        places = {name: where for name in sessions if (where := self._system.places(name))}
        return ReplicaReport(self._id, self._system.counters(), self._system.gauges(), places)

    def _as_told(self, event: Event) -> Event:
        if event.turn is not None:
            moved(event.turn, self._origin_s)
        return event._replace(at_s=event.at_s + self._origin_s)


def moved(turn: TurnRecord, by_s: float) -> None:
    """All its times are later by so many seconds: those of another clock."""
    turn.shift(-by_s)
    turn.misses = tuple(
        miss if miss.evicted_s is None else replace(miss, evicted_s=miss.evicted_s + by_s) for miss in turn.misses
    )


def _started(fields: Mapping[str, Any]) -> tuple[AnsweringSystem, StartReport]:
    config = check(fields)
    plan = plan_trial(config)
    check_free_memory(plan)
    system = build_system(plan, build_tokenizer(config.model, plan.model.vocab, simulated=False))
    assert isinstance(system, EngineSystem) and not system.clock.virtual
    return system, system.start()


class _Relay:
    """The listener of one request: from the engine's thread to whoever streams."""

    streams = True

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def happenings(self) -> list[Event]:
        """At least one; all that have come."""
        events = [await self._events.get()]
        with suppress(asyncio.QueueEmpty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def happened(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def failed(self, error: WorkerError) -> None:
        _end_process(error)


def _end_process(error: WorkerError) -> None:
    log.error("%s This replica ends.", error)
    logging.shutdown()
    os._exit(CRASHED)
