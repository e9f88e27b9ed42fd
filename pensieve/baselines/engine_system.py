"""Every in-engine baseline as a System: one engine, on a virtual clock in the caller's thread, on the wall in its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pensieve.baselines.base import Capabilities
from pensieve.baselines.profiling import profile_of
from pensieve.cache.base import CacheManager, EvictionPolicy, PolicyContext
from pensieve.cache.pool import BlockPool
from pensieve.cache.remembered import MemoryLimits
from pensieve.clock import Clock, VirtualClock
from pensieve.cost.base import CostModel
from pensieve.cost.roofline import Roofline
from pensieve.engine import Engine
from pensieve.errors import WorkerError
from pensieve.plan import StartReport
from pensieve.request import Event, Request
from pensieve.scheduler.settings import SchedulerSettings
from pensieve.specs import HardwareSpec, ModelSpec
from pensieve.tokenizer import Tokenizer
from pensieve.worker.base import Worker

_Command = Callable[[], None]


class EngineSystem:
    """The engine behind run.py, the API, HTTP and chat.

    cache: factory(policy=, chunk_tokens=, gpu_blocks=, cpu_blocks=). policy: factory(PolicyContext). gpu_blocks: a number,
    or what measures how many fit, asked by `start`. Given a VirtualClock,
    poll runs the engine; given any other clock, `start` starts a thread that owns it, and submit, cancel and forget reach
    it through an inbox. A crash of that thread surfaces in poll.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        hardware: HardwareSpec,
        worker: Worker,
        clock: Clock,
        cache: Callable[..., CacheManager],
        policy: Callable[[PolicyContext], EvictionPolicy],
        scheduler: SchedulerSettings,
        gpu_blocks: int | Callable[[], int],
        cpu_blocks: int,
        chunk_tokens: int,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        labels: Mapping[str, str] | None = None,
        limits: MemoryLimits | None = None,
    ) -> None:
        self.clock = clock
        self.can = Capabilities(virtual_time=clock.virtual)
        self._model, self._hardware, self._worker = model, hardware, worker
        self._make_cache, self._make_policy = cache, policy
        self._scheduler_settings = scheduler
        self._measure_gpu_blocks = gpu_blocks if callable(gpu_blocks) else None
        self._gpu_blocks = 0 if callable(gpu_blocks) else gpu_blocks
        self._cpu_blocks, self._chunk_tokens = cpu_blocks, chunk_tokens
        self._tokenizer, self._seed, self._labels = tokenizer, seed, dict(labels or {})
        self._limits = limits or MemoryLimits()
        self._engine: Engine | None = None
        self._cost: CostModel | None = None
        self._report: StartReport | None = None
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    def start(self) -> StartReport:
        if self._measure_gpu_blocks is not None:
            self._gpu_blocks = self._measure_gpu_blocks()
        self._report = report = self._worker.start(self._gpu_blocks, self._cpu_blocks)
        size = self._chunk_tokens
        if isinstance(self.clock, VirtualClock):
            self._cost = Roofline(self._model, self._hardware, size)
        else:
            longest = min(self._gpu_blocks * size, self._model.max_context)
            where = {**report.settings, "model": self._model.name, "parameters": self._model.parameters}
            self._cost = profile_of(
                self._worker, self.clock, size, longest, min(self._cpu_blocks, self._gpu_blocks), where
            )
        context = PolicyContext(
            chunk_tokens=size,
            gpu_blocks=self._gpu_blocks,
            cpu_blocks=self._cpu_blocks,
            recompute_s=self._cost.recompute_s,
            load_s=self._cost.load_s(),
            seed=self._seed,
        )
        cache = self._make_cache(
            policy=self._make_policy(context),
            chunk_tokens=size,
            gpu_blocks=self._gpu_blocks,
            cpu_blocks=self._cpu_blocks,
        )
        weigh = getattr(cache, "weigh", None)
        if weigh is not None:
            weigh(self._cost, self._model.layers, self._scheduler_settings.max_batch_tokens)
        own = self._tokenizer.eos_id if self._tokenizer else None
        self._engine = Engine(
            cache=cache,
            settings=self._scheduler_settings,
            worker=self._worker,
            clock=self.clock,
            max_context=self._model.max_context,
            eos=report.eos if own is None else report.eos | {own},
            decode_text=self._tokenizer.decode if self._tokenizer else None,
            limits=self._limits,
            cost=self._cost,
        )
        if not self.clock.virtual:
            self._thread = threading.Thread(target=self._serve, name="pensieve-engine", daemon=True)
            self._thread.start()
        return report

    def watch_content(self) -> None:
        """Record what could be found of each prompt in other conversations, which a bound needs where they share blocks;
        to be called before the first request."""
        watch = getattr(self.engine.cache, "watch_content", None)
        if watch is not None:
            watch()

    def submit(self, request: Request) -> None:
        self._do(lambda: self.engine.submit(request))

    def cancel(self, request_id: int, status: str) -> None:
        self._do(lambda: self.engine.cancel(request_id, status))

    def expect(self, session: str, next_use_s: float | None) -> None:
        """When the schedule will ask this conversation again; only an offline policy reads it."""
        self._do(lambda: self.engine.expect(session, next_use_s))

    def forget(self, session: str | None) -> None:
        """Returns when it is done, so that a cold cache is cold."""
        if self._thread is None:
            self.engine.forget(session)
            return
        done = threading.Event()

        def command() -> None:
            self.engine.forget(session)
            done.set()

        self._do(command)
        while not done.wait(0.1):
            self._raise_crash()

    def poll(self, until_s: float | None) -> list[Event]:
        return self._poll_virtual(until_s) if self._thread is None else self._poll_wall(until_s)

    def counters(self) -> dict[str, float]:
        engine = self.engine
        cache, scheduler, own = engine.cache.counters, engine.scheduler.counters, engine.counters
        block_bytes = self._chunk_tokens * self._model.kv_bytes_per_token
        return {
            "evicted_chunks": cache.evicted_chunks,
            "dropped_chunks": cache.dropped_chunks,
            "swapped_in_bytes": cache.swapped_in_blocks * block_bytes,
            "swapped_out_bytes": cache.swapped_out_blocks * block_bytes,
            "suspended_requests": scheduler.suspended,
            "deferred_requests": scheduler.deferred,
            "steps": own.steps,
            "failed_steps": own.failed_steps,
            "forgotten_sessions": own.forgotten_sessions,
            "batched_tokens": scheduler.batched_tokens,
            "schedule_ms": own.schedule_ns / 1e6,
            "predicted_ms": own.predicted_ns / 1e6,
            "predictable_ms": own.predictable_ns / 1e6,
            "compute_ms": own.compute_ns / 1e6,
            "stall_ms": own.stall_ns / 1e6,
            "h2d_bytes": own.h2d_bytes,
            "d2h_bytes": own.d2h_bytes,
            **cache.extra,
        }

    def gauges(self) -> dict[str, tuple[float, str]]:
        """What is held and who waits at this moment, with units; any thread may ask, since these are counts kept anyway.

        gpu_blocks_used: with KV, or reserved for a request that runs.
        """
        engine = self.engine
        cache, scheduler = engine.cache, engine.scheduler
        gpu, cpu = (getattr(cache, tier, None) for tier in ("gpu", "cpu"))
        free = gpu.free if isinstance(gpu, BlockPool) else cache.available
        return {
            "gpu_blocks_used": (cache.gpu_blocks - free, "blocks"),
            "cpu_blocks_used": (cache.cpu_blocks - cpu.free if isinstance(cpu, BlockPool) else 0, "blocks"),
            "queue_length": (len(scheduler.queue), "requests"),
            "running_requests": (len(scheduler.running), "requests"),
        }

    def settings(self) -> dict[str, Any]:
        cache = self.engine.cache
        per_token = self._model.kv_bytes_per_token
        gpu_tokens, cpu_tokens = cache.gpu_blocks * cache.chunk_tokens, cache.cpu_blocks * cache.chunk_tokens
        assert self._report is not None
        assert self._cost is not None
        return {
            **self._report.settings,
            **self._labels,
            "gpu_tokens": gpu_tokens,
            "cpu_tokens": cpu_tokens,
            "gpu_bytes": gpu_tokens * per_token,
            "cpu_bytes": cpu_tokens * per_token,
            "kv_bytes_per_token": per_token,
            "dtype": self._model.dtype,
            "vocab": self._model.vocab,
            "n_ctx": self._model.max_context,
            "max_batch_tokens": self._scheduler_settings.max_batch_tokens,
            "max_batch_requests": self._scheduler_settings.max_batch_requests,
            "simulated": self.clock.virtual,
            "cost": self._cost.describe(),
            **getattr(cache, "chosen", {}),  # what a manager settled for itself
        }

    def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None
        self._worker.close()

    # -- on a virtual clock -------------------------------------------------------------------------------------------

    def _poll_virtual(self, until_s: float | None) -> list[Event]:
        assert isinstance(self.clock, VirtualClock)
        engine, clock = self.engine, self.clock
        until_ns = None if until_s is None else round(until_s * 1e9)
        events = engine.take_events()
        while not any(event.kind == "finished" for event in events):
            if until_ns is not None and clock.now_ns() >= until_ns:
                break
            if until_ns is None and not engine.busy:
                break
            before = clock.now_ns()
            stepped = engine.step(until_ns)
            events += stepped
            if not stepped and clock.now_ns() == before and not engine.progressed:
                # Nothing to compute and no copy ends by then.
                assert until_ns is not None, "requests wait, and nothing runs that could let them in"
                clock.advance_to(until_ns)
        return events

    # -- on the wall --------------------------------------------------------------------------------------------------

    def _do(self, command: _Command) -> None:
        if self._thread is None:
            command()
        else:
            self._inbox.put(command)

    def _serve(self) -> None:
        engine = self.engine
        try:
            while True:
                wait = not engine.busy and not engine.progressed
                while wait or not self._inbox.empty():
                    command = self._inbox.get()
                    if command is None:
                        self._worker.close()  # in the thread that drove it: a profiler belongs to its thread
                        return
                    command()
                    wait = False
                events = engine.step(None)
                assert engine.progressed or not engine.busy, "requests wait, and nothing runs that could let them in"
                if events:
                    self._outbox.put(events)
        except BaseException as error:  # whoever polls must learn of it, whatever it is
            self._crash = error
            self._outbox.put([])

    def _poll_wall(self, until_s: float | None) -> list[Event]:
        events: list[Event] = []
        while True:
            self._raise_crash()
            try:
                if not self._outbox.empty():
                    events += self._outbox.get()
                elif any(event.kind == "finished" for event in events):
                    return events
                else:
                    left = None if until_s is None else until_s - self.clock.now_s()
                    if left is not None and left <= 0:
                        return events
                    events += self._outbox.get(timeout=left)
            except queue.Empty:
                return events

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise WorkerError(f"The engine stopped: {self._crash}") from self._crash
