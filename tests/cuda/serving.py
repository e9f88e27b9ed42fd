"""Conversations served on the stand-in, with nothing that waits for the device but the engine itself."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import Engine
from pensieve.core.plan import Row, Sample, StepPlan, StepResult
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Sampling
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.asked import ModelAsked
from pensieve.device.model import LoadedModel, load_model
from pensieve.device.options import TorchOptions
from pensieve.device.sampler import Draws, draw, noise_starts
from pensieve.device.worker import TorchWorker
from pensieve.plugins.caches.restore import RestoreMode, RestoringCache
from pensieve.serve.books.books import Books
from pensieve.serve.systems.base import WallClock
from pensieve.sim.profile import Profile
from pensieve.specs import ModelSpec
from tests.exact import CheckedEngine, Paths, Readings, WatchedWorker
from tests.simulated import policy_context
from tests.soak import Episode, perform
from tests.worker.torch.driver import ARCHITECTURES, plain_logits

from .standin.findings import Finding, listed
from .standin.machine import Machine

CHUNK, GPU_BLOCKS, CPU_BLOCKS, CONTEXT, REQUESTS = 8, 18, 24, 512, 4
SIZES: dict[str, dict[str, Any]] = {**ARCHITECTURES, "olmo2": {**ARCHITECTURES["llama"], "model_type": "olmo2"}}
_TOLERANCE = 1e-3  # of a logit: two tokens this close are a tie


@cache
def tiny(name: str = "llama", fused: bool = True, dtype: str = "float32", attention: str = "auto") -> LoadedModel:
    """On the stand-in, which must be in place."""
    spec = ModelSpec.from_architecture(name, SIZES[name], dtype)
    return load_model(ModelAsked(spec, device="cuda", threads=1, fused=fused, attention=attention, chunk_tokens=CHUNK))


@cache
def reference(name: str) -> LoadedModel:
    """The same weights on the CPU."""
    spec = ModelSpec.from_architecture(name, SIZES[name])
    return load_model(ModelAsked(spec, threads=1, fused=False, attention="reference"))


@dataclass(slots=True)
class Turn:
    """tokens: the whole conversation, of which the last `output` were sampled with `key`."""

    tokens: array[int]
    output: int
    sampling: Sampling
    key: int


class Serving(CheckedEngine):
    """Compares nothing while it serves, since that would wait for the device: `wrong_tokens` does it afterwards."""

    def __init__(
        self, model: LoadedModel, cache: TwoTierCache, settings: SchedulerSettings, options: TorchOptions
    ) -> None:
        clock = Readings()
        self.torch_worker = WatchedWorker(model, cache.chunk_tokens, clock, options=options)
        self.torch_worker.start(cache.gpu_blocks, cache.cpu_blocks)
        Engine.__init__(
            self,
            cache=cache,
            settings=settings,
            worker=self.torch_worker,
            clock=clock,
            max_context=CONTEXT,
            facts=Books(cache.chunk_tokens),
        )
        self.model, self.paths, self._seen = model, Paths(), {}
        self.turns: list[Turn] = []

    def _poison(self, everything: bool = False) -> None:
        """A fill would wait."""

    def _emit(self, active: ActiveRequest, token: int, now_s: float) -> None:
        Engine._emit(self, active, token, now_s)

    def _close(
        self, active: ActiveRequest, status: str, reason: str | None, now_s: float, error: str | None = None
    ) -> None:
        Engine._close(self, active, status, reason, now_s, error)
        assert status != "failed", error
        if status == "completed":
            output, request = active.generated, active.request
            self.turns.append(Turn(array("i", active.session.tokens), output, request.sampling, active.noise_key))


@dataclass(slots=True)
class Served:
    """findings, syncs: of serving alone, without start and end."""

    engine: Serving
    paths: Paths
    findings: list[Finding]
    syncs: list[Finding]
    counts: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def waits(self) -> list[Finding]:
        """What waited, but for the tokens of a plan."""
        return [sync for sync in self.syncs if "flight.py" not in sync.where.split(" < ")[0]]

    def assert_clean(self) -> None:
        assert not self.findings, listed(self.findings)
        assert not self.waits, listed(self.waits)


def converse(
    device: Machine, model: LoadedModel, mode: RestoreMode, options: TorchOptions, turns: int, seed: int = 5
) -> Served:
    """Random conversations, more than both tiers hold."""
    context = policy_context(CHUNK, GPU_BLOCKS, CPU_BLOCKS)
    store = RestoringCache(
        policy=RetentionValue(context), chunk_tokens=CHUNK, gpu_blocks=GPU_BLOCKS, cpu_blocks=CPU_BLOCKS, restore=mode
    )
    settings = SchedulerSettings(max_batch_tokens=48, max_batch_requests=REQUESTS)
    cost = Profile(CHUNK, {128: 0.128, 256: 0.256}, 2 * CHUNK / 1000, {})  # loading is twice as dear as computing
    store.begin(cost=cost, layers=model.spec.layers, batch_tokens=settings.max_batch_tokens)
    engine = Serving(model, store, settings, options)
    device.forget()
    counted = dict(device.counts)
    operations = (
        [*Episode(seed, 0).operations(turns), *Episode(seed, 0).returns(2)]
        if turns > 20
        else Episode(seed, 0).operations(turns)
    )
    engine_settings = engine.torch_worker.settings()
    findings, syncs, counts = [], [], {}

    def stop() -> None:
        findings.extend(device.findings)
        syncs.extend(device.syncs)
        counts.update({name: count - counted[name] for name, count in device.counts.items()})

    with _before_close(engine.torch_worker, stop):
        paths = perform(engine, operations)
    return Served(engine, paths, findings, syncs, counts, engine_settings)


@contextmanager
def _before_close(worker: TorchWorker, act: Any) -> Iterator[None]:
    """The end of a worker waits for everything, as it should."""
    close = worker.close

    def closing() -> None:
        act()
        close()

    worker.close = closing  # type: ignore[method-assign]
    yield


def wrong_tokens(turns: list[Turn], name: str) -> tuple[int, int]:
    """How many sampled tokens are not the plain model's, and of how many."""
    model, wrong, total = reference(name), 0, 0
    for turn in turns:
        tokens, output = turn.tokens, turn.output
        logits = plain_logits(model, tokens[:-1])[len(tokens) - output - 1 :]
        expected = draw(logits, _draws(turn)).tokens.tolist()
        for row, wanted, token in zip(logits, expected, tokens[-output:], strict=True):
            tie = turn.sampling.temperature == 0 and abs(float(row[wanted] - row[token])) < _TOLERANCE
            wrong += token != wanted and not tie
            total += 1
    return wrong, total


