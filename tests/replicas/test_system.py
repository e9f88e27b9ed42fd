"""Turns over several engines, which threads of this process stand in for: a replica that ends costs time, and no reply."""

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe

import pytest

from pensieve.core.request import Fork, History, Length, Request, Sampling, tokens_of
from pensieve.errors import EngineFailed
from pensieve.plugins.cluster.routing import Turn, affinity
from pensieve.plugins.replicas import engine as engine_module
from pensieve.plugins.replicas import system as system_module
from pensieve.plugins.replicas.engine import Described, EngineReplica
from pensieve.plugins.replicas.system import ATTEMPTS, Replica, ReplicaSystem
from pensieve.serve.systems.base import WallClock
from tests.baselines.systems import HeldWorker, PricedSystem, parts
from tests.waiting import PATIENCE_S, Side, until

COUNT = 3
LATER_S = 1e6  # of a replica's clock, beside the caller's


class Positional(HeldWorker):
    """Each position and seed has a token of its own, as the noise of sampling has; `shift` makes others of them. held_at: the
    position whose token it does not compute before `gate` is opened."""

    held_at: int | None = None
    shift = 0

    def collect(self, until_ns):
        plan = self._plan
        if plan is not None and self.held_at in {row.sample.position for row in plan.rows if row.sample is not None}:
            self.gate.clear()
            self.held_at = None
        result = super().collect(until_ns)
        if plan is None or result is None:
            return result
        drawn = {row.slot: row.sample.position % 89 + self.shift for row in plan.rows if row.sample is not None}
        return replace(result, tokens=drawn)


class OpenedByCancel(PricedSystem):
    """Its worker computes again when a cancellation has come. served: the methods that were called."""

    _worker: Positional

    def __init__(self, **given):
        super().__init__(**given)
        self.served = []

    def cancel(self, request_id, status):
        self.served.append("cancel")
        super().cancel(request_id, status)
        self._worker.gate.set()

    def release(self, session, tenant="", left=None):
        self.served.append("release")
        super().release(session, tenant, left)


class LateClock(WallClock):
    def now_ns(self):
        return super().now_ns() + round(LATER_S * 1e9)


class StandIn(EngineReplica):
    """An engine of this process, and what EngineProcess has of one. left: events of requests that it tells until it dies;
    None: it lives. mute: what is no turn gets no answer."""

    lasts = None  # what `left` is at first

    def __init__(self, refuses=None):
        self.receives, answers = Pipe(duplex=False)
        commands, self.sends = Pipe(duplex=False)
        clock = LateClock()
        self.worker = Positional(clock)
        super().__init__(OpenedByCancel(worker=self.worker, clock=clock, **parts()), answers, LATER_S)
        self.system, self.left, self.refuses = self._system, self.lasts, refuses
        self.mute = False
        self.died = threading.Event()
        threading.Thread(target=self._run, args=(commands,), daemon=True).start()

    def _run(self, commands):
        with suppress(EOFError, OSError):
            self.fields, _ = commands.recv()
            if self.refuses is not None:
                self._answers.send(self.refuses)
                return
            report = self.system.start()
            self._answers.send(Described(report, self.system.settings(), self.system.chunk_tokens))
            self.serve(commands)

    def _tell(self, number, said):
        if number is None and self.left is not None:
            if not self.left:
                self.die()
            self.left -= 1
        if not self.died.is_set() and not (self.mute and number is not None):
            super()._tell(number, said)

    def die(self):
        if not self.died.is_set():
            self.died.set()
            self._answers.close()

    def first_word(self, timeout_s):
        try:
            return self.receives.recv()
        except EOFError:
            raise EngineFailed("ended before it was ready") from None

    def close(self):
        self.die()
        self.sends.close()
        self.worker.gate.set()


