"""Restores over the torch worker, with copies that take their time: every sampled token's logits equal the plain model's."""

import threading
from functools import partial

import pytest

from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Length, Request
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.plugins.caches.restore import RestoringCache
from pensieve.sim.profile import Profile
from tests.exact import CheckedEngine
from tests.simulated import TalkingEngine, policy_context
from tests.test_exactness import load
from tests.thread_link import ThreadLink, copy_runs
from tests.worker.torch.driver import random_tokens

CHUNK = 8


def engine(name, restore, link, budget, load_ratio):
    """load_ratio: seconds to load a chunk over seconds to compute it, for the split of a hybrid restore."""
    model = load(name)
    blocks = 30
    cache = RestoringCache(
        policy=RetentionValue(policy_context(CHUNK, blocks, 80)),
        chunk_tokens=CHUNK,
        gpu_blocks=blocks,
        cpu_blocks=80,
        restore=restore,
    )
    cache.begin(
        cost=Profile(CHUNK, {128: 0.128, 256: 0.256}, load_ratio * CHUNK / 1000, {}),
        layers=model.spec.layers,
        batch_tokens=budget,
    )
    return CheckedEngine(model, cache, SchedulerSettings(max_batch_tokens=budget), 512, link)


def ask(engine, number, name, tokens, output, turn):
    engine.say(Request(number, name, turn, random_tokens(tokens, number), Length(output)))
    [record] = engine.run()
    return record


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_way_to_restore_gives_the_plain_models_tokens(name):
    outputs = []
    for restore, bytes_per_s in (("load", None), ("hybrid", 2e6), ("recompute", 2e6)):
        checked = engine(name, restore, ThreadLink(bytes_per_s), budget=24, load_ratio=1.0)
        records = [
            ask(checked, 10 * turn + index, conversation, 70 if turn == 1 else 9, 5, turn)
            for turn in (1, 2, 3)
            for index, conversation in enumerate("abc")
        ]
        outputs.append([list(record.token_ids) for record in records])
        found = sum(record.cpu_hit_tokens or 0 for record in records)
        again = sum(record.cpu_recomputed_tokens for record in records)
        assert found > 40
        assert {"load": again == 0, "hybrid": 0 < again < found, "recompute": again == found}[restore]
        checked.torch_worker.close()
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_hybrid_restore_computes_while_the_rest_loads():
    """The loads stand still until two leading iterations are over, and their ticket comes with a later plan."""
    go = threading.Event()
    go.set()

    def copy(piece):
        if piece.target.data_ptr() in to_gpu:
            assert go.wait(20), "an iteration waits for loads that it does not need"
        copy_runs(piece)

    checked = engine("llama", "hybrid", ThreadLink(copy=copy), budget=8, load_ratio=2.0)
    to_gpu = {layer.data_ptr() for layer in checked.torch_worker.tensors.gpu}
    ask(checked, 1, "a", 150, 2, 1)
    ask(checked, 2, "b", 200, 2, 1)
    assert not checked.torch_worker.transfer.wait()
    go.clear()
    checked.forget("b")
    results = []
    commit = checked._commit

    def watched(result):
        results.append(result)
        if len(results) == 2:
            go.set()
        commit(result)

    checked._commit = watched
    turn = ask(checked, 3, "a", 4, 2, 2)
    assert 0 < turn.cpu_recomputed_tokens < (turn.cpu_hit_tokens or 0)
    assert [(result.moved, result.stall_ns) for result in results[:2]] == [((), 0)] * 2
    assert any(result.moved for result in results[2:])
    checked.torch_worker.close()


def test_a_load_that_fails_ends_its_request_and_no_other():
    broken = [False]

    def copy(piece):
        if broken[0] and piece.source.data_ptr() in sources:
            raise OSError("the link is down")
        copy_runs(piece)

    link = ThreadLink(copy=copy)
    checked = engine("llama", "load", link, budget=16, load_ratio=1.0)
    cpu = checked.torch_worker.tensors.cpu
    sources = {layer.data_ptr() for layer in cpu}
    ask(checked, 1, "a", 100, 2, 1)
    ask(checked, 2, "b", 180, 2, 1)
    before = list(checked.cache.sessions.get("a").tokens)
    broken[0] = True
    checked._close = partial(_closed, checked)
    failed = ask(checked, 3, "a", 5, 2, 2)
    assert failed.status == "failed" and "link is down" in (failed.error or "")
    assert list(checked.cache.sessions.get("a").tokens) == before, "its turn is undone"
    broken[0] = False
    assert ask(checked, 4, "b", 5, 2, 2).status == "completed"
    again = ask(checked, 5, "a", 5, 2, 2)
    assert (again.status, again.cpu_hit_tokens or 0) == ("completed", again.cpu_hit_tokens) and again.cpu_hit_tokens
    checked.torch_worker.close()


def _closed(checked, *args):
    """CheckedEngine takes a failed step for a fault; here it is the point."""
    TalkingEngine._close(checked, *args)
