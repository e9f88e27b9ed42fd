"""Turns over several engines, which stand in this process for actors: a replica that ends costs time, and no reply."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc_reflection")
import ray
from ray.serve.request_router import ReplicaID

from pensieve.core.clock import WallClock
from pensieve.core.request import History, Length, Request, Sampling, tokens_of
from pensieve.plugins.cluster.routing import Fleet, affinity
from pensieve.plugins.replicas import deployment as deployment_module
from pensieve.plugins.replicas import engine as engine_module
from pensieve.plugins.replicas.call_routing import CallRouting, Candidate, numbers_of, running, unregister
from pensieve.plugins.replicas.deployment import Deployment, Scaling, reason_in
from pensieve.plugins.replicas.engine import EngineReplica
from pensieve.plugins.replicas.router import SessionRouter
from pensieve.plugins.replicas.system import ATTEMPTS, ReplicaSystem
from tests.baselines.systems import PATIENCE_S, HeldWorker, PricedSystem, parts

NAMES = ("one", "two", "three")


class Positional(HeldWorker):
    """Each position and seed has a token of its own, as the noise of sampling has. held_at: the position whose token it does
    not compute before `gate` is opened."""

    held_at: int | None = None

    def collect(self, until_ns):
        plan = self._plan
        if plan is not None and self.held_at in {row.sample.position for row in plan.rows if row.sample is not None}:
            self.gate.clear()
            self.held_at = None
        result = super().collect(until_ns)
        if plan is None or result is None:
            return result
        drawn = {row.slot: row.sample.position % 89 for row in plan.rows if row.sample is not None}
        return replace(result, tokens=drawn)


class OpenedByCancel(PricedSystem):
    """Its worker computes again when a cancellation has come."""

    _worker: Positional

    def cancel(self, request_id, status):
        super().cancel(request_id, status)
        self._worker.gate.set()


class Died(ray.exceptions.RayActorError):
    """As Ray tells that an actor's process is gone."""


class Actors:
    """Replicas, routed to as SessionRouter does. deadly: a replica ends after so many more of its answers' parts."""

    def __init__(self, router):
        self.router = router
        self.alive = {}
        self.systems = []
        self.workers = []
        self.numbers = {}
        self.deadly = {}
        self.mute = set()  # replicas that do not answer what is no turn
        self.failing = set()  # replicas where such a call fails
        self.served = []  # replica, method, turn
        for name in NAMES:
            self.add(name)

    def add(self, name):
        replica = EngineReplica.__new__(EngineReplica)
        clock = WallClock()
        worker = Positional(clock)
        system = OpenedByCancel(worker=worker, clock=clock, **parts())
        replica._id, replica._system, replica._report, replica._origin_s = name, system, system.start(), 1e9
        self.alive[name] = replica
        self.systems.append(system)
        self.workers.append(worker)
        self.numbers = numbers_of(self.numbers, self.alive)

    def hold(self, position):
        """Whoever comes to this token of a turn waits with it until a cancellation comes, or the end of the test."""
        for worker in self.workers:
            worker.held_at = position

    def chosen(self, routing):
        from pensieve.plugins.cluster.routing import ROUTERS

        if routing.to is not None:
            return routing.to if routing.to in self.alive else next(iter(self.alive))
        known = [
            Candidate(name, self.numbers[name], 0, routing.held_tokens if name == routing.home else 0)
            for name in self.alive
        ]
        request = Request(0, routing.family, routing.turn, tokens_of([]), Length(1))
        found = ROUTERS[self.router](request, Fleet.of(known), 0)
        assert isinstance(found, Candidate)
        return str(found.replica)

    def shutdown(self):
        """Nobody is told of its load."""

    def options(self, method_name, stream=False):
        class Method:
            @staticmethod
            def remote(routing, *arguments):
                name = self.chosen(routing)
                self.served.append((name, method_name, routing.turn))
                call = getattr(self.alive[name], method_name)(routing, *arguments)
                return self.streamed(name, call) if stream else self.answered(name, call)

        return Method

    async def answered(self, name, call):
        if name in self.mute:
            call.close()
            await asyncio.Event().wait()
        if name in self.failing:
            call.close()
            raise Died
        return await call

    async def streamed(self, name, parts):
        async for part in parts:
            for one in [part] if not isinstance(part, list) else [[event] for event in part]:
                if name in self.deadly:
                    self.deadly[name] -= 1
                    if self.deadly[name] < 0:
                        self.alive.pop(name, None)
                        raise Died
                yield one


