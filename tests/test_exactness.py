"""The whole engine over the torch worker: every sampled token and its logits equal plain transformers, on every path.

Free blocks of both tiers hold NaN, so that one stale read shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as remember
from functools import partial
from typing import Any

import pytest
import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.clock import WallClock
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Length, Request, Sampling, TokenArray
from pensieve.core.scheduler.composition import SchedulerSettings
from pensieve.device.model import LoadedModel
from pensieve.device.worker import TorchWorker
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.serve.books.books import Books
from pensieve.serve.record import TurnRecord
from tests.simulated import TalkingEngine, policy_context
from tests.worker.torch.driver import ARCHITECTURES, plain_logits, random_tokens, tiny_model

CHUNK = 8
load = remember(tiny_model)


class Checked:
    """An engine whose every step is compared with the plain model."""

    def __init__(
        self, model: LoadedModel, gpu_blocks: int, cpu_blocks: int, cache: Any = TwoTierCache, **settings: Any
    ) -> None:
        self.model = model
        policy = RetentionValue(policy_context(CHUNK, gpu_blocks, cpu_blocks))
        manager = cache(policy=policy, chunk_tokens=CHUNK, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
        clock = WallClock()
        self.worker = TorchWorker(model, CHUNK, clock, keep_logits=True)
        self.worker.start(gpu_blocks, manager.cpu_blocks)
        self.worker.tensors.gpu.fill_(float("nan"))
        self.engine = TalkingEngine(
            cache=manager,
            settings=SchedulerSettings(**settings),
            worker=self.worker,
            clock=clock,
            max_context=512,
            facts=Books(CHUNK),
        )
        self.cache = manager
        self.compared = 0
        self._seen: dict[int, list[tuple[TokenArray[int], torch.Tensor]]] = {}

    def run(self, *requests: Request) -> dict[int, TurnRecord]:
        for request in requests:
            self.engine.say(request)
        finished: dict[int, TurnRecord] = {}
        while self.engine.busy:
            slots = {s.slot: s for s in self.engine.scheduler.running}
            events = self.engine.step(None)
            slots.update({s.slot: s for s in self.engine.scheduler.running})
            self.cache.check()
            self.keep(slots)
            self.poison()
            finished |= {event.request_id: event.turn for event in events if event.turn is not None}
        self.compare()
        return finished

    def keep(self, slots: dict[Any, Any]) -> None:
        """The logits of a step, each with the tokens that it is the answer to."""
        for slot, logits in self.worker.last_logits.items():
            sequence = slots.get(slot)
            if sequence is None:
                continue  # admitted and finished within the step: its tokens are compared by the caller
            self._seen.setdefault(sequence.request.id, []).append((sequence.session.tokens[:-1], logits.clone()))
        self.worker.last_logits = {}

    def compare(self) -> None:
        """Every step of a request with one plain forward over all that it said: no position sees a later one."""
        for seen in self._seen.values():
            whole = seen[-1][0]
            expected = plain_logits(self.model, whole)
            for known, logits in seen:
                assert whole[: len(known)] == known
                assert float((logits - expected[len(known) - 1]).abs().max()) < 1e-4
                self.compared += 1
        self._seen.clear()

    def poison(self) -> None:
        tensors = self.worker.tensors
        tensors.gpu[:, sorted(self.cache.free_blocks()[0])] = float("nan")
        if self.cache.cpu_blocks:
            tensors.cpu[:, sorted(self.cache.free_blocks()[1])] = float("nan")


def greedy(model: LoadedModel, prompt: Sequence[int], said: Sequence[int]) -> list[int]:
    """The plain model's choice of each token, after the prompt and those of `said` before it."""
    return plain_logits(model, [*prompt, *said[:-1]])[len(prompt) - 1 :].argmax(dim=1).tolist()


def rounds(turns: int, sessions: str, output: int = 6) -> list[list[Request]]:
    number, batches = 0, []
    for turn in range(1, turns + 1):
        batch = []
        for name in sessions:
            number += 1
            prompt = random_tokens(11 + 5 * (number % 4), number)
            batch.append(Request(number, name, turn, prompt, Length(output)))
        batches.append(batch)
    return batches


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_gpu_hit_cpu_restore_and_recompute_equal_the_plain_model(name: str, fused: bool) -> None:
    checked = Checked(load(name, fused=fused), gpu_blocks=20, cpu_blocks=10)
    records: list[TurnRecord] = []
    for batch in rounds(4, "abcd"):
        records += checked.run(*batch).values()
    assert checked.compared > 50
    assert sum(r.gpu_hit_tokens or 0 for r in records) > 0
    assert sum(r.cpu_hit_tokens or 0 for r in records) > 0
    assert sum(r.recomputed_tokens or 0 for r in records) > 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_preempted_requests_go_on_exactly(name: str) -> None:
    for cpu_blocks in (24, 0):
        checked = Checked(load(name), gpu_blocks=12, cpu_blocks=cpu_blocks)
        finished = checked.run(
            Request(1, "a", 1, random_tokens(20, 1), Length(40)), Request(2, "b", 1, random_tokens(20, 2), Length(40))
        )
        assert checked.engine.scheduler.counters.preempted > 0
        for number in (1, 2):
            said = list(finished[number].token_ids)
            assert len(said) == 40 and said == greedy(checked.model, random_tokens(20, number), said)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_two_leading_chunks_and_a_hole_with_a_budget_of_48(name: str, fused: bool) -> None:
    """The order of recovery: ascending, a prefix of the work list an iteration, over several plans."""
    checked = Checked(load(name, fused=fused), gpu_blocks=64, cpu_blocks=0, max_batch_tokens=48)
    checked.run(Request(1, "a", 1, random_tokens(90, 1), Length(4)))
    session = checked.cache.sessions.get("a")
    for chunk in (0, 1, 5):
        checked.cache.tiers.drop_gpu(session.leaf, chunk, chunk + 1)
    checked.cache.check()
    checked.poison()
    turn = checked.run(Request(2, "a", 2, random_tokens(100, 2), Length(5)))[2]
    assert (turn.history_tokens, turn.gpu_hit_tokens, turn.recomputed_tokens) == (93, 93 - 24, 24)
    assert checked.engine.facts.counts.steps >= 2 + 3 + 4
    said = list(turn.token_ids)
    assert len(said) == 5 and said == greedy(checked.model, session.tokens[:194], said)


def test_baselines_give_the_same_tokens_greedy_and_sampled() -> None:
    outputs = []
    prefixes = [(partial(make, reuse="prefix"), blocks) for make in (TwoTierCache, SharedCache) for blocks in (10, 0)]
    for cache, cpu_blocks in ((TwoTierCache, 10), (TwoTierCache, 0), (StatelessCache, 0), *prefixes):
        checked = Checked(load("llama"), gpu_blocks=22, cpu_blocks=cpu_blocks, cache=cache)
        tokens = []
        for batch in rounds(3, "abc"):
            for request in batch:
                request.sampling = Sampling(temperature=0.0 if request.session == "a" else 1.0, top_k=20, seed=3)
            tokens += [(n, list(turn.token_ids)) for n, turn in checked.run(*batch).items()]
        outputs.append(sorted(tokens))
    assert all(one == outputs[0] for one in outputs)
