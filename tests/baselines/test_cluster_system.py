"""A cluster on one virtual clock: one replica is the single engine; routing, failures, and what is counted."""

import json
import math
import random
from collections import Counter, defaultdict

import pytest

from pensieve.core.request import Length, Request, tokens_of
from pensieve.lab.compose.build import build_cluster, build_system, build_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.replay import replay
from pensieve.lab.workload.base import Arrival, Following
from pensieve.plugins.cluster.cluster_system import ClusterSystem
from pensieve.plugins.cluster.outlook import Outlook
from pensieve.plugins.cluster.routing import ROUTERS, Turn, affinity
from tests.composed import checked
from tests.test_replay import Listed

SMALL = ("model=llama_25m", "cache.gpu='704 tokens'", "cache.cpu='512 tokens'")
LOAD = (
    "workload=chat", "workload.conversations=12", "workload.users=6", "workload.min_turns=3", "workload.max_turns=4",
    "workload.think_time_s=0.02", "workload.think_time_cap_s=null", "workload.max_new_tokens=8", "workload.pressure=0",
)  # fmt: skip
RECORDED = ("workload=trace", "workload.format=mooncake", "cache.gpu='8192 tokens'", "cache.chunk_tokens=64")
AGENTS = ("workload=agents", "workload.agents=6", "workload.act_s=0.05")


def run(*overrides, ahead=True, asked=None):
    """ahead: replicas may run ahead of each other. asked: a workload in place of the one that is configured."""
    load = () if overrides[:1] in (AGENTS[:1], RECORDED[:1]) else LOAD
    plan = plan_trial(checked(*SMALL, *load, *overrides))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    workload, described = build_workload(plan, tokenizer)
    build = build_system if plan.config.hardware.router == "single" else build_cluster
    system = build(plan, tokenizer, described=described)
    if not ahead:
        system.look_ahead = lambda foresee: None
    system.start()
    try:
        record = replay(system, asked or workload)
        return list(record.turns), system.counters(), system
    finally:
        system.close()


def said(turns):
    return {(turn.session, turn.turn): list(turn.token_ids) for turn in turns}


@pytest.mark.parametrize("router", ["affinity", "random"])
def test_one_replica_is_the_single_engine_exactly(router):
    alone, counted, _ = run()
    behind, counted_behind, _ = run(f"hardware.router={router}")
    assert list(map(repr, behind)) == list(map(repr, alone)), "every column of every turn, in order"
    for name in ("schedule_ms",):  # of the wall clock
        counted.pop(name), counted_behind.pop(name)
    assert counted_behind == {**counted, "moved_turns": 0}
    assert counted["dropped_chunks"] > 0, "the load is beyond what fits, or this shows little"


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_request_ends_once_with_its_history_accounted_for(router):
    turns, counted, system = run(f"hardware.router={router}", "hardware.replicas=4")
    assert len({(turn.session, turn.turn) for turn in turns}) == len(turns) == len(run()[0])
    history = defaultdict(int)
    for turn in sorted(turns, key=lambda turn: turn.turn):
        assert turn.status == "completed" and turn.prompt_tokens is not None and turn.history_tokens is not None
        assert turn.history_tokens == max(history[turn.session] - 1, 0), "what was said before, wherever it was"
        found = (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) + (turn.recomputed_tokens or 0)
        assert found == turn.history_tokens
        history[turn.session] = turn.prompt_tokens + turn.output_tokens
    assert (counted["moved_turns"] == 0) == (router == "affinity")
    place = {(one.session, one.turn): system._destination(one.session, one.turn) for one in turns}
    if router == "random":
        assert counted["moved_turns"] == sum(place[s, t] != place[s, t - 1] for s, t in place if t > 1)
    assert system.settings()["gpu_tokens"] == 4 * 704


EAGER = (  # long replies, short thoughts, and users who go on to conversations elsewhere
    "workload.conversations=12", "workload.min_turns=1", "workload.max_turns=3", "workload.max_new_tokens=24",
    "workload.think_time_s=0.004", "workload.warmup_turns=9",
)  # fmt: skip
LOADS = (
    ("affinity", EAGER),
    ("random", ("workload.users=null", "workload.request_interval=0.001", "workload.think_time_s=0.001")),
    ("affinity", ("workload.timeout_s=0.004",)),
    ("least_loaded", (*EAGER, "eviction=belady", "hardware.replicas=2")),
    ("random", AGENTS),
    ("random", (*EAGER, "workload.timeout_s=0.05")),
)


@pytest.mark.parametrize("seed", range(len(LOADS)))
def test_replicas_that_run_ahead_of_each_other_do_what_they_do_step_by_step(seed):
    router, load = LOADS[seed]
    replicas = random.Random(seed).choice([3, 5, 7])
    overrides = (*load[:1], f"hardware.replicas={replicas}", *load[1:], f"seed={seed}", f"hardware.router={router}")
    (turns, counted, system), (apart, counted_apart, stepped) = run(*overrides), run(*overrides, ahead=False)
    assert list(map(repr, turns)) == list(map(repr, apart)), "every column of every turn, in order"
    for found in (counted, counted_apart):
        found.pop("schedule_ms")  # of the wall clock
    assert counted == counted_apart
    assert system.clock.now_ns() == stepped.clock.now_ns()


