"""Agents on Ray: the tokens of plain decoding, what is kept and what is not, and where memory ends."""

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.errors import CapacityError, MemoryRanOut, RequestFailed
from pensieve.plugins.engines.base import EngineSetup
from pensieve.plugins.engines.process import resident_bytes
from pensieve.plugins.engines.ray_agents import RayKeepalive, RayServerless, Replica
from pensieve.plugins.engines.weights import plain_module
from tests.engines.small import ask, begun, greedy, prompt, served, setup_of
from tests.waiting import PATIENCE_S, Side, descendants


def test_a_replica_keeps_its_conversation_and_computes_only_what_is_new() -> None:
    setup = setup_of()
    replica, module = Replica(setup, 256, None), plain_module(setup)
    replica.load()
    try:
        first = replica.answer(ask(1, "a", prompt(40)))
        assert first.tokens is not None and list(first.tokens) == greedy(module, prompt(40), 6)
        whole = prompt(40) + first.tokens + prompt(9, start=2)
        second = replica.answer(ask(2, "a", whole, turn=2))
        assert second.tokens is not None and list(second.tokens) == greedy(module, whole, 6)
        assert second.cached_tokens == 40 + 6 - 1
        assert second.emitted_s and first.emitted_s and second.emitted_s[0] > first.emitted_s[-1]
        replica.forget()
        again = replica.answer(ask(3, "b", whole))
        assert again.tokens == second.tokens and again.cached_tokens == 0
        with pytest.raises(CapacityError):
            replica.answer(ask(4, "b", prompt(400), turn=2))
    finally:
        replica.close()


@pytest.mark.parametrize(
    ("kind", "device", "conversations", "sharing"),
    [
        (RayKeepalive, "cpu", 3, 3),
        (RayKeepalive, "cpu", None, 1),
        (RayServerless, "cpu", 3, 1),
        (RayServerless, "cuda:0", 1000, 100),
    ],
)
def test_a_process_is_told_its_share(kind: type[Any], device: str, conversations: int | None, sharing: int) -> None:
    """An actor told of the whole limit would pack a second copy, as would all others, until one of them is killed. A GPU's
    memory is the limit, and not Ray's count of them."""
    setup = setup_of(device=device, memory_bytes=2**31 + 1, conversations=conversations)
    engine = kind(setup)
    assert (engine._kv_tokens, engine._share_bytes) == (232, (2**31 + 1) // sharing), "the longest, and a block"
    assert engine._gpu_share == (0.01 if device.startswith("cuda") else 0.0)


def test_closing_ends_requests_that_ray_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that had timed out hung where Ray was gone."""
    waited = threading.Event()

    def wait(promised: Any, timeout: float) -> Any:
        waited.set()
        time.sleep(timeout)
        return [], promised

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait))
    engine = RayServerless(setup_of())
    asking = Side(engine._result, None)
    assert waited.wait(PATIENCE_S)
    engine.close()
    assert asking.ended() and isinstance(asking.error, RequestFailed)


@pytest.mark.slow
def test_actors_keep_their_agents_until_memory_ends_and_tasks_keep_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """One Ray for both, since it takes seconds to start."""
    pytest.importorskip("ray")
    from pensieve.plugins.engines.ray_agents import ray_cluster

    setup = setup_of()
    module, before = plain_module(setup), descendants()
    with ray_cluster(2, 0):
        first = _actors_until_memory_ends(setup, module)
        _tasks_keep_nothing(setup, first)
    assert not descendants() - before, "Ray ends with the block that began it"
    assert "(raylet)" not in "".join(capfd.readouterr()), "the actor that was killed is told of in its turn"
    assert "RAY_AUTH_TOKEN" not in os.environ


def _actors_until_memory_ends(setup: EngineSetup, module: Any) -> list[int]:
    engine = RayKeepalive(setup)
    system = begun(engine)
    [warm] = served(system, ask(1, "warmup-0", prompt(30, start=3), phase="warmup"))
    assert warm.status == "completed"
    [pid] = engine._pids
    one = resident_bytes(pid)
    assert one > 50e6, "a process of its own, with torch and a model"

    watch = engine._watch
    watch.limit_bytes = int(1.3 * one)
    [turn] = served(system, ask(2, "agent-0", prompt(40)))
    assert engine._pids == [pid], "the agent took the warmed actor over"
    assert list(turn.token_ids) == greedy(module, prompt(40), 6) and turn.gpu_hit_tokens == 0

    [beyond, later] = served(system, *(ask(n, f"agent-{n}", prompt(40, start=n)) for n in (3, 4)))
    assert beyond.status == later.status == "failed"
    assert {beyond.finish_reason, later.finish_reason} == {MemoryRanOut.reason}
    assert len(engine._starts) == 1 and len(watch.killed) == 1, "one was tried, and the ramp stopped"

    whole = prompt(40) + turn.token_ids + prompt(9, start=2)
    [again] = served(system, ask(5, "agent-0", whole, turn=2))
    assert list(again.token_ids) == greedy(module, whole, 6), "the agent that was there goes on"
    assert again.gpu_hit_tokens == again.history_tokens == 45
    assert engine.counters()["processes_peak_bytes"] > watch.limit_bytes
    system.close()
    return list(turn.token_ids)


def _tasks_keep_nothing(setup: EngineSetup, first: list[int]) -> None:
    engine = RayServerless(setup)
    system = begun(engine)
    [turn] = served(system, ask(1, "a", prompt(40)))
    assert list(turn.token_ids) == first
    assert turn.gpu_hit_tokens == 0 and turn.ttft_ms is not None
    assert turn.ttft_ms > engine._starts[0].start_s * 1e3, "the start of its process is part of the step"
    system.close()
