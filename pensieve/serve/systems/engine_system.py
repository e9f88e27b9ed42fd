"""What every in-engine baseline has, whoever drives it: its parts, how they are started, and what it reports."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pensieve.core.cache.base import CacheManager, LowerTier
from pensieve.core.cache.blocks import BlockPool
from pensieve.core.engine import Engine, MemoryLimits
from pensieve.core.machine import Clock, CostModel, Worker
from pensieve.core.plan import StartReport, Tier
from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.request import Event, Request
from pensieve.core.scheduler.scheduler import Forward, Scheduler, SchedulerSettings
from pensieve.errors import WorkerError
from pensieve.plugins.overlap import CopyChoice, choose_copy_ahead, strategies_of
from pensieve.serve.books.books import Books
from pensieve.serve.books.holding import Held
from pensieve.serve.record import Listener, Listeners, TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.serve.tokenizer import TextStream, Tokenizer
from pensieve.specs import HardwareSpec, ModelSpec

_log = logging.getLogger(__name__)

ENGINE_CLOSED = "The engine was closed; start another one to serve requests."


class EngineSystem(ABC):
    """The engine behind run.py, the API, HTTP and chat. An InlineSystem drives it on a virtual clock, a ThreadedSystem on
    the wall.

    cache: factory(policy=, chunk_tokens=, gpu_blocks=, cpu_blocks=). policy: factory(PolicyContext). gpu_blocks: a number,
    or what measures how many fit, asked by `start`. below: a tier under the CPU's. costs: what chunks cost, where it was
    measured before; None: the worker is asked.
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
        below: LowerTier | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        labels: Mapping[str, str] | None = None,
        limits: MemoryLimits | None = None,
        costs: CostModel | None = None,
    ) -> None:
        self.clock = clock
        self.can = Capabilities()
        self._model, self._hardware, self._worker = model, hardware, worker
        self._make_cache, self._make_policy = cache, policy
        self._scheduler_settings = scheduler
        self._measure_gpu_blocks = gpu_blocks if callable(gpu_blocks) else None
        self._gpu_blocks = 0 if callable(gpu_blocks) else gpu_blocks
        self._cpu_blocks, self.chunk_tokens, self._below = cpu_blocks, chunk_tokens, below
        self.block_bytes = chunk_tokens * model.kept_bytes_per_token
        """Of KV in a block, summed over the devices."""
        self._tokenizer, self._seed, self._labels = tokenizer, seed, dict(labels or {})
        self._limits = limits or MemoryLimits()
        self._listeners = Listeners()
        self._cost: CostModel | None = costs
        self._report: StartReport | None = None
        self._copy_choice = CopyChoice("paper")

    engine: Engine
    books: Books
    """From `start` on, both."""

    _forward: Callable[[Scheduler], Forward] | None = None
    """Makes plans that stand for several iterations."""

    _pool: Callable[[int, Tier], BlockPool] | None = None
    """Makes the pools of both tiers, where no kernel reads a block and a piece of a copy costs nothing."""

    @abstractmethod
    def _prices(self, report: StartReport) -> CostModel:
        """What chunks cost on the worker that has just started."""

    @abstractmethod
    def _begin(self) -> None:
        """Start to serve; called once the engine has been made."""

    def start(self) -> StartReport:
        """Where anything fails, the worker is closed before the error is raised."""
        try:
            report = self._start_engine()
            self._begin()
        except BaseException:
            self._worker.close()
            raise
        return report

    def _start_engine(self) -> StartReport:
        if self._measure_gpu_blocks is not None:
            self._gpu_blocks = self._measure_gpu_blocks()
        self._report = report = self._worker.start(self._gpu_blocks, self._cpu_blocks)
        size = self.chunk_tokens
        settings = self._scheduler_settings
        cost = self._cost = self._cost or self._prices(report)
        parts = self._hardware.load_parts(self._model.layers)
        context = PolicyContext(
            chunk_tokens=size,
            gpu_blocks=self._gpu_blocks,
            cpu_blocks=self._cpu_blocks,
            recompute_s=cost.recompute_s,
            load_s=cost.load_s(),
            seed=self._seed,
        )
        cache = self._make_cache(
            policy=self._make_policy(context),
            chunk_tokens=size,
            gpu_blocks=self._gpu_blocks,
            cpu_blocks=self._cpu_blocks,
        )
        cache.begin(
            cost=cost,
            layers=parts,
            batch_tokens=settings.max_batch_tokens,
            below=self._below,
            report=report,
            pool=self._pool,
        )
        self._copy_choice = choose_copy_ahead(
            settings.copy_ahead,
            cache.cpu_blocks,
            self._hardware.one_memory,
            math.ceil(settings.swap_out_stop * cache.gpu_blocks),
        )
        if self._copy_choice.note:
            _log.info("Copies ahead of time: %s, since %s.", self._copy_choice.mode, self._copy_choice.note)
        self.books = Books(size, cost)
        settings = replace(settings, copy_ahead=self._copy_choice.mode)
        self.engine = Engine(
            cache=cache,
            settings=settings,
            worker=self._worker,
            clock=self.clock,
            max_context=self._model.max_context,
            eos=report.eos | self._tokenizer.eos_ids if self._tokenizer else report.eos,
            search=self._search if self._tokenizer else None,
            limits=self._limits,
            facts=self.books,
            strategies=strategies_of(settings, size, cost, self._forward),
        )
        return report

    def _search(self, stops: Sequence[str]) -> Callable[[int], bool]:
        assert self._tokenizer is not None
        return TextStream(self._tokenizer.decode, stops).ends

    def watch_content(self) -> None:
        """Record what could be found of each prompt in other conversations, which a bound needs where they share blocks;
        to be called before the first request."""
        self.books.watch_content()

    def count_holding(self) -> None:
        """Count what each conversation holds of each tier; to be called before the first request."""
        self.books.count_holding()
        self.books.at(self.clock.now_ns())

    def holdings(self) -> dict[tuple[str, Tier], Held]:
        """Return what each conversation has held of each tier so far; empty without `count_holding`. Call it while nothing
        runs."""
        self.books.at(self.clock.now_ns())
        return self.books.holdings()

    @abstractmethod
    def begin(self, request: Request, listener: Listener) -> None:
        """See AnsweringSystem."""

    @abstractmethod
    def drive(self, awaited: Future[Any]) -> None:
        """See AnsweringSystem."""

    def ask(self, request: Request) -> TurnRecord:
        """See AnsweringSystem."""
        answer = Answer()
        self.begin(request, answer)
        self.drive(answer.future)
        return answer.future.result()

    def counters(self) -> dict[str, float]:
        engine = self.engine
        cache, scheduler, own = engine.cache.counters, engine.scheduler.counters, self.books.counts
        return {
            "evicted_chunks": cache.evicted_chunks,
            "dropped_chunks": cache.dropped_chunks,
            "swapped_in_bytes": cache.swapped_in_blocks * self.block_bytes,
            "swapped_out_bytes": cache.swapped_out_blocks * self.block_bytes,
            "suspended_requests": scheduler.preempted,
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
        cache, scheduler, below = engine.cache, engine.scheduler, engine.cache.below
        return {
            "gpu_blocks_used": (cache.gpu_blocks_used, "blocks"),
            "cpu_blocks_used": (cache.cpu_blocks_used, "blocks"),
            **({f"{below.name}_blocks_used": (below.used, "blocks")} if below.blocks else {}),
            "queue_length": (len(scheduler.queue), "requests"),
            "running_requests": (len(scheduler.running), "requests"),
        }

    def places(self, session: str) -> str:
        """See CacheManager.places. A picture of a moment, from any thread; empty for a conversation that is not known."""
        known = self.engine.cache.sessions.get(session)
        return "" if known is None else self.engine.cache.places(known)

    @property
    def cost(self) -> CostModel:
        """What chunks cost on its worker; from `start` on."""
        assert self._cost is not None
        return self._cost

    def settings(self) -> dict[str, Any]:
        cache = self.engine.cache
        per_token = self._model.kept_bytes_per_token
        gpu_tokens, cpu_tokens = cache.gpu_blocks * cache.chunk_tokens, cache.cpu_blocks * cache.chunk_tokens
        assert self._report is not None
        return {
            **self._report.settings,
            **self._labels,
            "gpu_tokens": gpu_tokens,
            "cpu_tokens": cpu_tokens,
            "disk_tokens": cache.below.blocks * cache.chunk_tokens,
            "gpu_bytes": gpu_tokens * per_token,
            "cpu_bytes": cpu_tokens * per_token,
            "kv_bytes_per_token": per_token,
            "dtype": self._model.dtype,
            "vocab": self._model.vocab,
            "n_ctx": self._model.max_context,
            "request_tokens": cache.request_blocks * cache.chunk_tokens,
            "max_batch_tokens": self._scheduler_settings.max_batch_tokens,
            "max_batch_requests": self._scheduler_settings.max_batch_requests,
            "copy_ahead": self._copy_choice.mode if cache.cpu_blocks else "none",
            "copy_ahead_note": self._copy_choice.note,
            "simulated": self.clock.virtual,
            "shares": cache.room.shares,
            "cost": self.cost.describe(),
            **cache.chosen,
        }


class Answer:
    """A listener that waits for the end."""

    streams = False

    def __init__(self) -> None:
        self.future: Future[TurnRecord] = Future()

    def happened(self, event: Event) -> None:
        if event.turn is not None:
            self.future.set_result(event.turn)

    def failed(self, error: WorkerError) -> None:
        self.future.set_exception(error)