def test_recorded_times_let_replicas_run_ahead_and_change_nothing(tmp_path, monkeypatch):
    """Turns of five conversations come every 40 ms, while the replies to others go on."""
    lines = []
    for number in range(40):
        of, at = number % 5, 1000 * (number % 5) + number // 5
        asked = {"timestamp": 40 * number, "input_length": 512 * (1 + number // 5) + 7, "output_length": 300 + 7 * of}
        lines.append(json.dumps({**asked, "hash_ids": [*range(1000 * of, at + 1), 10**6 + number]}))
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    steps, step = Counter(), ClusterSystem._step
    monkeypatch.setattr(
        ClusterSystem, "_step", lambda one, limit: (steps.update([one._outlook is None]), step(one, limit))
    )
    given = (*RECORDED, f"workload.path={tmp_path / 'trace.jsonl'}", "hardware.replicas=4", "hardware.router=random")
    (turns, counted, _), (apart, counted_apart, _) = run(*given), run(*given, ahead=False)
    assert list(map(repr, turns)) == list(map(repr, apart)) and len(turns) >= 40
    assert counted["moved_turns"] == counted_apart["moved_turns"] > 0
    assert 3 * steps[False] < steps[True]


def test_nothing_along_a_chain_of_turns_comes_sooner_than_the_outlook_says():
    """Random walks through random turns that follow each other, each request announced, sent and ended in between."""
    drawn = random.Random(0)
    replicas, turns = 4, 12
    for _ in range(200):
        pauses = [drawn.choice([0, 1, 7, 50, 400]) for _ in range(turns)]  # ms
        follow = [[one for one in range(at + 1, turns) if drawn.random() < 0.3] for at in range(turns)]
        places = [
            drawn.choice([None, *range(replicas)] if drawn.random() < 0.1 else range(replicas)) for _ in range(turns)
        ]
        unknown = drawn.choice([None, None, drawn.randrange(turns)])

        def foresee(session, turn):
            known = (pauses[turn] / 1e3, tuple((session, one) for one in follow[turn]))  # noqa: B023
            return None if turn == unknown else Following(*known)  # noqa: B023

        outlook = Outlook(replicas, lambda _, turn: places[turn], foresee)  # noqa: B023
        ns, at, clear = 0, 0, dict.fromkeys(range(replicas), 0)  # of each, the furthest that was promised
        while True:
            begins = ns + drawn.choice([10, 10**7])
            request = Request(at, "a", at, tokens_of([1]), Length(1))
            outlook.announce(begins, request)
            for one in clear:
                clear[one] = max(clear[one], outlook.clear_ns(one, ns))
            place = places[at]
            here = drawn.randrange(replicas) if place is None else place
            assert clear[here] <= begins, (at, clear, begins)
            outlook.passed(begins)
            outlook.sent(request, here)
            for one in clear:
                if one != here:  # which stops at its own ends
                    clear[one] = max(clear[one], outlook.clear_ns(one, begins))
            ns = begins + drawn.choice([0, 10**6])
            if not follow[at] or at == unknown:
                break
            outlook.ended(at)
            ns += pauses[at] * 10**6
            at = drawn.choice(follow[at])


class Overlapping(Listed):
    """The second turn of a conversation is due before the first one ends."""

    def __init__(self):
        requests = [Request(number, "a", number, tokens_of([7] * 4), Length(50)) for number in (1, 2)]
        super().__init__(Arrival(0.0, requests[0]), Arrival(1e-3, requests[1], 2e-3))

    def foresee(self, session, turn):
        return Following(0.0, ((session, turn + 1),)) if turn == 1 else Following(math.inf)


def test_a_turn_that_was_announced_and_is_never_sent_holds_no_replica_back():
    turns, _, system = run("hardware.router=affinity", "hardware.replicas=3", asked=Overlapping())
    assert [turn.turn for turn in turns if turn.status == "completed"] == [1]
    assert not system._outlook._chains


@pytest.mark.parametrize(
    "load",
    [
        ("workload.conversations=30", "hardware.router=random"),
        (*EAGER, "hardware.router=random", "workload.timeout_s=0.05"),
    ],
)
def test_conversations_that_ended_are_forgotten_and_nothing_else_changes(load, monkeypatch):
    forgets, counted, system = run("hardware.replicas=4", *load)
    kept = [sum(map(len, (system._said, system._home, system._served))), records(system)]
    monkeypatch.setattr(ClusterSystem, "ended", lambda *_: None)
    keeps, counted_kept, system = run("hardware.replicas=4", *load)
    assert list(map(repr, forgets)) == list(map(repr, keeps)), "every column of every turn, in order"
    for found in (counted, counted_kept):
        found.pop("schedule_ms")  # of the wall clock
    assert counted == counted_kept
    assert kept[0] == 0 < len(system._said), "every conversation has ended"
    assert kept[1] < records(system), "what is left of them is in a cache"


def records(system):
    """Of conversations, in all engines."""
    return sum(len(replica.system.engine.cache.sessions) for replica in system._replicas)


def test_a_conversation_moves_only_when_its_own_replica_leaves():
    class One:
        in_flight = 0

        def __init__(self, number):
            self.number = number

        def held_tokens(self, session):
            return 0

    replicas = [One(number) for number in range(10)]
    turns = [Turn(f"s{n}", 1) for n in range(1000)]
    before = {turn: affinity(turn, replicas, 0).number for turn in turns}
    shares = Counter(before.values())
    assert set(shares) == set(range(10)) and max(shares.values()) < 150
    rest = [replica for replica in replicas if replica.number != 3]
    for turn in turns:
        moved = affinity(turn, rest, 0).number
        assert (moved != before[turn]) == (before[turn] == 3)