class Heard:
    """A listener that keeps all it is told."""

    streams = False

    def __init__(self):
        self.events, self.error = [], None
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
def replicas(router="affinity", refuses=None):
    """The system, and all stand-ins that were begun. refuses: why none of them starts."""
    begun = []

    def ours(*_, **__):
        begun.append(StandIn(refuses))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system_module.EngineProcess, "ours", ours)
        patch.setattr(engine_module.os, "_exit", lambda status: None)  # it would end this process
        patch.setattr(engine_module.logging, "shutdown", lambda: None)
        patch.setattr(system_module, "RETRY_S", 0.02)
        system = ReplicaSystem({}, COUNT, router)
        try:
            system.start()
            yield system, begun
        finally:
            system.close()
            for one in begun:
                one.close()
                one.system.close()


def home(system, session):
    """The stand-in that served its last turn."""
    return system._home[session].process


def ask(system, number, session, turn, prompt, tokens=6, **fields):
    heard = Heard()
    sampling = Sampling(temperature=1.0, seed=5)
    system.begin(Request(number, session, turn, tokens_of(prompt), Length(tokens), sampling, **fields), heard)
    return heard


def message(turn):
    return [(turn * 7 + place) % 90 for place in range(40)]


def talk(system, session, turns, first=1):
    """Each turn's prompt is all that was said and 40 tokens more."""
    said, records = [], []
    for turn in range(1, turns + 1):
        said += message(turn)
        history = History(len(said) - 41, "kept") if turn > 1 else None
        record = ask(system, first + turn, session, turn, said, history=history).turn
        assert record.status == "completed"
        said += record.token_ids
        records.append(record)
    return records


def test_every_turn_goes_where_the_consistent_hash_of_the_simulated_cluster_sends_it():
    with replicas() as (system, _):
        records = {name: talk(system, f"alice/{name}", 3, 10 * place) for place, name in enumerate("abcdef")}
        homes = {name: system._home[f"alice/{name}"].number for name in records}
        assert {one.in_flight for one in system.up} == {0}
    fleet = [Replica(number, None) for number in range(COUNT)]
    for name, turns in records.items():
        assert homes[name] == affinity(Turn(f"alice/{name}", 1), fleet, 0).number
        assert [turn.recomputed_tokens for turn in turns] == [0, 0, 0]
        assert all(turn.gpu_hit_tokens == turn.history_tokens for turn in turns) and turns[2].history_tokens == 91
    assert len(set(homes.values())) > 1, "not all of them hash to one"


def test_what_moves_is_history_that_is_computed_again_and_the_tokens_stay_the_same():
    with replicas("random") as (system, _):
        moving = talk(system, "a", 6)
        counted = system._counted["moved_turns"]
    with replicas() as (system, _):
        staying = talk(system, "a", 6)
        assert system._counted["moved_turns"] == 0
    assert counted >= 2, "or random routing showed nothing"
    for name in ("token_ids", "history_tokens"):
        assert [getattr(turn, name) for turn in moving] == [getattr(turn, name) for turn in staying]
    assert sum(turn.recomputed_tokens or 0 for turn in moving) > 0
    assert {miss.cause for turn in moving for miss in turn.misses} == {"new", "restarted"}
    for turn in moving:
        assert sum(miss.tokens for miss in turn.misses) == (turn.prompt_tokens or 0) - (turn.gpu_hit_tokens or 0)


def test_of_an_edited_prompt_what_it_shares_with_the_conversation_is_history():
    """A trial's turns bring their whole prompts; one that goes on from an earlier place shares that much, at any replica."""
    found = {}
    for router in ("affinity", "random"):
        with replicas(router) as (system, _):
            homes = set()
            for turn in range(1, 9):
                prompt = tokens_of([*message(1)[:25], *message(turn), *message(turn + 1)])
                system.submit(Request(turn, "a", turn, prompt, Length(6), Sampling(temperature=1.0, seed=5)))
                [record] = [event.turn for event in system.poll(None) if event.turn is not None]
                found[router, turn] = record.history_tokens
                homes.add(home(system, "a"))
        assert router == "affinity" or len(homes) > 1
    assert all(found["random", turn] == found["affinity", turn] for turn in range(1, 9)), found


