import dataclasses
from array import array
from collections import Counter
from unittest.mock import Mock

import pytest

from pensieve.core.request import Length, Request
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.base import Arrival, WorkloadPlan
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.serve.systems.base import Capabilities
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from tests.baselines.systems import inline
from tests.scripted import Latency, ScriptedSystem, context
from tests.simulated import MACHINE


class Listed:
    """A workload that is a list of arrivals."""

    def __init__(self, *arrivals, load="open"):
        self.arrivals, self.load, self.finished = arrivals, load, []

    def describe(self):
        sessions = len({arrival.request.session for arrival in self.arrivals})
        return WorkloadPlan(self.load, sessions, len(self.arrivals), 0, 0)

    def start(self):
        return self.arrivals

    def on_finished(self, turn):
        self.finished.append((turn.session, turn.turn, turn.status, turn.finished_s))
        return []


def arrival(at_s, number, session="a", turn=1, tokens=3, deadline_s=None, phase="chat"):
    request = Request(number, session, turn, array("i", [7] * 4), Length(tokens), phase=phase)
    return Arrival(at_s, request, deadline_s)


def chat(seed=0, **fields):
    return ChatWorkload(context(seed), **{"max_turns": 4, "min_turns": 4, **fields})


def test_a_system_that_loses_a_request_is_found_out():
    class Lossy(ScriptedSystem):
        def submit(self, request):
            self.submitted.append(request)

    with pytest.raises(AssertionError, match="poll gave nothing"):
        replay(Lossy(), Listed(arrival(0.5, 1)))


def test_times_are_measured_from_the_intended_arrival_and_the_start_of_the_replay():
    for started_at_s in (0.0, 1234.5):
        record = replay(ScriptedSystem(started_at_s=started_at_s), Listed(arrival(2.0, 1, tokens=5)))
        [turn] = record.turns
        assert record.origin_s == started_at_s
        assert (turn.intended_s, turn.sent_s, turn.first_token_s, turn.finished_s) == pytest.approx((2, 2, 2.05, 2.07))
        assert (turn.queue_ms, turn.ttft_ms, turn.latency_ms) == pytest.approx((10.0, 50.0, 70.0))
        assert list(turn.emitted_s) == pytest.approx([2.050, 2.055, 2.060, 2.065, 2.070])
        assert list(record.measurement.send_lag_s) == pytest.approx([0.0])


def test_a_late_submission_still_counts_from_the_intended_arrival():
    class Busy(ScriptedSystem):
        """Its first step takes 300 ms, whatever arrives meanwhile."""

        def poll(self, until_s):
            if self.clock.now_ns() == 0:
                self.clock.advance_to(300_000_000)
                return []
            return super().poll(until_s)

    record = replay(Busy(), Listed(arrival(0.0, 1, "a"), arrival(0.1, 2, "b")))
    late = next(turn for turn in record.turns if turn.session == "b")
    assert late.ttft_ms == pytest.approx(250.0)
    assert list(record.measurement.send_lag_s) == pytest.approx([0.0, 0.2])


def test_a_deadline_cancels_what_is_still_running_and_spares_what_is_not():
    slow = {2: Latency(first=5000)}
    system = ScriptedSystem(lambda request: slow.get(request.id, Latency()))
    workload = Listed(arrival(0.0, 1, "a", deadline_s=1.0), arrival(0.0, 2, "b", deadline_s=1.0), arrival(3.0, 3, "c"))
    record = replay(system, workload)
    assert next(turn.finished_s for turn in record.turns if turn.session == "b") == pytest.approx(1.0)
    assert record.flags["failures"] == "Of 3 turns 1 timeout."
    assert [row[2] for row in workload.finished] == ["completed", "timeout", "completed"]