class Heard:
    """A listener that keeps all it is told."""

    streams = False

    def __init__(self):
        self.events = []
        self.error = None
        self.over, self.begun = threading.Event(), threading.Event()

    def happened(self, event):
        self.events.append(event)
        self.begun.set()
        if event.turn is not None:
            self.over.set()

    def failed(self, error):
        self.error = error
        self.over.set()

    @property
    def tokens(self):
        return [event.token for event in self.events if event.token is not None]

    @property
    def turn(self):
        assert self.over.wait(PATIENCE_S) and self.error is None
        [turn] = [event.turn for event in self.events if event.turn is not None]
        return turn


@contextmanager
def replicas(router="affinity"):
    actors = Actors(router)
    system = ReplicaSystem(Deployment({}, Scaling(3, 3), router))
    system.replicas._handle = actors
    system.replicas._thread = threading.Thread(target=system.replicas._loop.run_forever, daemon=True)
    system.replicas._thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_end_process", lambda error: None)  # which is this one
        patch.setattr(Deployment, "up", property(lambda _: list(actors.alive)))
        try:
            yield system, actors
        finally:
            system.close()
            for worker in actors.workers:
                worker.gate.set()
            for engine in actors.systems:
                engine.close()


def ask(system, number, session, turn, prompt, tokens=6, **fields):
    heard = Heard()
    sampling = Sampling(temperature=1.0, seed=5)
    request = Request(number, session, turn, tokens_of(prompt), Length(tokens), sampling, **fields)
    system.begin(request, heard)
    return heard


def talk(system, session, turns, first=1):
    """Each turn's prompt is all that was said and 40 tokens more."""
    said = []
    records = []
    for turn in range(1, turns + 1):
        said += [(turn * 7 + place) % 90 for place in range(40)]
        history = History(len(said) - 41, "kept") if turn > 1 else None
        record = ask(system, first + turn, session, turn, said, history=history).turn
        assert record.status == "completed"
        said += record.token_ids
        records.append(record)
    return records


def test_every_turn_goes_where_the_consistent_hash_of_the_simulated_cluster_sends_it():
    with replicas() as (system, actors):
        records = {name: talk(system, f"alice/{name}", 3, 10 * place) for place, name in enumerate("abcdef")}
    for name, turns in records.items():
        request = Request(0, f"alice/{name}", 1, tokens_of([]), Length(1))
        expected = affinity(request, Fleet.of([Candidate(one, actors.numbers[one], 0, 0) for one in NAMES]), 0)
        assert isinstance(expected, Candidate)
        assert [turn.recomputed_tokens for turn in turns] == [0, 0, 0]
        assert all(turn.gpu_hit_tokens == turn.history_tokens for turn in turns) and turns[2].history_tokens == 91
        assert system._home[f"alice/{name}"][0] == expected.replica
    assert len({home for home, _ in system._home.values()}) > 1, "not all of them hash to one"


def test_what_moves_is_history_that_is_computed_again_and_the_tokens_stay_the_same():
    with replicas("random") as (system, _):
        moving = talk(system, "a", 6)
        counted = system._counted["moved_turns"]
    with replicas() as (system, _):
        staying = talk(system, "a", 6)
        assert system._counted["moved_turns"] == 0
    assert counted >= 2, "or random routing showed nothing"
    assert [turn.token_ids for turn in moving] == [turn.token_ids for turn in staying]
    assert [turn.history_tokens for turn in moving] == [turn.history_tokens for turn in staying]
    assert sum(turn.recomputed_tokens or 0 for turn in moving) > 0
    causes = {miss.cause for turn in moving for miss in turn.misses}
    assert causes == {"new", "restarted"}
    for turn in moving:
        assert sum(miss.tokens for miss in turn.misses) == (turn.prompt_tokens or 0) - (turn.gpu_hit_tokens or 0)


