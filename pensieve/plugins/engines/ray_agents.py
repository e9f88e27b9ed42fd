"""Agents on Ray, as they are served where nobody shares an engine: a process an agent, or a process a step."""

import os
import secrets
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import EngineMissing, MemoryRanOut, RequestFailed, RequestRefused, refused
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.process import EngineProcess, MemoryWatch, free_port
from pensieve.plugins.engines.weights import model_folder
from pensieve.serve.systems.base import Capabilities
from pensieve.units import ceil_div, format_bytes

WAKE_S = 0.25  # how long Ray is waited for before whoever waits looks whether this engine is being closed
GPU_SHARE = 0.01  # so that the device's memory is the limit, and not Ray's count of devices
LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 to mean the machine's outer address; every other address of the loopback network stays what it is."""
STORE_BYTES = 80_000_000  # requests and replies are small; 75 MB is the least that Ray takes
START_S = 120.0
READY = "Ray runtime started"


class _Actor(NamedTuple):
    """handle: Ray's, of a Replica. pid: of its process. load_s: weights to memory, without imports. start_s: of the whole,
    imports included."""

    handle: Any
    pid: int
    load_s: float
    start_s: float


class _RayAgents(OutsideEngine):
    """What both baselines have in common. Each process has KV for the workload's longest conversation, else for all of
    cache.gpu.

    hardware.cpu_memory is what the processes of all agents may have resident together: the one that was started last is
    killed beyond it. Ray kills when the machine itself is nearly full. A process packs its weights where an engine would
    whose limit is its share: that limit by the number of processes that hold a model at a time when all agents ask.
    """

    can = Capabilities(cancels=False)
    stays: ClassVar[bool]
    """A process is an agent's own, and not a step's."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        longest = setup.longest_tokens or setup.kv_tokens
        self._kv_tokens = longest + setup.block_tokens  # the last block is filled in part
        self._gpu_share = GPU_SHARE if setup.device.startswith("cuda") else 0.0
        limit, at_a_time = setup.memory_bytes, max(1, setup.conversations or 1)
        if not self.stays:  # on a CPU each asks for all of the cluster
            at_a_time = min(at_a_time, int(1 / self._gpu_share)) if self._gpu_share else 1
        self._share_bytes = None if limit is None else limit // at_a_time
        self._pids: list[int] = []  # of processes that hold a model or are about to, in the order of their starts
        self._watch = MemoryWatch(limit, lambda: list(self._pids), kills=True)
        self._starts: list[_Actor] = []
        self._open = ExitStack()
        self._closing = False

    def check(self) -> None:
        if find_spec("ray") is None:
            raise EngineMissing(
                f"baseline={self._setup.baseline} needs Ray; install it with pip install 'pensieve-lab[ray]'."
            )

    def identity(self) -> dict[str, str]:
        return {"ray": version("ray") if find_spec("ray") else "none"}

    def start(self) -> StartReport:
        """Starts Ray, and no model: that is the agents' own, or the steps'."""
        self.check()
        began, setup = time.perf_counter(), self._setup
        folder = model_folder(setup)  # as any model comes: a file that each process reads
        self._setup = replace(setup, weights=str(folder), tokenizer=None)
        self._open.enter_context(ray_cluster(setup.threads, 1 if self._gpu_share else 0))
        self._open.enter_context(self._watch)
        settings = {
            "engine": "Ray",
            "version": version("ray"),
            "weights_folder": Path(folder).name,
            "memory_bytes": setup.memory_bytes,
            "kv_tokens_a_process": self._kv_tokens,
            "threads": setup.threads,
            **setup.kv_settings(None),  # as many times kv_tokens_a_process as there are processes
        }
        return StartReport(0.0, (time.perf_counter() - began) * 1e3, settings)

    def _result(self, promised: Any) -> Any:
        """What Ray comes up with; RequestFailed once this engine is being closed: a Ray that is gone answers nobody, ever."""
        import ray

        while not self._closing:
            done, _ = ray.wait([promised], timeout=WAKE_S)
            if done:
                return ray.get(done[0])
        raise RequestFailed("The engine was closed.")

    def _start(self) -> _Actor:
        """An actor that has loaded the model, as soon as Ray has the CPUs that a step asks for."""
        import ray

        cpus = 0 if self.stays or self._gpu_share else self._setup.threads
        kind = ray.remote(num_cpus=cpus, num_gpus=self._gpu_share, max_restarts=0)(Replica)
        handle, pid = kind.remote(self._setup, self._kv_tokens, self._share_bytes), None
        try:
            pid = self._result(handle.pid.remote())
            self._pids.append(pid)
            actor = _Actor(handle, pid, *self._result(handle.load.remote()))
        except ray.exceptions.RayError as error:
            self._kill(handle, pid)
            raise self._failure(error, pid) from error
        self._starts.append(actor)
        return actor

    def _ask(self, actor: _Actor, request: Request) -> Reply:
        import ray

        try:
            reply: Reply = self._result(actor.handle.answer.remote(request))
        except ray.exceptions.RayError as error:
            raise self._failure(error, actor.pid) from error
        return reply

    def _kill(self, handle: Any, pid: int | None) -> None:
        import ray

        ray.kill(handle)
        if pid is not None:
            self._pids.remove(pid)

    def _failure(self, error: Exception, pid: int | None) -> Exception:
        """What an error of Ray means for the request whose process had that id."""
        import ray

        cause = getattr(error, "cause", None)
        if isinstance(cause, (RequestRefused, RequestFailed)):
            return cause
        no_room = isinstance(cause, MemoryError) or isinstance(error, ray.exceptions.OutOfMemoryError)
        if no_room or pid in self._watch.killed:
            return self._ran_out()
        return RequestFailed(f"Ray failed the request: {cause or error}")

    def _ran_out(self) -> MemoryRanOut:
        limit = self._setup.memory_bytes
        held = "the memory of this machine" if limit is None else format_bytes(limit)
        return MemoryRanOut(f"An agent's process ran out of memory: {held} is what all of them have together.")

    def counters(self) -> dict[str, float]:
        starts = list(self._starts)
        return {
            "process_starts": float(len(starts)),
            "process_load_ms": sum(one.load_s for one in starts) * 1e3,
            "process_start_ms": sum(one.start_s for one in starts) * 1e3,
            "processes_peak_bytes": float(self._watch.peak_bytes),
        }

    def close(self) -> None:
        """Requests under way fail."""
        self._closing = True
        time.sleep(2 * WAKE_S)  # whoever waits leaves before Ray does
        self._open.close()


class RayKeepalive(_RayAgents):
    """An actor an agent: it holds the model and the agent's KV for itself, and stays alive between steps.

    Actors are started one after another, so that the ramp ends at the first one that memory has no room for: it is killed,
    no other is started, and agents without one fail. An actor whose conversation was a warm-up is taken over, empty, by the
    next agent that has none.
    """

    stays = True

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._actors: dict[str, _Actor] = {}  # by agent
        self._warmed: list[str] = []  # those of them that have served warm-ups alone
        self._starting = threading.Lock()  # one process starts at a time
        self._full = False

    def answer(self, request: Request, channel: Channel) -> Reply:
        with self._starting:
            if request.session not in self._actors and not self._take_over(request):
                self._begin(request)
            actor = self._actors[request.session]
        return self._ask(actor, request)

    def _take_over(self, request: Request) -> bool:
        """Whether there is an actor that only warm-ups have used, and this request is none."""
        import ray

        if request.phase == "warmup" or not self._warmed:
            return False
        actor = self._actors.pop(self._warmed.pop(0))
        with suppress(ray.exceptions.RayError):  # it died: the agent needs one of its own
            self._result(actor.handle.forget.remote())
            self._actors[request.session] = actor
        return request.session in self._actors

    def _begin(self, request: Request) -> None:
        if self._full:
            raise self._ran_out()
        try:
            self._actors[request.session] = self._start()
        except MemoryRanOut:
            self._full = True
            raise
        if request.phase == "warmup":
            self._warmed.append(request.session)


class RayServerless(_RayAgents):
    """A fresh process a step: it loads the weights, computes the whole prompt, answers, and is killed. Ray's own queue
    decides how many run at once: each asks for the CPUs that it computes with, or for a hundredth of the GPU."""

    stays = False

    def answer(self, request: Request, channel: Channel) -> Reply:
        actor = self._start()
        try:
            return self._ask(actor, request)
        finally:
            self._kill(actor.handle, actor.pid)


# -- a Ray of our own, gone with its trial, also after kill -9 ---------------------------------------------------------


@contextmanager
def ray_cluster(cpus: int, gpus: int) -> Iterator[None]:
    """One node and this process connected to it, while the block runs. No dashboard, no usage report. A Ray that this process
    is connected to already serves, and is left as it is.

    Ray's processes are children of a guard (EngineProcess): by itself Ray leaves two behind for a minute after kill -9. Ray
    listens on every interface whatever address it is given, so each cluster has a token of its own, without which nobody is
    served.

    cpus: what actors may ask for. Raises EngineFailed.
    """
    import ray
    from ray._private import auto_init_hook, worker

    # A call in a process that is connected to none would start a Ray, open to everybody and in nobody's care.
    auto_init_hook.enable_auto_connect = False
    # Ray prints a paragraph for each process that has died. Who died is told of in our own words.
    worker._worker_logs_enabled = False
    if ray.is_initialized():
        yield
        return
    with ExitStack() as opened:
        # Short: its sockets' paths may not exceed 107 characters. Ray lets everybody read and write in what is inside of it.
        folder = opened.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        opened.enter_context(own_environment())
        port = free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={LOOPBACK}", f"--port={port}", "--include-dashboard=false"]
        command += [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={folder}/s"]
        command += [f"--object-store-memory={STORE_BYTES}", "--include-log-monitor=false"]
        process = opened.enter_context(closing(EngineProcess("ray", command)))
        process.wait_until(lambda: READY in process.log(), START_S)
        ray.init(f"{LOOPBACK}:{port}", _node_ip_address=LOOPBACK, log_to_driver=False, logging_level="ERROR")
        opened.callback(ray.shutdown)
        yield


@contextmanager
def own_environment() -> Iterator[None]:
    """The environment of a cluster and of its driver, this process, while the block runs: a token of its own, nothing
    reported, and our package to be found."""
    from ray import _raylet

    own = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")))),
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    compiled: Any = _raylet  # knows more than its stub
    compiled.Config.initialize("")  # mode and token have been read, for another cluster
    compiled.AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


# -- in the process of an actor ---------------------------------------------------------------------------------------------


class Replica:
    """The model, and KV for `kv_tokens`, under the engine, scheduler and kernels of baseline=gpu_only: what differs from
    sharing one engine is the process alone. memory_bytes: what is meant for this process, where there is a limit: it decides
    whether weights are packed.
    """

    def __init__(self, setup: EngineSetup, kv_tokens: int, memory_bytes: int | None) -> None:
        self._setup, self._kv_tokens, self._memory_bytes = setup, kv_tokens, memory_bytes

    def pid(self) -> int:
        return os.getpid()

    def load(self) -> tuple[float, float]:
        """load_s and start_s of an _Actor. A call of its own, so that whoever watches its memory knows the process before.
        Raises MemoryError."""
        began = time.perf_counter()
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

        setup, size = self._setup, self._setup.block_tokens
        blocks = ceil_div(self._kv_tokens, size)
        beside_kv = None
        if self._memory_bytes is not None:
            beside_kv = self._memory_bytes - blocks * size * setup.model.kv_bytes_per_token
        asked = ModelAsked(
            setup.model, setup.weights, setup.hub_id, setup.revision, setup.seed, setup.device, setup.threads,
            chunk_tokens=size, memory_bytes=beside_kv,
        )  # fmt: skip
        clock, options = WallClock(), TorchOptions(max_batch_tokens=setup.batch_tokens, max_batch_requests=1)
        try:
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
        except RuntimeError as error:  # torch's, for a device that refuses memory
            if "memory" in str(error):
                raise MemoryError(str(error)) from error
            raise
        self._offset_s = time.perf_counter() - clock.now_s()
        assert report.load_s is not None, "a process of its own shares no model"
        return report.load_s, time.perf_counter() - began

    def answer(self, request: Request) -> Reply:
        """Raises RequestRefused, RequestFailed, MemoryError."""
        turn = self._system.ask(request)
        if turn.status != "completed":
            said = turn.error or f"The request ended as {turn.status}."
            if turn.status == "refused":
                raise refused(turn.finish_reason, said)
            raise MemoryError(said) if "memory" in said else RequestFailed(said)
        return Reply(
            turn.finish_reason,
            tokens=turn.token_ids,
            emitted_s=array("d", (self._offset_s + at_s for at_s in turn.emitted_s)),
            cached_tokens=turn.gpu_hit_tokens,
            admitted_s=None if turn.admitted_s is None else self._offset_s + turn.admitted_s,
            compute_ms=turn.compute_ms,
        )

    def forget(self) -> None:
        self._system.forget(None)

    def close(self) -> None:
        self._system.close()