def test_a_full_system_is_sent_no_more_than_it_takes_and_waiting_counts():
    """Nor is a late turn of a system that cannot cancel anything but a timeout, sent or not."""
    can = Capabilities(max_in_flight=2, cancels=False)
    system = ScriptedSystem(lambda request: Latency(queue=0, first=100, gap=0), can)
    late = [arrival(0.0, number, f"s{number}", deadline_s=0.15 if number > 2 else None) for number in range(7)]
    record = replay(system, Listed(*late))
    assert system.most_in_flight == 2
    assert [request.id for request in system.submitted] == [0, 1, 2, 3]
    assert sorted(turn.ttft_ms for turn in record.turns if turn.sent_s is not None) == pytest.approx(
        [100, 100, 200, 200]
    )
    status = {turn.session: (turn.status, turn.latency_ms) for turn in record.turns}
    assert {status[name][0] for name in ("s0", "s1", "s2")} == {"completed"}
    assert status["s3"] == ("timeout", pytest.approx(200.0))
    assert status["s4"] == status["s5"] == status["s6"] == ("timeout", pytest.approx(150.0)), "never sent"


def test_the_whole_replay_can_be_cut_off():
    system = ScriptedSystem(lambda request: Latency(first=400))
    record = replay(system, Listed(arrival(0.0, 1, "a"), arrival(0.7, 2, "b"), arrival(9.0, 3, "c")), deadline_s=1.0)
    assert {turn.session: turn.status for turn in record.turns} == {"a": "completed", "b": "timeout"}
    assert "1.0 s" in record.flags["cut_off"]
    assert record.flags["unsent"] == "1 of 3 planned turns were never sent."


@pytest.mark.parametrize("cut_at_s", [0.02, 0.5])
def test_after_a_timeout_the_next_prompt_begins_with_what_the_engine_holds(cut_at_s):
    """In prefill nothing was generated and the turn is undone, its message too; later what was generated stays."""
    cut = arrival(1.0, 2, turn=2, tokens=40, deadline_s=1.0 + cut_at_s)
    slow = dataclasses.replace(MACHINE, step_overhead_s=0.03)  # an iteration takes 30 ms and computes two positions
    system = inline(
        lambda model, _, *rest: SimulatedWorker(model, slow, *rest),
        hardware=slow, cpu_blocks=0, scheduler=SchedulerSettings(max_batch_tokens=2),
    )  # fmt: skip
    system.start()
    system.submit = Mock(wraps=system.submit)
    turns = replay(system, Listed(arrival(0.0, 1, turn=1), cut, arrival(9.0, 3, turn=3))).turns
    status = [(turn.status, turn.output_tokens > 0) for turn in turns]
    assert status == [("completed", True), ("timeout", cut_at_s > 0.1), ("completed", True)]
    prompt = system.submit.mock_calls[2].args[0].prompt
    assert system.engine.cache.sessions.get("a").tokens[: len(prompt)] == prompt
    assert turns[2].history_tokens == len(prompt) - 5, "all but the last token said, and the message"


def test_a_turn_that_comes_before_the_last_one_ended_waits_for_what_it_said():
    """The prompt is then whole, and the time counts as queueing."""
    arrivals = [arrival(0.0, 1, tokens=5), arrival(0.01, 2, turn=2, tokens=2), arrival(0.02, 3, "b")]
    system = ScriptedSystem()
    record = replay(system, Listed(*arrivals))
    assert [request.id for request in system.submitted] == [1, 3, 2], "nobody else waits for it"
    assert list(system.submitted[2].prompt) == [*[7] * 4, 1, 2, 3, 4, 5, *[7] * 4]
    assert next(turn for turn in record.turns if turn.turn == 2).ttft_ms == pytest.approx(60 + 50)
    assert max(record.measurement.send_lag_s) == pytest.approx(0.0), "it was not sent late"


def test_offline_policies_learn_the_next_arrival_once_it_is_scheduled():
    system = ScriptedSystem(started_at_s=5.0)
    replay(system, Listed(arrival(0.0, 1, "a"), arrival(4.0, 2, "a", turn=2), arrival(6.0, 3, "b")))
    assert [request.next_use_s for request in system.submitted] == [9.0, None, None]
    assert system.expected == [("a", 9.0)]
    closed = ScriptedSystem()
    record = replay(closed, chat())
    intended = {(turn.session, turn.turn): turn.intended_s for turn in record.turns}
    due = Counter(session for session, _ in closed.expected)
    assert due == Counter(session for session, number in intended if number > 1)
    assert {at for _, at in closed.expected} == {at for (_, number), at in intended.items() if number > 1}


