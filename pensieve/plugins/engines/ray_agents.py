"""Agents on Ray, as they are served where nobody shares an engine: a process an agent, or a process a step."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import MemoryRanOut, RequestFailed, RequestRefused, refused
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply, kv_settings
from pensieve.plugins.engines.process import MemoryWatch, forbid_more
from pensieve.plugins.engines.ray_cluster import RayCluster, check_ray, ray_version, remote
from pensieve.plugins.engines.weights import model_folder
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.units import format_bytes

AT_ONCE = 256  # agents whose steps may wait at a time
WAKE_S = 0.25  # how long Ray is waited for before whoever waits looks whether this engine is being closed
GPU_SHARE = 0.01  # so that the device's memory is the limit, and not Ray's count of devices


@dataclass(frozen=True, slots=True)
class _Actor:
    """since_s: when it was begun. warming: all that it has served were warm-ups."""

    handle: Any
    pid: int
    since_s: float
    warming: bool


class _RayAgents(OutsideEngine):
    """Fields of both baselines.

    Each process has KV for the workload's longest conversation, else for all of cache.gpu.
    start_timeout_s: until Ray must be ready.

    hardware.cpu_memory is what the processes of all agents may have resident together: the one that was started last is
    killed beyond it. Without it Ray kills when the machine itself is nearly full. A process packs its weights where an engine
    would whose limit is its share: that limit by the number of processes that are there at a time.
    """

    def __init__(self, setup: EngineSetup, *, start_timeout_s: float = 120.0) -> None:
        self._setup = setup
        self._kv_tokens = (
            setup.longest_tokens or setup.kv_tokens
        ) + setup.block_tokens  # the last one is filled in part
        gpus = 1 if setup.device.startswith("cuda") else 0
        self._gpu_share = GPU_SHARE * gpus
        self._cluster = RayCluster(
            setup.threads, gpus, killer=setup.memory_bytes is None, start_timeout_s=start_timeout_s
        )
        self._watch: MemoryWatch | None = None
        self._killed: set[int] = set()
        self._starts: list[Started] = []
        self._lock = threading.Lock()
        self._closing = False
        self._waiting = 0  # threads that Ray owes a result
        self._left = threading.Condition()
        self.at_once = AT_ONCE

    @property
    @abstractmethod
    def _at_a_time(self) -> int:
        """Processes that hold a model at a time when all requests of the workload are served."""

    @property
    def _limits(self) -> tuple[int | None, int | None]:
        """What the kernel grants a process at most, since it may be the only one, and its share; None: what is there."""
        limit = self._setup.memory_bytes
        return limit, None if limit is None else limit // self._at_a_time

    def check(self) -> None:
        check_ray(f"baseline={self._setup.baseline}")

    def identity(self) -> dict[str, str]:
        return {"ray": ray_version()}

    def start(self) -> StartReport:
        """Starts Ray, and no model: that is the agents' own, or the steps'."""
        self.check()
        began = time.perf_counter()
        folder = model_folder(self._setup)  # as any model comes: a file that each process reads
        self._setup = replace(self._setup, weights=str(folder), tokenizer=None)
        self._cluster.start()
        self._watch = MemoryWatch(self._setup.memory_bytes, self._processes, self._kill)
        self._watch.__enter__()
        settings = {
            "engine": "Ray",
            "version": ray_version(),
            "weights_folder": Path(folder).name,
            "memory_bytes": self._setup.memory_bytes,
            "kv_tokens_a_process": self._kv_tokens,
            "threads": self._setup.threads,
            # As many times kv_tokens_a_process as there are processes.
            **kv_settings(None, self._setup.model.kv_bytes_per_token, self._setup.model.dtype),
        }
        return StartReport(0.0, (time.perf_counter() - began) * 1e3, settings)

    @abstractmethod
    def _processes(self) -> Mapping[int, float]:
        """The processes that hold a model or are about to, and when each was started."""

    def _kill(self, pid: int) -> None:
        self._killed.add(pid)
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()

    def _result(self, promised: Any) -> Any:
        """What Ray comes up with; RequestFailed once this engine is being closed: a Ray that is gone answers nobody, ever."""
        import ray

        with self._left:
            self._waiting += 1
        try:
            while not self._closing:
                done, _ = ray.wait([promised], timeout=WAKE_S)
                if done:
                    return ray.get(done[0])
            raise RequestFailed("The engine was closed.")
        finally:
            with self._left:
                self._waiting -= 1
                self._left.notify_all()

    def _failure(self, error: Exception, pid: int | None) -> Exception:
        """What an error of Ray means for the request whose process had that id."""
        import ray

        cause = getattr(error, "cause", None)
        if isinstance(cause, (RequestRefused, RequestFailed)):
            return cause
        if isinstance(cause, MemoryError) or isinstance(error, ray.exceptions.OutOfMemoryError) or pid in self._killed:
            return self._ran_out()
        died = isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError))
        if died and self._killed and pid is None:
            return self._ran_out()
        return RequestFailed(f"Ray failed the request: {cause or error}")

    def _ran_out(self) -> MemoryRanOut:
        limit = self._setup.memory_bytes
        held = "the memory of this machine" if limit is None else format_bytes(limit)
        return MemoryRanOut(f"An agent's process ran out of memory: {held} is what all of them have together.")

    def counters(self) -> dict[str, float]:
        starts = list(self._starts)
        peak = {} if self._watch is None else {"processes_peak_bytes": float(self._watch.peak_bytes)}
        return {
            "process_starts": float(len(starts)),
            "process_load_ms": sum(one.load_s for one in starts) * 1e3,
            "process_start_ms": sum(one.start_s for one in starts) * 1e3,
            **peak,
        }

    def close(self) -> None:
        """Requests under way fail."""
        self._closing = True
        with self._left:
            self._left.wait_for(lambda: not self._waiting, timeout=4 * WAKE_S)
        if self._watch is not None:
            self._watch.close()
        self._cluster.close()


class RayKeepalive(_RayAgents):
    """An actor an agent: it holds the model and the agent's KV for itself, and stays alive between steps.

    Actors are started one after another, so that the ramp ends at the first one that memory has no room for: it is killed,
    no other is started, and agents without one fail. An actor whose conversation was a warm-up is taken over, empty, by the
    next agent that has none.
    """

    def __init__(self, setup: EngineSetup, **fields: Any) -> None:
        super().__init__(setup, **fields)
        self.can = Capabilities(cancels=False)
        self._actors: dict[str, _Actor] = {}
        self._full = False

    @property
    def _at_a_time(self) -> int:
        return max(1, self._setup.conversations or 1)

    def answer(self, request: Request, channel: Channel) -> Reply:
        import ray

        with self._lock:  # one process starts at a time
            if self._closing:
                raise RequestFailed("The engine was closed.")
            actor = self._actors.get(request.session) or self._taken_over(request) or self._begin(request)
        try:
            reply: Reply = self._result(actor.handle.answer.remote(request))
        except ray.exceptions.RayError as error:
            raise self._failure(error, actor.pid) from error
        return reply

    def _taken_over(self, request: Request) -> _Actor | None:
        """An actor that only warm-ups have used, where this request is none."""
        import ray

        if request.phase == "warmup":
            return None
        name = next((name for name, actor in self._actors.items() if actor.warming), None)
        if name is None:
            return None
        actor = self._actors.pop(name)
        try:
            self._result(actor.handle.forget.remote(None))
        except ray.exceptions.RayError:  # it died: the agent needs one of its own
            return None
        self._actors[request.session] = replaced = replace(actor, warming=False)
        return replaced

    def _begin(self, request: Request) -> _Actor:
        import ray

        if self._full:
            raise self._ran_out()
        options = {"num_cpus": 0, "num_gpus": self._gpu_share, "max_restarts": 0}
        handle = remote(Replica, **options).remote(self._setup, self._kv_tokens, *self._limits)
        pid = None
        try:
            pid = self._result(handle.pid.remote())
            self._actors[request.session] = actor = _Actor(handle, pid, time.monotonic(), request.phase == "warmup")
            self._starts.append(self._result(handle.load.remote()))
        except ray.exceptions.RayError as error:
            self._actors.pop(request.session, None)
            failure = self._failure(error, pid)
            self._full = isinstance(failure, MemoryRanOut)
            raise failure from error
        return actor

    def _processes(self) -> Mapping[int, float]:
        return {one.pid: one.since_s for one in list(self._actors.values()) if one.pid not in self._killed}

    def forget(self, session: str | None) -> None:
        import ray

        chosen = self._actors.values() if session is None else filter(None, [self._actors.get(session)])
        for actor in list(chosen):
            with suppress(ray.exceptions.RayError, RequestFailed):
                self._result(actor.handle.forget.remote(None))


class RayServerless(_RayAgents):
    """A fresh process a step: it loads the weights, computes the whole prompt, answers, and keeps nothing. Ray's own queue
    decides how many run at once: each asks for the CPUs that it computes with, or for a hundredth of the GPU."""

    def __init__(self, setup: EngineSetup, **fields: Any) -> None:
        super().__init__(setup, **fields)
        self.can = Capabilities(cancels=False)

    @property
    def _at_a_time(self) -> int:
        """One on a CPU: each asks for all the CPUs that the cluster has."""
        return 1 if not self._gpu_share else min(max(1, self._setup.conversations or 1), int(1 / self._gpu_share))

    def answer(self, request: Request, channel: Channel) -> Reply:
        import ray

        cpus = 0 if self._gpu_share else self._setup.threads
        task = remote(answer_once, num_cpus=cpus, num_gpus=self._gpu_share, max_calls=1, max_retries=0)
        try:
            promised = task.remote(self._setup, self._kv_tokens, *self._limits, request)
            reply, started = self._result(promised)
        except ray.exceptions.RayError as error:
            raise self._failure(error, None) from error
        self._starts.append(started)
        result: Reply = reply
        return result

    def _processes(self) -> Mapping[int, float]:
        """Ray's workers that serve at this moment, which are descendants of this process."""
        workers = [one for one in psutil.Process().children(recursive=True) if answer_once.__name__ in _name(one)]
        return {one.pid: one.create_time() for one in workers if one.pid not in self._killed}


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