def test_of_an_edited_prompt_what_it_shares_with_the_conversation_is_history():
    """A trial's turns bring their whole prompts; one that goes on from an earlier place shares that much, at any replica."""
    found = {}
    for router in ("affinity", "random"):
        with replicas(router) as (system, _):
            homes = []
            for turn in range(1, 9):
                prompt = tokens_of([*_message(1)[:25], *_message(turn), *_message(turn + 1)])
                system.submit(Request(turn, "a", turn, prompt, Length(6), Sampling(temperature=1.0, seed=5)))
                [record] = [event.turn for event in system.poll(None) if event.turn is not None]
                found[router, turn] = record.history_tokens
                homes.append(system._home["a"][0])
        assert router == "affinity" or len(set(homes)) > 1
    assert all(found["random", turn] == found["affinity", turn] for turn in range(1, 9)), found


@pytest.mark.parametrize("parts", [0, 1, 4, 6])
def test_a_replica_that_ends_in_mid_reply_costs_no_token_and_doubles_none(parts):
    """Before anything, with nothing told, in the middle, and before the end."""
    with replicas() as (system, actors):
        undisturbed = talk(system, "a", 3)
    with replicas() as (system, actors):
        first = talk(system, "a", 2)
        lost = system._home["a"][0]
        actors.deadly[lost] = parts
        said = [token for turn in range(1, 3) for token in (*_message(turn), *first[turn - 1].token_ids)]
        heard = ask(system, 100, "a", 3, [*said, *_message(3)], history=History(len(said) - 1, "kept"))
        turn = heard.turn
        assert lost not in actors.alive and system._home["a"][0] != lost
        assert system._counted["restarted_requests"] == 1
    assert heard.tokens == list(undisturbed[2].token_ids) == list(turn.token_ids)
    assert turn.request_id == 100 and {event.request_id for event in heard.events} == {100}
    assert turn.history_tokens == undisturbed[2].history_tokens == turn.recomputed_tokens, "its history is not there"
    assert undisturbed[2].recomputed_tokens == 0


def _message(turn):
    return [(turn * 7 + place) % 90 for place in range(40)]


def test_a_request_that_ends_every_replica_fails_in_the_end_and_counts_as_moved_once():
    with replicas() as (system, actors):
        [first] = talk(system, "a", 1)
        actors.deadly = dict.fromkeys(NAMES, 3)
        turn = ask(system, 100, "a", 2, [*_message(1), *first.token_ids, *_message(2)]).turn
        assert turn.status == "failed" and turn.error is not None and f"{ATTEMPTS} replicas" in turn.error
        assert not turn.stands and system._counted["restarted_requests"] == ATTEMPTS > 2
        assert system._counted["moved_turns"] == 1


def test_a_reply_that_comes_out_otherwise_is_not_gone_on_with():
    with replicas() as (system, actors):
        lost = actors.chosen(CallRouting("a", 1))
        actors.deadly[lost] = 4
        told, real = [], system._is_new

        def otherwise(ticket, token):
            told.append(token)
            return real(ticket, token + (lost not in actors.alive))

        system._is_new = otherwise
        heard = ask(system, 1, "a", 1, _message(1))
        assert heard.turn.status == "failed" and heard.tokens == told[:3]


def test_who_cancels_is_heard_by_the_replica_that_serves_and_no_other():
    with replicas() as (system, actors):
        actors.hold(60)
        heard = ask(system, 1, "a", 1, _message(1), tokens=200)
        assert heard.begun.wait(PATIENCE_S)
        system.cancel(1, "cancelled")
        turn = heard.turn
        assert turn.status == "cancelled" and 0 < turn.output_tokens < 200 and turn.stands
        assert list(turn.token_ids[: len(heard.tokens)]) == heard.tokens
        [(cancelled, _, _)] = [one for one in actors.served if one[1] == "cancel"]
        assert cancelled == system._home["a"][0]


def test_times_are_those_of_the_callers_clock():
    with replicas() as (system, _):
        before = system.clock.now_s()
        turn = ask(system, 1, "a", 1, _message(1), intended_s=before).turn
        after = system.clock.now_s()
        # The engines' clocks are set elsewhere by the stand-in: what they tell says so, and comes back as it was sent.
        assert turn.intended_s == pytest.approx(before, abs=1e-3)
        assert turn.finished_s is not None and turn.first_token_s is not None
        assert turn.ttft_ms == pytest.approx((turn.first_token_s - turn.intended_s) * 1e3, abs=1e-2)
        assert after > before


