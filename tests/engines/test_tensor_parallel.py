"""A model divided between two processes: every token is transformers' own, wherever its history was; they end together."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import cache as remember
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Moved, StepResult
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Event, Length, Request, Sampling
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.asked import ModelAsked
from pensieve.device.sharding import refuse_unsharded
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.errors import EngineFailed, UnsupportedModel, WorkerError
from pensieve.plugins.engines import tensor_parallel
from pensieve.plugins.engines.tensor_parallel import Failure, Setup, TensorParallelWorker, Together
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import WallClock
from pensieve.serve.systems.threaded_system import ThreadedSystem
from pensieve.specs import HardwareSpec
from tests.simulated import TalkingEngine
from tests.waiting import PATIENCE_S, until
from tests.worker.torch.driver import engine_on, plain_generate, random_tokens, served, tiny_model, tiny_spec

CHUNK = 8
load = remember(tiny_model)


def serving(worker: Any, gpu_blocks: int, cpu_blocks: int) -> TalkingEngine:
    return engine_on(worker, gpu_blocks, cpu_blocks, CHUNK, policy=RetentionValue)


def exact_turns(engine: TalkingEngine, reference: Any, turns: int, sessions: str, output: int) -> list[TurnRecord]:
    """Rounds of one request a session, all of a round at once; each reply is transformers' generate over its history."""
    number, records = 0, []
    for turn in range(1, turns + 1):
        batch, expected = [], {}
        for session in sessions:
            number += 1
            prompt = random_tokens(11 + 5 * (number % 4), number)
            batch.append(Request(number, session, turn, prompt, Length(output)))
            known = engine.cache.sessions.get(session)
            expected[number] = plain_generate(reference, [*(known.tokens if known else ()), *prompt], output)
        finished = served(engine, *batch)
        assert {n: list(record.token_ids) for n, record in finished.items()} == expected
        records += finished.values()
    return records


def setup(name: str = "llama", ranks: int = 2, **changes: Any) -> Setup:
    asked = ModelAsked(tiny_spec(name, **changes), threads=1, chunk_tokens=CHUNK)
    return Setup(asked, ("cpu",) * ranks, TorchOptions())


@pytest.fixture(scope="module")
def group() -> Iterator[TensorParallelWorker]:
    """Two processes of a Llama with 4 heads and 2 KV heads: one KV head each."""
    worker = TensorParallelWorker(setup(), WallClock())
    yield worker
    worker.close()


# -- what needs the processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gpu_hit_cpu_restore_dropped_and_recomputed_equal_generate(group: TensorParallelWorker) -> None:
    engine = serving(group, gpu_blocks=20, cpu_blocks=10)
    records = exact_turns(engine, load("llama"), turns=4, sessions="abcd", output=5)
    for where in ("gpu_hit_tokens", "cpu_hit_tokens", "recomputed_tokens"):
        assert sum(getattr(record, where) or 0 for record in records) > 0, f"no {where}: the test shows nothing"
    counters = engine.facts.counts
    block_bytes = CHUNK * tiny_spec("llama").kv_bytes_per_token
    assert counters.h2d_bytes == engine.cache.counters.swapped_in_blocks * block_bytes, (
        "both halves of a block are counted"
    )
    settings = group.start(20, 10).settings
    assert settings["ranks"] == 2 and settings["collectives"] == "gloo"
    assert settings["gpu_pool_bytes"] == 20 * block_bytes, "each rank has its heads of the pool, no more"
    engine = serving(group, gpu_blocks=8, cpu_blocks=8)
    exact_turns(engine, load("llama"), turns=1, sessions="ef", output=24)
    assert engine.scheduler.counters.preempted > 0