@pytest.mark.parametrize("parts", [0, 1, 4, 6])
def test_a_replica_that_ends_in_mid_reply_costs_no_token_and_doubles_none(parts):
    """Before anything, with nothing told, in the middle, and before the end. Another takes its number."""
    with replicas() as (system, _):
        undisturbed = talk(system, "a", 3)
    with replicas() as (system, begun):
        first = talk(system, "a", 2)
        lost, number = home(system, "a"), system._home["a"].number
        lost.left = parts
        said = [token for turn in range(1, 3) for token in (*message(turn), *first[turn - 1].token_ids)]
        heard = ask(system, 100, "a", 3, [*said, *message(3)], history=History(len(said) - 1, "kept"))
        turn = heard.turn
        assert lost.died.is_set() and home(system, "a") is not lost
        assert system._counted["restarted_requests"] == 1
        assert until(lambda: [one.number for one in system.up] == [0, 1, 2]) and len(begun) == COUNT + 1
        talk(system, "a", 1, 200)
        assert system._home["a"].number == number, "it hashes to the number still"
    assert heard.tokens == list(undisturbed[2].token_ids) == list(turn.token_ids)
    assert turn.request_id == 100 and {event.request_id for event in heard.events} == {100}
    assert turn.history_tokens == undisturbed[2].history_tokens == turn.recomputed_tokens, "its history is not there"
    assert undisturbed[2].recomputed_tokens == 0


def test_a_request_that_ends_every_replica_fails_in_the_end(monkeypatch):
    with replicas() as (system, begun):
        [first] = talk(system, "a", 1)
        monkeypatch.setattr(StandIn, "lasts", 3)  # of those that replace them too
        for one in begun:
            one.left = 3
        turn = ask(system, 100, "a", 2, [*message(1), *first.token_ids, *message(2)]).turn
        assert turn.status == "failed" and f"{ATTEMPTS} replicas" in str(turn.error)
        assert not turn.stands and system._counted["restarted_requests"] == ATTEMPTS > 2
        assert system._counted["moved_turns"] == 0, "it does not stand"


def test_turns_wait_while_no_replica_is_up_and_a_start_that_fails_is_tried_again():
    with replicas() as (system, begun), pytest.MonkeyPatch.context() as patch:
        make, lost = system_module.EngineProcess.ours, list(begun)

        def refusing(*given, **more):
            made = make(*given, **more)
            made.refuses = EngineFailed("no room") if len(begun) <= 2 * COUNT else None
            return made

        patch.setattr(system_module.EngineProcess, "ours", refusing)
        for one in lost:
            one.die()
        assert until(lambda: system.up == [])
        assert ask(system, 1, "a", 1, message(1)).turn.status == "completed"
        assert until(lambda: len(system.up) == COUNT) and len(begun) == 3 * COUNT


def test_why_no_replica_starts_is_told_in_the_words_of_our_own_error():
    refusal = EngineFailed("Triton is not here: install it.")
    with pytest.raises(EngineFailed, match=r"cannot start: Triton is not here"), replicas(refuses=refusal):
        pass


def test_a_reply_that_comes_out_otherwise_is_not_gone_on_with():
    with replicas() as (system, begun):
        for number, one in enumerate(begun):
            one.left, one.worker.shift = 3, number
        heard = ask(system, 1, "a", 1, message(1))
        assert heard.turn.status == "failed" and len(heard.tokens) == 3
        assert list(heard.turn.token_ids) == heard.tokens and system._counted["restarted_requests"] == 1


def test_who_cancels_is_heard_by_the_replica_that_serves_and_no_other():
    with replicas() as (system, begun):
        for one in begun:
            one.worker.held_at = 60
        heard = ask(system, 1, "a", 1, message(1), tokens=200)
        assert heard.begun.wait(PATIENCE_S)
        system.cancel(1, "cancelled")
        turn = heard.turn
        assert turn.status == "cancelled" and 0 < turn.output_tokens < 200 and turn.stands
        assert list(turn.token_ids[: len(heard.tokens)]) == heard.tokens
        assert [one for one in begun if "cancel" in one.system.served] == [home(system, "a")]


