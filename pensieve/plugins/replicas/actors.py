"""Replicas as actors of Ray: how they are started, called, and replaced where one ends."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as Late
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pensieve.errors import EngineFailed
from pensieve.plugins.engines.ray_cluster import ray_cluster
from pensieve.plugins.replicas.engine import Described, EngineReplica, ReplicaReport

CALL_S = 30.0  # a call that is no turn may take so long
GLANCE_S = 2.0  # and one that somebody makes who may be told what was so a moment ago
PLACES_S = 0.5  # for how long what replicas hold is told again without asking them
RETRY_S = 5.0  # after a start that failed

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Replica:
    """One actor, as routing.Known. number: its place among them, which the one that replaces it gets. in_flight: turns that
    it was given. homes: conversations whose last turn it served, and tokens that it may hold of each."""

    number: int
    actor: Any
    in_flight: int = 0
    homes: dict[str, int] = field(default_factory=dict)

    def held_tokens(self, session: str) -> int:
        return self.homes.get(session, 0)


class Actors:
    """`count` of them, from `start` until `close`. Ray is called by one thread, in an event loop of its own; any thread may
    call anything here but what says that it is for that loop.

    fields: of a trial's configuration, which each replica builds its engine from. gpus: of one replica. environment: of all
    its processes, over this one's.
    """

    def __init__(
        self, fields: Mapping[str, Any], count: int, *, gpus: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        self.fields, self.count, self._gpus, self._environment = dict(fields), count, gpus, environment
        self._open = ExitStack()  # the cluster
        self._up: dict[int, Replica] = {}
        self._some_up = asyncio.Event()
        self._told: dict[Replica, ReplicaReport] = {}  # those that ended included
        self._told_at = float("-inf")
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, connected: Callable[[], object] | None = None) -> Described:
        """Ray, then the replicas. connected: called in between; what it raises ends the start. Raises EngineFailed with the
        reason of a replica that cannot start."""
        self._open.enter_context(ray_cluster(self.count, self._gpus * self.count, environment=self._environment))
        if connected is not None:
            connected()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pensieve-replicas", daemon=True)
        self._thread.start()
        return self.now(self._all_begun(), None)

    def close(self) -> None:
        """Safe after a start that failed, and twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(Exception):
                self.now(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
        self._open.close()

    @property
    def up(self) -> list[Replica]:
        """Those that serve now, by number."""
        return [one for _, one in sorted(self._up.items())]

    # -- in the loop --------------------------------------------------------------------------------------------------

    async def some_up(self) -> list[Replica]:
        """Those that serve, once there are any."""
        await self._some_up.wait()
        return self.up

    def gone(self, replica: Replica) -> None:
        """It has ended."""
        if self._up.get(replica.number) is replica:
            del self._up[replica.number]
            if not self._up:
                self._some_up.clear()

    async def each(
        self, method: str, *arguments: Callable[[Replica], Any], patience_s: float = CALL_S
    ) -> dict[Replica, Any]:
        """What each replica answers, but for those that end meanwhile or take longer. arguments: for each."""

        async def in_time(to: Replica) -> Any:
            async with asyncio.timeout(patience_s):
                return await getattr(to.actor, method).remote(*(argument(to) for argument in arguments))

        up = self.up
        answers = await asyncio.gather(*map(in_time, up), return_exceptions=True)
        return {one: answer for one, answer in zip(up, answers, strict=True) if not isinstance(answer, BaseException)}

    async def _all_begun(self) -> Described:
        import ray

        try:
            begun = await asyncio.gather(*map(self._begin, range(self.count)))
        except ray.exceptions.RayError as error:
            raise EngineFailed(f"The replicas cannot start: {_reason(error)}") from error
        return begun[0]

    async def _begin(self, number: int) -> Described:
        replica = Replica(number, self._made())
        described: Described = await replica.actor.start.remote(self.fields)
        self._up[number] = replica
        self._some_up.set()
        self._spawn(self._watched(replica))
        return described

    def _made(self) -> Any:
        """An actor that was not started. Whoever is let in is decided before: a cancellation must never wait."""
        import ray

        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_restarts": 0, "max_concurrency": 1_000_000}
        return ray.remote(**options)(EngineReplica).remote()

    async def _watched(self, replica: Replica) -> None:
        """Wait for its end, and begin another of its number."""
        import ray

        with suppress(ray.exceptions.RayError):
            await replica.actor.lives.remote()
        self.gone(replica)
        while True:
            try:
                await self._begin(replica.number)
                return
            except ray.exceptions.RayError as error:
                log.error("A replica ended, and cannot be started again: %s", _reason(error))
                await asyncio.sleep(RETRY_S)

    async def _stop(self) -> None:
        import ray

        others = list(self._tasks)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for replica in self.up:
            ray.kill(replica.actor)

    # -- from other threads -------------------------------------------------------------------------------------------

    def reports(self, fresh: bool = False) -> dict[Replica, ReplicaReport]:
        """Of each replica that there ever was, up to PLACES_S old; older where one has ended, or does not answer in time: it
        is not asked again at once, or everybody would wait for it. fresh: ask them all first, and wait longer."""
        patience_s = CALL_S if fresh else GLANCE_S
        if fresh or time.monotonic() - self._told_at > PLACES_S:
            self._told_at = time.monotonic()  # whoever looks meanwhile is told what was so a moment ago
            with suppress(Late):
                asked = self.each("tell", lambda one: tuple(one.homes), patience_s=patience_s)
                self._told |= self.now(asked, 2 * patience_s)
            self._told_at = time.monotonic()
        return self._told

    def now(self, call: Coroutine[Any, Any, T], seconds: float | None = CALL_S) -> T:
        """Called from other threads, which wait for it."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(seconds)

    def soon(self, call: Coroutine[Any, Any, Any]) -> None:
        self._loop.call_soon_threadsafe(self._spawn, call)

    def _spawn(self, call: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reason(error: Exception) -> str:
    """The sentence of our own error, where one was raised in the replica."""
    return str(getattr(error, "cause", None) or error)
