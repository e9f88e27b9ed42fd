"""The replicas as Ray Serve has them: how they are started and called, and what they tell of themselves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from pensieve.core.event import Event
from pensieve.core.request import Request
from pensieve.errors import EngineFailed
from pensieve.plugins.engines.ray_cluster import RayCluster
from pensieve.plugins.replicas.call_routing import CallRouting, running, unregister
from pensieve.plugins.replicas.engine import Begun, Described, EngineReplica, ReplicaReport
from pensieve.plugins.replicas.router import SessionRouter

CALL_S = 30.0  # a call that is no turn may take so long
GLANCE_S = 2.0  # and one that somebody makes who may be told what was so a moment ago
START_S = 60.0  # and the first one, for which Ray learns where the replicas are
PLACES_S = 0.5  # for how long what replicas hold is told again without asking them

T = TypeVar("T")


_QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")


@dataclass(frozen=True, slots=True)
class Scaling:
    """least, most: replicas. turns: under way a replica that autoscaling aims at; up_s, down_s: for how long the load must
    have been above or below. drain_s: how long a replica that is to end may take for the turns it has."""

    least: int
    most: int
    turns: float = 8.0
    up_s: float = 10.0
    down_s: float = 300.0
    drain_s: float = 30.0


class Deployment:
    """Replicas of one engine. Calls of Ray are made by one thread, in an event loop of its own; any thread may call anything
    here.

    fields: of a trial's configuration, which each replica builds its engine from. gpus: of one replica. environment: of all
    its processes, over this one's.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        scaling: Scaling,
        router: str,
        *,
        seed: int = 0,
        gpus: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.fields, self.scaling, self.router = dict(fields), scaling, router
        self._seed, self._gpus = seed, gpus
        self._app = f"pensieve-{id(self):x}"
        self._cluster = RayCluster(scaling.most, gpus * scaling.most, environment=environment)
        self._asking = threading.Lock()  # of what follows
        self._told: dict[str, ReplicaReport] = {}  # by replica, those that ended included
        self._told_at = float("-inf")
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, connected: Callable[[], object] | None) -> Described:
        """Ray, then the replicas. connected: called in between. Raises EngineFailed with the reason of a replica that cannot
        start."""
        self._cluster.start()
        if connected is not None:
            connected()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # a slow answer is no news of a machine that computes
        self._handle = self._deployed()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pensieve-replicas", daemon=True)
        self._thread.start()
        return self.now(self._describe(), START_S)

    def _deployed(self) -> Any:
        s = self.scaling
        # Its own proxy stays out: it reads no bodies, where most sessions are named, and asks nobody for a key.
        serve.start(proxy_location="Disabled", logging_config=_QUIET)
        scale: dict[str, Any] = {"num_replicas": s.least}
        if s.most > s.least:
            often_s = min(1.0, s.up_s or 1.0)
            scale = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=s.least,
                    max_replicas=s.most,
                    target_ongoing_requests=s.turns,
                    upscale_delay_s=s.up_s,
                    downscale_delay_s=s.down_s,
                    metrics_interval_s=often_s,
                    look_back_period_s=max(2.0, often_s),
                )
            }
        deployment = serve.deployment(
            EngineReplica,
            name="engine",
            ray_actor_options={"num_cpus": 1, "num_gpus": self._gpus},
            max_ongoing_requests=1_000_000,  # who is let in is decided before, and a cancellation must never wait
            graceful_shutdown_timeout_s=s.drain_s,
            graceful_shutdown_wait_loop_s=0.2,
            health_check_period_s=2.0,
            max_constructor_retry_count=1,
            logging_config=_QUIET,
            request_router_config=RequestRouterConfig(
                request_router_class=f"{SessionRouter.__module__}.{SessionRouter.__qualname__}",
                request_router_kwargs={"router": self.router, "seed": self._seed},
            ),
            **scale,
        )
        try:
            return serve.run(deployment.bind(self.fields), name=self._app, route_prefix=None)
        except RuntimeError as error:
            told = str(error)
            with suppress(Exception):  # Ray tells the cause by another way, if it still can
                told = serve.status().applications[self._app].deployments["engine"].message or told
            raise EngineFailed(f"The replicas cannot start: {reason_in(told)}") from error

    def close(self) -> None:
        """Safe after a start that failed, and twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(Exception):
                self.now(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            with suppress(Exception):  # whatever it finds gone by now
                self._handle.shutdown()  # its router reports its load to Ray as long as it is there
        unregister(self._app)
        self._cluster.close()

    @property
    def up(self) -> list[str]:
        """The ids of the replicas that run now."""
        return running(self._app)

    # -- what they tell -----------------------------------------------------------------------------------------------

    def reports(self, homes: Callable[[], Mapping[str, list[str]]], fresh: bool = False) -> dict[str, ReplicaReport]:
        """Of each replica that there ever was, up to PLACES_S old; older where one has ended, or does not answer in time: it
        is not asked again at once, or everybody would wait for it. homes: by replica, whose places it tells.
        fresh: ask them all first, and wait longer."""
        patience_s = CALL_S if fresh else GLANCE_S
        if self._asking.acquire(timeout=patience_s):
            try:
                if fresh or time.monotonic() - self._told_at > PLACES_S:
                    with suppress(Late):
                        found = self.now(self.each("tell", homes(), patience_s), 2 * patience_s)
                        self._told |= {one.replica: one for one in found}
                    self._told_at = time.monotonic()
            finally:
                self._asking.release()
        return self._told

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _describe(self) -> Described:
        """The first call. It is one of the handle itself, which gets its router now and gives it to all that `options` makes
        of it; before, each of those would make one of its own."""
        described: Described = await self._handle.remote(CallRouting())
        return described

    def answers(self, routing: CallRouting, request: Request) -> AsyncIterator[Begun | list[Event]]:
        """See EngineReplica.answer."""
        stream: AsyncIterator[Begun | list[Event]]
        stream = self._handle.options(method_name="answer", stream=True).remote(routing, request)
        return stream

    async def call(self, method: str, routing: CallRouting, *arguments: Any) -> Any:
        return await self._handle.options(method_name=method).remote(routing, *arguments)

    async def each(
        self, method: str, homes: Mapping[str, list[str]] | None = None, patience_s: float = CALL_S
    ) -> list[Any]:
        """What each replica answers, but for those that end meanwhile or take longer. homes: an argument for each."""

        async def in_time(to: str, *arguments: Any) -> Any:
            async with asyncio.timeout(patience_s):
                return await self.call(method, CallRouting(to=to), *arguments)

        calls = [in_time(one, *(() if homes is None else (tuple(homes.get(one, ())),))) for one in self.up]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def quietly(self, method: str, routing: CallRouting, *arguments: Any) -> None:
        """A call to a replica that may be gone, and with it what the call is about."""
        with suppress(ray.exceptions.RayError):
            await self.call(method, routing, *arguments)

    def now(self, call: Coroutine[Any, Any, T], seconds: float = CALL_S) -> T:
        """Called from other threads, which wait for it."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(seconds)

    def soon(self, call: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._spawn, call)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        others = list(self._tasks)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def reason_in(account: str) -> str:
    """Of Ray's account of a replica that could not start, with its traceback: the sentence of our own error, else the last
    line that says something."""
    lines = [line.strip() for line in account.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("pensieve.errors.")]
    return ours[-1].partition(": ")[2] if ours else lines[-1] if lines else "Ray does not say why."
