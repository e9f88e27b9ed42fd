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

from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request
from pensieve.errors import WorkerError
from pensieve.lab.compose.build import build_system, check_free_memory
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import AnsweringSystem

CRASHED = 70  # the exit status of a replica whose engine stopped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Described:
    """A replica that is ready."""

    report: StartReport
    settings: dict[str, Any]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica counts and holds at a moment. places: of each conversation that was asked for and is known."""

    counters: dict[str, float]
    gauges: dict[str, tuple[float, str]]
    places: dict[str, str]


class EngineReplica:
    """An actor of Ray. Times that come and go are seconds since 1970, which processes agree on.

    An engine that crashed serves nobody any more, so it ends its process: another is started, and whoever asked asks again.
    """

    _system: AnsweringSystem
    _origin_s: float

    async def start(self, fields: Mapping[str, Any]) -> Described:
        """Serve from now on. fields: of a trial's configuration. Raises as build_system does."""
        return await asyncio.to_thread(self._start, fields)

    def _start(self, fields: Mapping[str, Any]) -> Described:
        config = check(fields)
        plan = plan_trial(config)
        check_free_memory(plan)
        self._system = build_system(plan, build_tokenizer(config.model, plan.model.vocab, simulated=False))
        report = self._system.start()
        self._origin_s = time.time() - self._system.clock.now_s()
        return Described(report, self._system.settings(), self._system.chunk_tokens)

    async def lives(self) -> None:
        """Never returns: whoever called it learns at once that the process has ended."""
        await asyncio.Event().wait()

    async def answer(self, request: Request) -> AsyncIterator[list[Event]]:
        """One turn. The first part is empty: from then on it can be cancelled."""
        relay = _Relay(asyncio.get_running_loop())
        self._system.begin(replace(request, intended_s=request.intended_s - self._origin_s), relay)
        ended = False
        try:
            yield []
            while not ended:
                events = await relay.happenings()
                ended = events[-1].turn is not None
                yield [self._as_told(event) for event in events]
        finally:
            if not ended:  # whoever asked has gone
                self._system.cancel(request.id, "cancelled")

    async def cancel(self, request_id: int, status: str) -> None:
        self._system.cancel(request_id, status)

    async def release(self, session: str) -> None:
        """Nothing where it holds none of the conversation."""
        self._system.release(session)

    async def forget(self) -> None:
        """Everything; returns when it is done."""
        await asyncio.to_thread(self._system.forget, None)

    async def tell(self, sessions: tuple[str, ...]) -> ReplicaReport:
        places = {name: where for name in sessions if (where := self._system.places(name))}
        return ReplicaReport(self._system.counters(), self._system.gauges(), places)

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
        log.error("%s This replica ends.", error)
        logging.shutdown()
        os._exit(CRASHED)