def test_rows_stream_out_in_batches_also_when_interrupted():
    """Every request finishes exactly once, and none is left."""
    batches, system = [], ScriptedSystem()
    record = replay(system, chat(), on_batch=lambda rows: batches.append(list(rows)), batch_size=10)
    sent = [request.id for request in system.submitted]
    assert len(set(sent)) == len(sent) == record.plan.turns
    assert sorted(turn.request_id for turn in record.turns) == sorted(sent)
    assert sorted(turn.ordinal for turn in record.turns) == list(range(len(record.turns)))
    assert [turn for batch in batches for turn in batch] == list(record.turns)
    assert {len(batch) for batch in batches[:-1]} == {10}

    done, kept = [], []

    def interrupt(turns, _):
        done.append(turns)
        if turns >= 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(ScriptedSystem(), chat(), progress=interrupt, on_batch=kept.extend)
    assert len(kept) == done[-1]
    assert kept == list(record.turns)[: len(kept)]


@pytest.mark.parametrize(
    ("turns", "counted"),
    [
        # What prepares others between two measured turns counts nothing
        ([(float(n), "a", phase) for n, phase in enumerate(("warmup", "hit", "rewarm", "chat") * 2)], 4),
        # What is warmed beside a measured turn counts with it
        ([(0.0, "s1", "warmup"), (1.0, "s2", "long"), (2.0, "s3", "warmup"), (6.0, "s4", "warmup")], 2),
    ],
)
def test_counters_are_of_the_stretches_in_which_something_is_measured(turns, counted):
    system = ScriptedSystem(lambda request: Latency(first=3000 if request.phase == "long" else 10))
    listed = [arrival(at, n, session, turn=n, phase=phase) for n, (at, session, phase) in enumerate(turns, start=1)]
    assert replay(system, Listed(*listed)).measurement.counters["evicted_chunks"] == counted


class SlowToSend(ScriptedSystem):
    """Each submission takes 4 ms of a clock that calls itself a wall's."""

    class Clock(VirtualClock):
        virtual = False

    def __init__(self, first_ms):
        super().__init__(lambda request: Latency(queue=0, first=first_ms, gap=1))
        self.clock = self.Clock()

    def submit(self, request):
        self.clock.advance_to(self.clock.now_ns() + 4 * 10**6)
        super().submit(request)


@pytest.mark.parametrize(("first_ms", "late"), [(40, True), (760, True), (1000, False)])
def test_sending_late_is_flagged_beyond_5_ms_and_a_hundredth_of_the_median(first_ms, late):
    record = replay(SlowToSend(first_ms), Listed(*(arrival(1.0, n, f"s{n}") for n in range(1, 4))))
    assert list(record.measurement.send_lag_s) == pytest.approx([0.0, 0.004, 0.008])
    assert ("late_sends" in record.flags) is late
    if late:
        assert "8.0 ms or more after it was due" in record.flags["late_sends"]
    found = {metric.name: metric.value for metric in summarise(record.measurement)}
    assert found["send_lag_ms_p99"] == pytest.approx(8.0)


def test_a_conversation_with_a_request_that_waits_or_runs_has_not_ended():
    """Two requests of one conversation, of which the second waits for the first in a system that takes one at a time."""

    class Ends(Listed):
        def is_over(self, turn):
            return True

    system, told = ScriptedSystem(can=Capabilities(max_in_flight=1)), []
    system.ended = lambda session: told.append((session, len(system.submitted)))  # type: ignore[attr-defined]
    replay(system, Ends(arrival(0.0, 1), arrival(0.0, 2, turn=2), arrival(0.0, 3, session="b")))
    assert told == [("a", 2), ("b", 3)]
