"""An engine whose every sampled token is compared with the plain model, whatever path its KV took."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pensieve.core.cache.base import CacheManager
from pensieve.core.plan import StepPlan
from pensieve.core.request import Event
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.model import LoadedModel
from pensieve.device.sampler import greedy
from pensieve.device.transfers.transfer import Link
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.plugins.overlap import strategies_of
from pensieve.serve.books.books import Books
from pensieve.serve.record import TurnRecord
from tests.invariants import check_cache
from tests.simulated import TalkingEngine
from tests.worker.torch.driver import plain_logits

TOLERANCE = 1e-4  # of the largest logit, at least of 1, in float32


class Readings:
    """A millisecond at every reading: which conversation is the oldest hangs on no machine's speed."""

    virtual = False

    def __init__(self) -> None:
        self._readings = 0

    def now_ns(self) -> int:
        self._readings += 1
        return self._readings * 1_000_000

    def now_s(self) -> float:
        return self.now_ns() / 1e9


class Mismatch(Exception):
    """A token or a logit differs from the plain model's."""


@dataclass(slots=True)
class Paths:
    """How many turns took each path; one turn may take several. again: its KV was on CPU, and some was recomputed all the
    same. hole: rows (not turns) that recompute several runs of positions. worst: the largest logit difference."""

    turns: int = 0
    tokens: int = 0
    gpu_hit: int = 0
    cpu_restore: int = 0
    again: int = 0
    recompute: int = 0
    hole: int = 0
    preempted: int = 0
    cancelled: int = 0
    worst: float = 0.0

    def add(self, other: Paths) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "worst" else mine + theirs)


class WatchedWorker(TorchWorker):
    """Counts the rows that recompute several runs of positions in one forward."""

    rows_with_holes = 0

    def launch(self, plan: StepPlan) -> None:
        self.rows_with_holes += sum(len(row.runs) > 1 for row in plan.rows)
        super().launch(plan)


@dataclass(slots=True)
class _Seen:
    """The logits that a turn sampled from. start: how many tokens stood before the first of them."""

    start: int
    logits: list[torch.Tensor] = field(default_factory=list)


class CheckedEngine(TalkingEngine):
    """Runs check() after every step, fills every free block with NaN, and compares each finished turn with one plain forward
    over it.

    Raises Mismatch at the first difference. paths: how many turns took which path. compares: false where nothing but the
    engine itself may wait for the device.
    """

    compares = True

    def __init__(
        self,
        model: LoadedModel,
        cache: CacheManager,
        settings: SchedulerSettings,
        max_context: int,
        link: Link | None = None,
        options: TorchOptions | None = None,
    ) -> None:
        clock = Readings()
        self.torch_worker = WatchedWorker(
            model, cache.chunk_tokens, clock, keep_logits=self.compares, link=link, options=options
        )
        self.report = self.torch_worker.start(cache.gpu_blocks, cache.cpu_blocks)
        super().__init__(
            cache=cache,
            settings=settings,
            worker=self.torch_worker,
            clock=clock,
            max_context=max_context,
            facts=Books(cache.chunk_tokens),
            strategies=strategies_of(settings, cache.chunk_tokens, None),
        )
        self.model = model
        self.paths = Paths()
        self._seen: dict[int, _Seen] = {}
        self._poison(everything=True)

    def step(self, until_ns: int | None = None) -> list[Event]:
        events = super().step(until_ns)
        self.paths.hole = self.torch_worker.rows_with_holes
        check_cache(self.cache)
        self._poison()
        for event in events:
            if event.turn is not None:
                self._count(event.turn)
        return events

    def run(self) -> list[TurnRecord]:
        """Step until no request is left. Returns the turns that finished."""
        turns = [event.turn for event in self.take_events() if event.turn is not None]
        for turn in turns:
            self._count(turn)
        while self.busy:
            turns += [event.turn for event in self.step() if event.turn is not None]
            assert self.progressed or not self.busy, "requests wait, and nothing runs that could let them in"
        return turns

    def _emit(self, active: ActiveRequest, token: int, now_s: float) -> None:
        if self.compares:
            seen = self._seen.setdefault(active.request.id, _Seen(len(active.session.tokens) - 1))
            assert active.slot is not None
            seen.logits.append(self.torch_worker.last_logits[active.slot])
        super()._emit(active, token, now_s)

    def _close(
        self, active: ActiveRequest, status: str, reason: str | None, now_s: float, error: str | None = None
    ) -> None:
        super()._close(active, status, reason, now_s, error)
        seen = self._seen.pop(active.request.id, None)
        if status == "failed":
            raise Mismatch(f"a step failed: {error}")
        if seen is not None:
            self._compare(active, seen)

    def _compare(self, active: ActiveRequest, seen: _Seen) -> None:
        tokens = active.session.tokens
        expected = plain_logits(self.model, tokens[: seen.start + len(seen.logits) - 1])[seen.start - 1 :]
        got = torch.stack(seen.logits)
        difference = float((got - expected).abs().max())
        limit = TOLERANCE * max(1.0, float(expected.abs().max()))
        self.paths.worst = max(self.paths.worst, difference)
        if not difference <= limit:
            first = int(((got - expected).abs().amax(dim=1) > limit).nonzero()[0])
            raise Mismatch(
                f"turn {active.request.turn} of {active.session.name}: logits of output token {first} differ by "
                f"{difference:.2e} (allowed {limit:.2e})"
            )
        if active.request.sampling.temperature == 0:
            best = greedy(expected)
            for i, token in enumerate(tokens[seen.start :]):
                margin = float(expected[i, best[i]] - expected[i, token])
                if margin > 2 * limit:
                    raise Mismatch(f"turn {active.request.turn} of {active.session.name}: token {i} is not the argmax")

    def _count(self, turn: TurnRecord) -> None:
        paths = self.paths
        paths.turns += 1
        paths.tokens += turn.output_tokens
        paths.gpu_hit += bool(turn.gpu_hit_tokens)
        paths.cpu_restore += bool(turn.cpu_hit_tokens)
        paths.again += bool(turn.cpu_recomputed_tokens)
        paths.recompute += bool(turn.recomputed_tokens)
        paths.preempted += bool(turn.resumed_swapped_tokens or turn.resumed_recomputed_tokens)
        paths.cancelled += turn.status in ("cancelled", "timeout")

    def _poison(self, everything: bool = False) -> None:
        tensors, nan = self.torch_worker.tensors, float("nan")
        if not self.compares:
            return
        if everything:
            tensors.gpu.fill_(nan)
            tensors.cpu.fill_(nan)
            return
        gpu, cpu = self.cache.free_blocks()
        tensors.gpu[:, sorted(gpu)] = nan
        if self.cache.cpu_blocks:
            tensors.cpu[:, sorted(cpu)] = nan
        if tensors.device.type == "cuda":  # a load into a block that was free does not wait for its poison
            torch.cuda.synchronize(tensors.device)
