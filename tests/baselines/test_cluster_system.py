"""A cluster on one virtual clock: one replica is the single engine; routing, failures, and what is counted."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from pensieve.baselines.cluster_system import COUNTED
from pensieve.baselines.routing import ROUTERS, affinity
from pensieve.compose import build_cluster, build_system, build_tokenizer, build_workload, plan_trial
from pensieve.plan import StepPlan
from pensieve.record import TurnRecord
from pensieve.replay import replay
from pensieve.request import Length, Request, tokens_of
from pensieve.worker.simulated import SimulatedWorker
from tests.composed import checked

SMALL = ("model=llama_25m", "cache.gpu='704 tokens'", "cache.cpu='512 tokens'")
LOAD = (
    "workload=chat", "workload.conversations=12", "workload.users=6", "workload.min_turns=3", "workload.max_turns=4",
    "workload.think_time_s=0.02", "workload.think_time_cap_s=null", "workload.max_new_tokens=8", "workload.pressure=0",
)  # fmt: skip
AGENTS = ("workload=agents", "workload.agents=6", "workload.act_s=0.05")


def run(*overrides: str, ahead: bool = True) -> tuple[list[TurnRecord], dict[str, float], Any]:
    """ahead: replicas may run ahead of each other."""
    load = () if overrides[:1] == AGENTS[:1] else LOAD
    plan = plan_trial(checked(*SMALL, *load, *overrides))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    workload, described = build_workload(plan, tokenizer)
    build = build_system if plan.config.hardware.router == "single" else build_cluster
    system: Any = build(plan, tokenizer, described=described)
    if not ahead:
        system.look_ahead = lambda foresee: None
    system.start()
    try:
        record = replay(system, workload)
        return list(record.turns), system.counters(), system
    finally:
        system.close()


def said(turns: list[TurnRecord]) -> dict[tuple[str, int], list[int]]:
    return {(turn.session, turn.turn): list(turn.token_ids) for turn in turns}


@pytest.mark.parametrize("router", ["affinity", "random"])
def test_one_replica_is_the_single_engine_exactly(router: str) -> None:
    alone, counted, _ = run()
    behind, counted_behind, _ = run(f"hardware.router={router}")
    assert list(map(repr, behind)) == list(map(repr, alone)), "every column of every turn, in order"
    for name in ("schedule_ms",):  # of the wall clock
        counted.pop(name), counted_behind.pop(name)
    assert counted_behind == {**counted, **dict.fromkeys(COUNTED, 0)}
    assert counted["dropped_chunks"] > 0, "the load is beyond what fits, or this shows little"


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_request_ends_once_with_its_history_accounted_for(router: str) -> None:
    turns, counted, system = run(f"hardware.router={router}", "hardware.replicas=4")
    assert len({(turn.session, turn.turn) for turn in turns}) == len(turns) == len(run()[0])
    history: dict[str, int] = defaultdict(int)
    for turn in sorted(turns, key=lambda turn: turn.turn):
        assert turn.status == "completed" and turn.prompt_tokens is not None and turn.history_tokens is not None
        assert turn.history_tokens == max(history[turn.session] - 1, 0), "what was said before, wherever it was"
        found = (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) + (turn.recomputed_tokens or 0)
        assert found == turn.history_tokens
        history[turn.session] = turn.prompt_tokens + turn.output_tokens
    assert (counted.get("moved_turns", 0) == 0) == (router == "affinity")
    assert system.settings()["gpu_tokens"] == 4 * 704


def test_times_of_a_cluster_never_go_back_and_no_arrival_is_in_the_past() -> None:
    turns, _, _ = run("hardware.router=least_loaded", "hardware.replicas=3")
    for turn in turns:
        assert turn.arrived_s is not None and turn.sent_s is not None and turn.finished_s is not None
        assert turn.intended_s <= turn.sent_s + 1e-9 <= turn.arrived_s + 2e-9
        assert turn.first_token_s is not None and turn.arrived_s <= turn.first_token_s <= turn.finished_s
    ends = [turn.finished_s for turn in turns]
    assert ends == sorted(ends)  # type: ignore[type-var]


EAGER = (  # long replies, short thoughts, and users who go on to conversations elsewhere
    "workload.conversations=24", "workload.min_turns=1", "workload.max_turns=3", "workload.max_new_tokens=48",
    "workload.think_time_s=0.004", "workload.warmup_turns=18",
)  # fmt: skip
LOADS = (
    ("affinity", EAGER),
    ("random", EAGER),
    ("affinity", (*EAGER, "workload.think_time_s=0")),
    ("random", ("workload.users=null", "workload.request_interval=0.001", "workload.think_time_s=0.001")),
    ("affinity_bounded", ("workload.timeout_s=0.004",)),
    ("least_loaded", (*EAGER, "eviction=belady", "hardware.replicas=2")),
    ("affinity", ("hardware.failure_s=0.05", "hardware.restart_s=0.02")),
    ("prefix_aware", ("baseline=prefix_cache", "eviction=lru", "workload.think_time_s=0.002")),
    ("random", AGENTS),
    ("random", (*EAGER, "hardware.migration=always", "workload.timeout_s=0.05")),
)


@pytest.mark.parametrize("seed", range(len(LOADS)))
def test_replicas_that_run_ahead_of_each_other_do_what_they_do_step_by_step(seed: int) -> None:
    router, load = LOADS[seed]
    replicas = random.Random(seed).choice([3, 5, 7])
    overrides = (*load[:1], f"hardware.replicas={replicas}", *load[1:], f"seed={seed}", f"hardware.router={router}")
    (turns, counted, system), (apart, counted_apart, stepped) = run(*overrides), run(*overrides, ahead=False)
    assert list(map(repr, turns)) == list(map(repr, apart)), "every column of every turn, in order"
    for found in (counted, counted_apart):
        found.pop("schedule_ms")  # of the wall clock
    assert counted == counted_apart
    assert system.clock.now_ns() == stepped.clock.now_ns()


def test_a_replica_that_runs_ahead_has_the_windows_of_a_single_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = SimulatedWorker.launch
    plans = 0

    def counted(worker: SimulatedWorker, plan: StepPlan) -> None:
        nonlocal plans
        plans += 1
        launch(worker, plan)

    monkeypatch.setattr(SimulatedWorker, "launch", counted)
    routed = (
        "hardware.router=affinity",
        "hardware.replicas=4",
        "cache.gpu='4096 tokens'",
        "workload.max_new_tokens=64",
    )
    found = []
    for ahead in (True, False):
        plans = 0
        turns, _, _ = run(*routed, ahead=ahead)
        found.append(plans / len(turns))
    assert found[0] < found[1] / 2, "plans a turn"


def test_affinity_keeps_what_random_routing_computes_again() -> None:
    def recomputed(router: str) -> int:
        turns, _, _ = run(f"hardware.router={router}", "hardware.replicas=4", "cache.gpu='4096 tokens'")
        return sum(turn.recomputed_tokens or 0 for turn in turns)

    assert recomputed("affinity") == 0
    assert 0 <= recomputed("prefix_aware") < recomputed("random") / 2, (
        "it leaves a replica that has far more than others"
    )


def test_a_failure_loses_no_turn_and_doubles_none() -> None:
    calm, _, _ = run("hardware.router=affinity", "hardware.replicas=3")
    rough, counted, _ = run(
        "hardware.router=affinity", "hardware.replicas=3", "hardware.failure_s=0.05", "hardware.restart_s=0.02"
    )
    assert counted["replica_failures"] > 3 and counted["restarted_requests"] > 0
    assert Counter((turn.session, turn.turn) for turn in rough) == Counter((t.session, t.turn) for t in calm)
    assert {turn.status for turn in rough} == {"completed"}
    assert [len(one) for one in said(rough).values()] and {k: len(v) for k, v in said(rough).items()} == {
        k: len(v) for k, v in said(calm).items()
    }
    assert sum(turn.recomputed_tokens or 0 for turn in rough) > sum(turn.recomputed_tokens or 0 for turn in calm)


def test_a_conversation_moves_only_when_its_own_replica_leaves() -> None:
    class One:
        in_flight = 0

        def __init__(self, number: int) -> None:
            self.number = number

        def held_tokens(self, session: str) -> int:
            return 0

    replicas = [One(number) for number in range(10)]
    requests = [Request(n, f"s{n}", 1, tokens_of([1]), Length(1)) for n in range(1000)]
    before = {request.id: affinity(request, replicas, 0).number for request in requests}
    shares = Counter(before.values())
    assert set(shares) == set(range(10)) and max(shares.values()) < 150
    rest = [replica for replica in replicas if replica.number != 3]
    for request in requests:
        moved = affinity(request, rest, 0).number
        assert (moved != before[request.id]) == (before[request.id] == 3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [(("hardware.replicas=2",), "need a router"), (("hardware.failure_s=1",), "need a router")],
)
def test_replicas_without_a_router_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(Exception, match=said):
        run(*overrides)
