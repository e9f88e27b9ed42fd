"""What a CPU tier saves in a whole engine: conversations that return to KV on CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from pensieve.core.cache.restore import RestoreMode, Split
from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.clock import WallClock
from pensieve.core.engine import Engine
from pensieve.core.policies.base import PolicyContext
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request
from pensieve.core.scheduler.composition import SchedulerSettings
from pensieve.device.model import LoadedModel
from pensieve.device.transfers.link import Link
from pensieve.device.worker import TorchWorker
from pensieve.errors import WorkerError
from pensieve.lab.bench.case import Case, Measured
from pensieve.lab.bench.models import CHUNK
from pensieve.lab.bench.session import Bench
from pensieve.lab.bench.timer import in_turn
from pensieve.plugins.device.thread_link import ThreadLink
from pensieve.serve.books.books import Books
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.profiling import load_s, profile_of
from pensieve.sim.profile import Profile
from pensieve.units import ceil_div

_VOCAB = 250  # token ids that every model has
_MODES: tuple[RestoreMode, ...] = ("load", "hybrid", "recompute")


def measure_restores(
    bench: Bench, model: LoadedModel, tokens: int, link: ThreadLink | None, links: Mapping[str, float | None]
) -> None:
    """Time to first token of a conversation whose KV is on CPU, by how it is restored. links: for each name, the seconds to
    load a token over those to compute it that `link` is throttled to; None leaves it as it is."""
    new, batch_tokens = (64, 512) if bench.on_gpu else (32, 128)
    returning = Returning(model, tokens, new, batch_tokens, link)
    profile = returning.set_cost_model()
    returning.fill()
    for name, ratio in links.items():
        if link is not None and ratio is not None:
            computed_s = profile.recompute_s(tokens // 2) / CHUNK
            link.throttle(model.spec.kv_bytes_per_token / (ratio * computed_s))
            profile = returning.set_cost_model()
        ways: dict[str, Callable[[], float]] = {mode: partial(returning.ttft_ms, mode) for mode in _MODES}
        times = in_turn({**ways, "on_gpu": returning.hit_ms}, bench.rounds(5))
        _record(bench, returning, profile.load_s(), times, name)
    returning.close()


def _record(bench: Bench, returning: Returning, load_s: float, times: Mapping[str, Measured], link: str) -> None:
    """A hit on the CPU loaded, and restored by the best split of loading and computing."""
    split, tokens = returning.split(), returning.tokens
    sizes = {"context": tokens, "new": returning.new, "link": link}
    hit = Case(
        label=f"hit on CPU of {tokens}, {link}",
        floor=max(tokens / CHUNK * load_s * 1e3, times["on_gpu"].value),
        floor_is="the longer of the transfer, by the measured rate, and the same turn with all KV on the GPU",
        metric="ttft_ms",
        parameters=sizes,
        ours="load",
    )
    bench.record(hit, [times["load"], times["recompute"]])
    better = min(times["load"].value, times["recompute"].value)
    figures = {
        "saving_pct": 100 * (1 - times["hybrid"].value / better),
        "predicted_saving_pct": 100 * (1 - split.predicted_s / min(split.load_s, split.recompute_s)),
        "recompute_over_profile": times["recompute"].value / (split.recompute_s * 1e3),
        "recomputed_chunks": float(split.recomputed),
    }
    hybrid = Case(
        label=f"hybrid restore of {tokens}, {link}",
        floor=split.predicted_s * 1e3,
        floor_is="what the profile predicts for the best split",
        metric="ttft_ms",
        parameters=sizes,
        ours="hybrid",
    )
    bench.record(hybrid, [replace(times["hybrid"], figures=figures), times["load"], times["recompute"]])
    bench.note("recompute over profile far from 1: the machine was not the one that was profiled (others ran on it).")


class Returning:
    """One conversation of `tokens` tokens that returns again and again, each time with `new` other tokens after the same
    history: the whole engine, one request at a time.

    After every turn all of its KV is copied out and its GPU blocks are freed, so that the next turn finds it on CPU.
    link: stands in for copy streams on a CPU.
    """

    def __init__(self, model: LoadedModel, tokens: int, new: int, batch_tokens: int, link: Link | None) -> None:
        self.tokens, self.new = tokens, new
        blocks = ceil_div(tokens + new + 2, CHUNK) + 2
        self.model, self.clock = model, WallClock()
        self.worker = TorchWorker(model, CHUNK, self.clock, link=link)
        self._batch_tokens = batch_tokens
        # Everything idle is copied out at once.
        settings = SchedulerSettings(max_batch_tokens=batch_tokens, swap_out_start=1.0, swap_out_stop=1.0)
        self.worker.start(blocks, blocks)
        policy = Lru(PolicyContext(CHUNK, blocks, blocks, lambda length: 1.0, 0.0, 0))
        self.cache = TwoTierCache(policy=policy, chunk_tokens=CHUNK, gpu_blocks=blocks, cpu_blocks=blocks)
        self.engine = Engine(
            cache=self.cache, settings=settings, worker=self.worker, clock=self.clock,
            max_context=model.spec.max_context, facts=Books(CHUNK),
        )  # fmt: skip
        self._turn = 0
        self._history = array("i", [3 + i * 7 % (_VOCAB - 3) for i in range(tokens)])

    @property
    def profile(self) -> Profile:
        """Of the machine and the link as they are now, measured as a trial does; a hybrid restore decides by it."""
        blocks, settings = self.cache.gpu_blocks, {**self.worker.settings(), "bench": "returning"}
        longest = self.model.spec.max_context
        known = profile_of(
            self.worker, self.clock, CHUNK, blocks * CHUNK, longest, blocks, settings, self._batch_tokens
        )
        return replace(known, load_chunk_s=load_s(self.worker, self.clock, blocks))

    def set_cost_model(self) -> Profile:
        profile = self.profile
        self.cache.begin(cost=profile, layers=self.model.spec.layers, batch_tokens=self._batch_tokens)
        return profile

    def fill(self) -> None:
        """The first turn: compute the history and copy it to CPU."""
        self._ask(array("i"), 1)

    def ttft_ms(self, mode: RestoreMode) -> float:
        """Time to first token of one return, restored in this mode."""
        self.cache.restorer.mode = mode
        turn = self._ask(self._question(), 1)
        found, again = turn.cpu_hit_tokens or 0, turn.cpu_recomputed_tokens
        assert turn.history_tokens == found == self.tokens, "the history was not all on CPU"
        assert again == {"load": 0, "recompute": found}.get(mode, again)
        assert turn.ttft_ms is not None
        return turn.ttft_ms

    def hit_ms(self) -> float:
        """Time to first token of one return with all of its KV on the GPU: what the new tokens cost by themselves."""
        self.cache.restorer.mode = "load"
        self._ask(self._question(), 1, leave=True)
        turn = self._ask(self._question(), 1)
        assert turn.ttft_ms is not None and turn.gpu_hit_tokens == self.tokens
        return turn.ttft_ms

    def split(self) -> Split:
        """What the cost model predicts for such a return, without the overhead of an engine."""
        assert self.cache.restorer.times is not None
        on_cpu = [(start, min(start + CHUNK, self.tokens)) for start in range(0, self.tokens, CHUNK)]
        return self.cache.restorer.times.choose([(self.tokens, self.tokens + self.new)], on_cpu, 0)

    def close(self) -> None:
        self.worker.close()

    def _question(self) -> array[int]:
        self._turn += 1
        return array("i", [3 + (self._turn * 31 + i * 11) % (_VOCAB - 3) for i in range(self.new)])

    def _ask(self, question: array[int], output: int, leave: bool = False) -> TurnRecord:
        number = self._turn = self._turn + 1
        prompt = self._history + question
        request = Request(number, "returning", number, prompt, Length(output))
        request.intended_s = self.clock.now_s()
        self.engine.submit(request)
        finished: TurnRecord | None = None
        while self.engine.busy or self.engine.progressed:
            for event in self.engine.step(None):
                finished = event.turn or finished
        assert finished is not None
        if finished.status != "completed":
            raise WorkerError(f"The conversation could not be served: {finished.error}")
        session = self.engine.cache.sessions.get("returning")
        assert session is not None
        self.cache.truncate(session, self.tokens)
        if not leave:
            self.cache.room.reclaim(self.cache.gpu_blocks, self.clock.now_s())
        return finished