def test_a_fork_is_served_where_the_conversation_is_that_it_comes_from():
    from pensieve.core.request import Fork

    with replicas() as (system, _):
        homes = []
        for place in range(6):
            name = f"talk {place}"
            ask(system, 10 * place + 1, name, 1, _message(1)).turn  # noqa: B018
            ask(system, 10 * place + 2, f"{name} fork", 1, _message(1), fork=Fork(name, 30)).turn  # noqa: B018
            ask(system, 10 * place + 3, f"{name} fork", 2, _message(1) + _message(2)).turn  # noqa: B018
            homes.append((system._home[name][0], system._home[f"{name} fork"][0]))
        assert all(parent == child for parent, child in homes) and len(set(homes)) > 1
        system.release("talk 0 fork")
        assert "talk 0 fork" not in system._home and "talk 0 fork" not in system._family


def test_counts_of_a_replica_that_ended_stay_in_the_sum_and_gauges_are_of_those_that_run():
    with replicas() as (system, actors):
        talk(system, "a", 3)
        before = system.counters()
        lost = system._home["a"][0]
        assert system.places("a").count("G") and not system.places("nobody")
        assert system.gauges()["replicas"] == (3, "replicas")
        del actors.alive[lost]
        after = system.counters()
        assert after["steps"] == before["steps"] > 0
        assert after["batched_tokens"] == before["batched_tokens"] > 120
        assert system.gauges()["replicas"] == (2, "replicas") and system.places("a") == ""
        assert system.counters() == after, "counted once, however often somebody asks"


def counted(system):
    """But for what an engine's thread may still add to after a turn's end."""
    return {name: value for name, value in system.counters().items() if name != "schedule_ms"}


def test_counts_neither_dip_nor_double_while_a_replica_does_not_answer_or_is_not_known(monkeypatch):
    with replicas() as (system, actors):
        there = list(NAMES)
        monkeypatch.setattr(Deployment, "up", property(lambda _: list(there)))
        talk(system, "a", 2)
        before, home = counted(system), system._home["a"][0]
        assert before["steps"] > 0
        actors.failing = {home}
        assert counted(system) == before
        actors.failing = set()
        there.remove(home)
        assert counted(system) == before and system.places("a") == ""
        there.append(home)
        assert counted(system) == before, "it is the same one"


def test_who_looks_waits_once_for_a_replica_that_does_not_answer(monkeypatch):
    with replicas() as (system, actors):
        monkeypatch.setattr(deployment_module, "PLACES_S", 1e6)
        monkeypatch.setattr(deployment_module, "GLANCE_S", 0.05)
        monkeypatch.setattr(deployment_module, "CALL_S", 0.2)
        talk(system, "a", 2)
        home = system._home["a"][0]
        actors.mute = set(NAMES) - {home}
        ends = time.monotonic() + PATIENCE_S
        while not system.counters().get("steps"):  # the one that answers is told of, as soon as it is quick enough
            assert time.monotonic() < ends
        system.replicas._told_at = float("-inf")
        assert system.places("a").count("G")
        asked = len(actors.served)
        assert system.places("a").count("G") and system.gauges()
        assert len(actors.served) == asked


def test_requests_under_way_are_told_when_the_system_is_closed():
    with replicas() as (system, actors):
        actors.hold(60)
        heard = ask(system, 1, "a", 1, _message(1), tokens=200)
        assert heard.begun.wait(PATIENCE_S)
        system.close()
        assert heard.over.wait(PATIENCE_S) and heard.error is not None and "closed" in str(heard.error)
        late = ask(system, 2, "a", 1, _message(1))
        assert late.over.wait(PATIENCE_S) and late.error is not None


def test_why_no_replica_starts_is_told_in_the_words_of_our_own_error():
    account = """The deployment failed to start 1 times in a row. Error:
    ray::ServeReplica:engine.initialize_and_get_metadata()
      File "engine.py", line 66, in __init__
    pensieve.errors.EngineMissing: Triton is not here: install it.

    """
    assert reason_in(account) == "Triton is not here: install it."
    assert reason_in("Something\n  else went wrong \n\n") == "else went wrong"
    assert "does not say" in reason_in("")