def plain_token(tokens: list[int], name: str = "llama") -> int:
    """What the plain model says next."""
    return int(plain_logits(reference(name), tokens)[-1].argmax())


def _draws(turn: Turn) -> Draws | None:
    sampling, output = turn.sampling, turn.output
    if not sampling.temperature:
        return None
    first = len(turn.tokens) - output
    starts = torch.from_numpy(noise_starts([turn.key] * output, range(first, first + output)))

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((output,), value, dtype=dtype)

    floats = (column(value, torch.float64) for value in (sampling.temperature, sampling.top_p))
    return Draws(torch.arange(output), starts, *floats, column(sampling.top_k, torch.int64), True)


class Hand:
    """A worker driven by plans written by hand, in blocks 3 and on; what a real scheduler would not plan can be asked too."""

    def __init__(self, model: LoadedModel, options: TorchOptions, blocks: int = 40) -> None:
        self.worker = TorchWorker(model, CHUNK, WallClock(), options=options)
        self.settings = self.worker.start(blocks, blocks).settings
        self._steps = 0

    def launch(self, *rows: Row, **parts: Any) -> None:
        self.worker.launch(StepPlan(self._steps, rows, **parts))
        self._steps += 1

    def step(self, *rows: Row, **parts: Any) -> StepResult:
        self.launch(*rows, **parts)
        return self.collect()

    def collect(self) -> StepResult:
        result = self.worker.collect(None)
        assert result is not None and result.error is None, result
        return result

    def prompt(self, slot: int = 0, tokens: int = 40, first_block: int = 3) -> list[int]:
        """Computes a prompt; returns its tokens and the one that was sampled."""
        source = random.Random(slot)
        ids = tuple(source.randrange(3, 97) for _ in range(tokens))
        blocks = tuple(range(first_block, first_block + tokens // CHUNK + 2))
        result = self.step(Row(slot, ((0, tokens),), ids, Sample(tokens)), tables=((slot, 0, blocks),))
        return [*ids, result.tokens[slot]]

    @staticmethod
    def decode(position: int, slot: int = 0, **sampling: Any) -> Row:
        """Of the token that the slot sampled last, at `position`."""
        return Row(slot, ((position, position + 1),), None, Sample(position + 1, **sampling))

    def close(self) -> None:
        while self.worker._flights:
            self.worker.collect(None)
        self.worker.close()