def test_times_are_those_of_the_callers_clock_and_a_cold_cache_is_cold_everywhere():
    with replicas() as (system, _):
        before = system.clock.now_s()
        heard = ask(system, 1, "a", 1, message(1), intended_s=before)
        turn = heard.turn
        assert all(before <= event.at_s <= system.clock.now_s() for event in heard.events)
        # The stand-in's clock is set elsewhere: what it tells says so, and comes back as it was sent.
        assert turn.intended_s == pytest.approx(before, abs=1e-3)
        assert turn.ttft_ms == pytest.approx((turn.first_token_s - turn.intended_s) * 1e3, abs=1e-2)
        system.forget(None)
        turn = ask(system, 9, "a", 1, message(1)).turn
        assert (turn.history_tokens, turn.gpu_hit_tokens) == (0, 0)


def test_a_fork_is_served_where_the_conversation_is_that_it_comes_from():
    with replicas() as (system, _):
        homes = []
        for place in range(6):
            name = f"talk {place}"
            for number, (said, turn, more) in enumerate(
                ((name, 1, {}), (f"{name} fork", 1, {"fork": Fork(name, 30)}), (f"{name} fork", 2, {})), 10 * place
            ):
                assert ask(system, number, said, turn, message(turn), **more).turn.status == "completed"
            homes.append((home(system, name), home(system, f"{name} fork")))
        assert all(parent is child for parent, child in homes) and len(set(homes)) > 1
        system.release("talk 0 fork")
        assert "talk 0 fork" not in system._home and "talk 0 fork" not in system._family
        assert until(lambda: "release" in homes[0][0].system.served)


def counted(system):
    """But for what an engine's thread may still add to after a turn's end."""
    return {name: value for name, value in system.counters().items() if name != "schedule_ms"}


def test_counts_neither_dip_nor_double_whatever_a_replica_does_and_gauges_are_of_those_that_run():
    with replicas() as (system, _):
        talk(system, "a", 3)
        before, lost = counted(system), home(system, "a")
        assert before["steps"] > 0 and before["batched_tokens"] > 120
        assert system.places("a").count("G") and not system.places("nobody")
        assert system.gauges()["replicas"] == (3, "replicas")
        assert counted(system) == before, "counted once, however often somebody asks"
        lost.die()
        assert until(lambda: system.places("a") == "")
        assert counted(system) == before, "one that has ended"
        assert until(lambda: len(system.up) == COUNT)


def test_a_replica_that_does_not_answer_is_left_out_and_one_that_ends_meanwhile_holds_up_nobody(monkeypatch):
    with replicas() as (system, begun):
        talk(system, "a", 2)
        for one in begun:
            one.mute = one is not home(system, "a")
        monkeypatch.setattr(system_module, "CALL_S", 2 * PATIENCE_S)
        looking = Side(system.gauges)
        assert not looking.ends_within(0.05)
        for one in begun:
            if one.mute:
                one.die()
        assert looking.ended() and looking.result["replicas"] == (1, "replicas")
        assert until(lambda: len(system.up) == COUNT)
        monkeypatch.setattr(system_module, "CALL_S", 0.5)
        begun[-1].mute = True
        assert system.gauges()["replicas"] == (COUNT - 1, "replicas") and system.places("a").count("G")
        again = Side(system.gauges)
        assert again.ends_within(0.4) and again.result == system.gauges(), "one that hangs is waited for once"


def test_requests_under_way_are_told_when_the_system_is_closed():
    with replicas() as (system, begun):
        for one in begun:
            one.worker.held_at = 60
        heard = ask(system, 1, "a", 1, message(1), tokens=200)
        assert heard.begun.wait(PATIENCE_S)
        ticket = system._tickets[1]
        ticket.attempts = ATTEMPTS
        system._send(ticket)
        assert not heard.over.is_set(), "two threads sent it, and the last replica serves it"
        system.close()
        assert heard.over.wait(PATIENCE_S) and "closed" in str(heard.error)
        late = ask(system, 2, "a", 1, message(1))
        assert late.over.wait(PATIENCE_S) and late.error is not None


def test_an_engine_that_crashed_ends_its_process():
    ended = []
    with replicas() as (_, [one, *_others]), pytest.MonkeyPatch.context() as patch:  # undone before that of replicas()
        patch.setattr(engine_module.os, "_exit", ended.append)
        one.failed(engine_module.WorkerError("The engine stopped."))
    assert ended == [engine_module.CRASHED]