def test_an_engine_that_crashed_ends_its_process(monkeypatch):
    ended = []
    monkeypatch.setattr(engine_module.os, "_exit", ended.append)
    loop = asyncio.new_event_loop()
    engine_module._Relay(loop).failed(engine_module.WorkerError("The engine stopped."))
    loop.close()
    assert ended == [engine_module.CRASHED]


# -- the router ---------------------------------------------------------------------------------------------------------


def test_a_replica_that_replaces_another_takes_its_number_and_no_other_moves():
    numbers = numbers_of({}, ["a", "b", "c"])
    assert sorted(numbers.values()) == [0, 1, 2]
    after = numbers_of(numbers, ["a", "c", "new"])
    assert {name: after[name] for name in "ac"} == {name: numbers[name] for name in "ac"} and after["new"] == numbers[
        "b"
    ]
    assert numbers_of(after, ["c"]) == {"c": after["c"]}
    assert sorted(numbers_of({"c": 2}, ["c", "d", "e"]).values()) == [0, 1, 2]


class Running:
    def __init__(self, name):
        self.replica_id = ReplicaID(name, None)


class Pending:
    def __init__(self, routing, request_id="r"):
        self.args = [routing]
        self.routing_context = type("Context", (), {"should_backoff": False})()
        self.metadata = type("Metadata", (), {"internal_request_id": request_id})()


def router_of(name, running):
    router = SessionRouter.__new__(SessionRouter)
    router._deployment_id = type("Deployment", (), {"app_name": f"test of {name}"})()
    router.initialize_state(name, 0)
    ids = [one.replica_id for one in running]
    router._numbers = numbers_of({}, ids)
    router._routed = {one: set() for one in ids}
    return router


def choice(router, running, routing):
    pending = Pending(routing)
    [rank] = asyncio.run(router.choose_replicas(running, pending))
    assert pending.routing_context.should_backoff, "or a full replica would be asked again without end"
    return rank


def test_ray_is_told_one_replica_that_of_the_hash():
    running = [Running(name) for name in NAMES]
    router = router_of("affinity", running)
    for session in map(str, range(20)):
        request = Request(0, session, 1, tokens_of([]), Length(1))
        [chosen] = choice(router, running, CallRouting(session, 1))
        expected = affinity(
            request, Fleet.of([Candidate(one, router._numbers[one.replica_id], 0, 0) for one in running]), 0
        )
        assert isinstance(expected, Candidate) and chosen is expected.replica
        assert choice(router, running, CallRouting(session, 9)) == [chosen], "whichever turn it is"
    [left] = choice(router, running[:1], CallRouting("19"))
    assert left is running[0], "who has gone serves nobody"


def test_which_replicas_run_is_known_after_ray_has_set_the_class_anew():
    """As it does whenever it hears of the deployment: it has sent the class about as a value."""
    from ray import cloudpickle

    from pensieve.plugins.replicas import router as module

    cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps(SessionRouter)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    router = router_of("affinity", [])
    router._replicas = {one.replica_id: one for one in map(Running, NAMES)}
    cloudpickle.loads(sent)
    assert running("test of affinity") == list(NAMES)
    unregister("test of affinity")
    assert running("test of affinity") == []


def test_a_call_to_one_replica_reaches_it_and_a_call_to_none_that_is_left_reaches_somebody():
    running = [Running(name) for name in NAMES]
    router = router_of("random", running)
    assert choice(router, running, CallRouting(to="two")) == [running[1]]
    assert choice(router, running, CallRouting(to="gone")) == running


def test_prefix_aware_goes_home_until_home_is_too_busy():
    running = [Running(name) for name in NAMES]
    router = router_of("prefix_aware", running)
    at_home = CallRouting("a", 2, home="three", held_tokens=500)
    assert choice(router, running, at_home) == [running[2]]
    for number in range(9):
        pending = Pending(at_home, str(number))
        router.on_request_routed(pending, running[2].replica_id, None)
    assert choice(router, running, at_home) != [running[2]]
    for number in range(9):
        router.on_request_completed(running[2].replica_id, str(number))
        router.on_request_completed(running[2].replica_id, str(number))  # told twice, counted once
    assert choice(router, running, at_home) == [running[2]]
