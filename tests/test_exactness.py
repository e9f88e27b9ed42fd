"""The whole engine over the torch worker: every sampled token and its logits equal plain transformers, on every path.

Free blocks of both tiers hold NaN, so that one stale read shows in the logits.
"""

from functools import cache as remember
from functools import partial

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Length, Request, Sampling
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.plugins.caches.restore import RestoringCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.stateless import StatelessCache
from tests.exact import CheckedEngine
from tests.invariants import check_cache
from tests.simulated import policy_context
from tests.worker.torch.driver import ARCHITECTURES, random_tokens, tiny_model

CHUNK = 8
load = remember(tiny_model)


def checked(model, gpu_blocks, cpu_blocks, cache=TwoTierCache, **settings):
    policy = RetentionValue(policy_context(CHUNK, gpu_blocks, cpu_blocks))
    manager = cache(policy=policy, chunk_tokens=CHUNK, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
    return CheckedEngine(model, manager, SchedulerSettings(**settings), 512)


def run(engine, *requests):
    for request in requests:
        engine.say(request)
    return {turn.request_id: turn for turn in engine.run()}


def rounds(turns, sessions, output=6):
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
def test_gpu_hit_cpu_restore_and_recompute_equal_the_plain_model(name, fused):
    model = load(name, fused=fused, attention="auto" if fused else "reference")
    engine = checked(model, gpu_blocks=20, cpu_blocks=10)
    for batch in rounds(4, "abcd"):
        run(engine, *batch)
    assert engine.paths.tokens > 50
    assert engine.paths.gpu_hit and engine.paths.cpu_restore and engine.paths.recompute


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_preempted_requests_go_on_exactly(name):
    for cpu_blocks in (24, 0):
        engine = checked(load(name), gpu_blocks=12, cpu_blocks=cpu_blocks)
        asked = [Request(number, "ab"[number - 1], 1, random_tokens(20, number), Length(40)) for number in (1, 2)]
        assert [turn.output_tokens for turn in run(engine, *asked).values()] == [40, 40]
        assert engine.paths.preempted


@pytest.mark.parametrize(
    ("name", "fused", "budget"),
    [("llama", True, 48), ("gemma2", True, 48), ("gpt2", False, 48), ("qwen3", True, 512), ("opt", True, 512)],
)
def test_two_leading_chunks_and_a_hole_within_a_budget(name, fused, budget):
    """The order of recovery: ascending, a prefix of the work list an iteration, over several plans; or one forward."""
    engine = checked(load(name, fused=fused), gpu_blocks=64, cpu_blocks=0, max_batch_tokens=budget)
    run(engine, Request(1, "a", 1, random_tokens(90, 1), Length(4)))
    session = engine.cache.sessions.get("a")
    for chunk in (0, 1, 5):
        engine.cache.tiers.drop_gpu([(session.leaf, chunk, chunk + 1)])
    check_cache(engine.cache)
    engine._poison()
    turn = run(engine, Request(2, "a", 2, random_tokens(100, 2), Length(5)))[2]
    assert (turn.history_tokens, turn.gpu_hit_tokens, turn.recomputed_tokens) == (93, 93 - 24, 24)
    assert engine.facts.counts.steps >= (2 + 3 + 4 if budget == 48 else 4 + 5)
    assert turn.output_tokens == 5 and engine.paths.hole


def test_baselines_give_the_same_tokens_greedy_and_sampled():
    outputs = []
    prefixes = [(partial(make, reuse="prefix"), blocks) for make in (RestoringCache, SharedCache) for blocks in (10, 0)]
    for cache, cpu_blocks in ((TwoTierCache, 10), (TwoTierCache, 0), (StatelessCache, 0), *prefixes):
        engine = checked(load("llama"), gpu_blocks=22, cpu_blocks=cpu_blocks, cache=cache)
        tokens = []
        for batch in rounds(3, "abc"):
            for request in batch:
                request.sampling = Sampling(temperature=0.0 if request.session == "a" else 1.0, top_k=20, seed=3)
            tokens += [(n, list(turn.token_ids)) for n, turn in run(engine, *batch).items()]
        outputs.append(sorted(tokens))
    assert all(one == outputs[0] for one in outputs)