# -- in the process of an actor or a task -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """load_s: weights to memory, without imports. start_s: of the whole, imports included."""

    load_s: float
    start_s: float


class Replica:
    """The model, and KV for `kv_tokens`, under the engine, scheduler and kernels of baseline=gpu_only: what differs from
    sharing one engine is the process alone.

    memory_bytes: this process gets no more than that from the kernel. share_bytes: of that, what is meant for this process
    where others have the rest: whether weights are packed is decided as for an engine that has no more.
    """

    def __init__(
        self, setup: EngineSetup, kv_tokens: int, memory_bytes: int | None, share_bytes: int | None = None
    ) -> None:
        self._setup, self._kv_tokens = setup, kv_tokens
        self._memory_bytes = memory_bytes
        self._share_bytes = memory_bytes if share_bytes is None else share_bytes

    def pid(self) -> int:
        return os.getpid()

    def load(self) -> Started:
        """A call of its own, so that whoever watches its memory knows the process before. Raises MemoryError where
        memory_bytes is too little."""
        began = time.perf_counter()
        if self._memory_bytes is not None:
            forbid_more(self._memory_bytes)
        from pensieve.core.cache.two_tier import TwoTierCache
        from pensieve.core.policies.lru import Lru
        from pensieve.core.scheduler.scheduler import SchedulerSettings
        from pensieve.device.asked import ModelAsked
        from pensieve.device.model import load_model
        from pensieve.device.worker import TorchOptions, TorchWorker
        from pensieve.serve.systems.base import WallClock
        from pensieve.serve.systems.threaded_system import ThreadedSystem
        from pensieve.sim.profile import Profile
        from pensieve.specs import HardwareSpec
        from pensieve.units import ceil_div

        setup, size, share = self._setup, self._setup.block_tokens, self._share_bytes
        blocks = ceil_div(self._kv_tokens, size)
        beside_kv = None if share is None else share - blocks * size * setup.model.kv_bytes_per_token
        try:
            asked = ModelAsked(
                setup.model, setup.weights, setup.hub_id, setup.revision, setup.seed, setup.device, setup.threads,
                chunk_tokens=size, memory_bytes=beside_kv,
            )  # fmt: skip
            clock = WallClock()
            options = TorchOptions(max_batch_tokens=setup.batch_tokens, max_batch_requests=1)
            self._system = ThreadedSystem(
                model=setup.model,
                hardware=HardwareSpec(setup.device, simulated=False),
                worker=TorchWorker(load_model(asked), size, clock, options=options),
                clock=clock,
                cache=TwoTierCache,
                policy=Lru,
                scheduler=SchedulerSettings(max_batch_tokens=setup.batch_tokens, max_batch_requests=1),
                gpu_blocks=blocks,
                cpu_blocks=0,
                chunk_tokens=size,
                tokenizer=setup.tokenizer,
                seed=setup.seed,
                # Its policy goes by recency, so nothing is measured: a start is as short as it can be.
                costs=Profile(size, {size: 1.0}, 1.0, {"source": "none: all chunks cost alike"}),
            )
            report = self._system.start()
        except RuntimeError as error:  # torch has no error of its own for a CPU that refuses memory
            if "memory" in str(error):
                raise MemoryError(str(error)) from error
            raise
        self._offset_s = time.perf_counter() - clock.now_s()
        assert report.load_s is not None, "a process of its own shares no model"
        return Started(report.load_s, time.perf_counter() - began)

    def answer(self, request: Request) -> Reply:
        """Raises RequestRefused, RequestFailed, and MemoryError where the kernel gives no more."""
        turn = self._system.ask(request)
        _raise_unserved(turn)
        return Reply(
            turn.finish_reason,
            tokens=turn.token_ids,
            emitted_s=array("d", (self._offset_s + at_s for at_s in turn.emitted_s)),
            cached_tokens=turn.gpu_hit_tokens,
            admitted_s=None if turn.admitted_s is None else self._offset_s + turn.admitted_s,
            compute_ms=turn.compute_ms,
        )

    def forget(self, session: str | None) -> None:
        self._system.forget(session)

    def close(self) -> None:
        self._system.close()


def _raise_unserved(turn: TurnRecord) -> None:
    if turn.status == "refused":
        raise refused(turn.finish_reason, turn.error or "The engine refused the request.")
    if turn.status != "completed":
        said = turn.error or f"The request ended as {turn.status}."
        if "memory" in said:
            raise MemoryError(said)
        raise RequestFailed(said)


def answer_once(
    setup: EngineSetup, kv_tokens: int, memory_bytes: int | None, share_bytes: int | None, request: Request
) -> tuple[Reply, Started]:
    """One request on a Replica that exists for it alone."""
    replica = Replica(setup, kv_tokens, memory_bytes, share_bytes)
    started = replica.load()
    try:
        return replica.answer(request), started
    finally:
        replica.close()