@pytest.mark.slow
def test_tokens_drawn_by_chance_are_those_of_one_process(group: TensorParallelWorker) -> None:
    def drawn(worker: Any) -> list[list[int]]:
        requests = [Request(n, f"s{n}", 1, random_tokens(9, n), Length(10)) for n in (1, 2)]
        for request in requests:
            request.sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
        finished = served(serving(worker, gpu_blocks=20, cpu_blocks=0), *requests)
        return [list(finished[number].token_ids) for number in (1, 2)]

    assert drawn(group) == drawn(TorchWorker(load("llama"), CHUNK, WallClock()))


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_engine_with_its_name_and_leaves_nobody(group: TensorParallelWorker) -> None:
    """The last test of the group: it is gone afterwards."""
    system = ThreadedSystem(
        model=tiny_spec("llama"), hardware=HardwareSpec("cpu", simulated=False, device="cpu"), worker=group,
        clock=WallClock(), cache=TwoTierCache, policy=RetentionValue, scheduler=SchedulerSettings(),
        gpu_blocks=20, cpu_blocks=0, chunk_tokens=CHUNK,
    )  # fmt: skip
    other = group.pids[1]
    everybody = [one for pid in group.pids for one in (psutil.Process(pid), psutil.Process(pid).parent()) if one]
    assert len(everybody) == 4, "each has a guard"
    system.start()
    over: Future[TurnRecord] = Future()

    def happened(event: Event) -> None:
        """Holds the engine up at its first token."""
        if psutil.pid_exists(other):
            os.kill(other, signal.SIGKILL)

    try:
        listener: Any = SimpleNamespace(streams=False, happened=happened, failed=over.set_exception)
        system.begin(Request(1, "a", 1, random_tokens(9, 1), Length(140)), listener)
        with pytest.raises(WorkerError, match=rf"Rank 1 of 2 \(process {other}\) was killed by signal 9"):
            over.result(PATIENCE_S)
    finally:
        system.close()
    assert until(lambda: not any(process.is_running() for process in everybody))


# -- what needs none --------------------------------------------------------------------------------------------------------


def test_an_architecture_without_a_plan_or_with_one_that_divides_no_kv_is_refused() -> None:
    """Phi-3 gathers its fused projection before it is cut into queries, keys and values."""
    refuse_unsharded(tiny_spec("llama"), 2)
    phi = replace(tiny_spec("llama"), name="phi", model_type="phi3")
    for spec, why in ((tiny_spec("gpt2"), "has no"), (tiny_spec("opt"), "has no"), (phi, "every process all KV heads")):
        with pytest.raises(UnsupportedModel, match=rf"hardware\.gpus=2: .*{why}.*use hardware\.gpus=1"):
            refuse_unsharded(spec, 2)


@pytest.mark.parametrize(("told", "blamed"), [({0: 5}, 1), ({0: 5, 1: 3}, 1), ({0: 2, 1: 3}, 0)])
def test_the_rank_that_failed_first_is_blamed(
    told: dict[int, int], blamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """told: by rank, when it said that it failed; one that ended without a word was killed, and the others fail for it."""
    monkeypatch.setattr(tensor_parallel, "BLAME_S", 0.1)
    worker: Any = TensorParallelWorker.__new__(TensorParallelWorker)
    pipes = [Pipe(duplex=False) for _ in range(2)]
    gone = {"sends": SimpleNamespace(send=lambda _: None), "wait": lambda _: 137, "last_lines": lambda: ""}
    worker._processes = [SimpleNamespace(receives=hears, **gone) for hears, _ in pipes]
    worker.pids = [11, 12]
    for number, (_, says) in enumerate(pipes):
        if number in told:
            says.send(Failure(EngineFailed(f"Rank {number} failed."), told[number]))
        says.close()
    with pytest.raises(EngineFailed, match=f"Rank {blamed} "):
        worker.room()


def test_a_copy_has_ended_when_it_has_on_all_ranks_and_failed_when_it_has_on_one() -> None:
    together = Together(2)
    first = together.result([StepResult(1, {0: 7}, moved=(Moved(1), Moved(2))), StepResult(1, moved=(Moved(2),))])
    assert first is not None and (first.moved, first.tokens) == ((Moved(2),), {0: 7})
    assert together.result([None, None]) is None
    second = together.result([None, StepResult(None, moved=(Moved(1),))])
    assert second is not None and (second.step, second.moved) == (None, (Moved(1),))
    for oks in ((False, True), (True, False), (True, True)):  # a ticket may be used again
        both = together.result([StepResult(1, moved=(Moved(4, ok=ok),)) for ok in oks])
        assert both is not None and both.moved == (Moved(4, ok=all(oks)),)

    slow = StepResult(3, ended_ns=90, compute_ns=8, stall_ns=1, h2d_bytes=10, d2h_bytes=2)
    fast = StepResult(3, {1: 5}, {1: 0.5}, ended_ns=70, compute_ns=6, stall_ns=3, h2d_bytes=10, d2h_bytes=2)
    assert together.result([fast, slow]) == StepResult(
        3, {1: 5}, {1: 0.5}, ended_ns=90, compute_ns=8, stall_ns=3, h2d_bytes=20, d2h_bytes=4
    ), "times are the slowest rank's, and bytes are all of them"
