"""The System around an outside engine: what it knows of a turn, and that every call comes back."""

import threading
import time
from array import array
from collections.abc import Callable

import pytest

from pensieve.core.plan import StartReport
from pensieve.core.request import Forced, Free, History, Request, Sampling
from pensieve.errors import ContextLengthError, EngineFailed, RequestFailed, WorkerError
from pensieve.plugins.engines.base import Channel, OutsideEngine, OutsideSystem, Reply
from pensieve.serve.record import TurnRecord
from tests.engines.small import ask, begun, prompt, served

How = Callable[[Request, Channel], Reply]


class FakeEngine(OutsideEngine):
    """Answers as `how` says; counts what was closed. fails: its start."""

    def __init__(self, how: How, fails: bool = False) -> None:
        self._how, self._fails = how, fails
        self.closed = 0

    def start(self) -> StartReport:
        if self._fails:
            raise EngineFailed("no")
        return StartReport(1.0, 2.0, {"gpu_tokens": 64})

    def answer(self, request: Request, channel: Channel) -> Reply:
        return self._how(request, channel)

    def close(self) -> None:
        self.closed += 1


def tokens(cached: int | None = None, **fields: object) -> How:
    def how(request: Request, channel: Channel) -> Reply:
        channel.tell(*range(1, request.output.max_new_tokens + 1))
        return Reply("length", cached_tokens=cached, **fields)  # type: ignore[arg-type]

    return how


def counts(turn: TurnRecord) -> tuple[int | None, ...]:
    found = (turn.gpu_hit_tokens, turn.cpu_hit_tokens, turn.recomputed_tokens, turn.shared_hit_tokens)
    return (turn.prompt_tokens, turn.history_tokens, turn.new_tokens, *found)


def test_cached_tokens_are_history_first_and_shared_beyond_it() -> None:
    """What the engine does not report is unknown and not zero; what a workload warmed is history whatever was said."""
    cached = {1: 0, 2: 30, 3: 12, 4: None, 5: 10}
    system = begun(FakeEngine(lambda request, channel: tokens(cached[request.id])(request, channel)))
    first, second, third = prompt(20), prompt(20) + array("i", range(1, 7)) + prompt(14, start=9), prompt(40)
    [one] = served(system, ask(1, "a", first))
    [two] = served(system, ask(2, "a", second, turn=2))
    # 20 + 6 were said, and the last of them has no KV: 25 could have been found, and five more were somebody else's.
    assert (counts(one), counts(two)) == ((20, 0, 20, 0, None, 0, 0), (40, 25, 15, 25, None, 0, 5))
    [three] = served(system, ask(3, "b", third))
    assert counts(three) == (40, 0, 40, 0, None, 0, 12)
    [four] = served(system, ask(4, "c", prompt(20)))
    unknown = (four.admitted_s, four.queue_ms, four.compute_ms, four.h2d_bytes, four.d2h_bytes, four.sent_bytes)
    assert counts(four) == (20, 0, 20, None, None, None, None) and set(unknown) == {None}
    [five] = served(system, ask(5, "d", prompt(20), history=History(8)))
    assert counts(five) == (20, 8, 12, 8, None, 0, 2) and five.status == "completed"
    hosted = begun(FakeEngine(tokens(30, cached_on_host=28)))
    [six] = served(hosted, ask(6, "a", prompt(40), history=History(25)))
    assert counts(six) == (40, 25, 15, 0, 25, 0, 5), "what it found behind the device, and no more than all of it"


def test_times_are_those_of_the_engine_by_our_clock_and_a_whole_answer_has_few() -> None:
    def how(request: Request, channel: Channel) -> Reply:
        many, now = request.output.max_new_tokens, time.perf_counter()
        if request.session != "timed":
            return Reply("length", tokens=array("i", range(many)))
        return Reply("length", tokens=array("i", range(many)), emitted_s=array("d", [now, now + 1.0]), admitted_s=now)

    system = begun(FakeEngine(how))
    one, many, timed = served(system, *(ask(n, s, prompt(8), n) for n, s in ((1, "a"), (5, "b"), (2, "timed"))))
    assert one.ttft_ms == one.latency_ms
    assert many.ttft_ms is None and len(many.emitted_s) == 0, "when its tokens came nobody saw"
    assert many.latency_ms is not None and many.output_tokens == 5
    assert timed.admitted_s == timed.emitted_s[0] == timed.first_token_s
    assert timed.first_token_s == pytest.approx(system.clock.now_s(), abs=5.0)
    assert timed.finished_s == pytest.approx(timed.first_token_s + 1.0)


def test_a_request_that_fails_or_is_refused_ends_alone() -> None:
    errors = {"long": ContextLengthError("too long"), "broken": RequestFailed("broke")}

    def how(request: Request, channel: Channel) -> Reply:
        if request.session in errors:
            raise errors[request.session]
        channel.tell(*range(1 if request.session == "short" else request.output.max_new_tokens))
        return Reply("length", cached_tokens=0)

    system = begun(FakeEngine(how))
    turns = served(system, *(ask(n, name, prompt(4)) for n, name in enumerate([*errors, "short", "good"])))
    found = [(turn.status, turn.finish_reason) for turn in turns]
    assert found == [("refused", "context"), ("failed", None), ("failed", "context"), ("completed", "length")]
    assert turns[0].error == "too long" and "after 1 of 6 tokens" in str(turns[2].error)
    forced, noisy = ask(10, "a", prompt(4)), ask(11, "b", prompt(4), sampling=Sampling(temperature=1.0))
    forced.output = Forced(array("i", [1]))
    stopped = Request(12, "c", 1, prompt(4), Free(4, stop=("x",)))
    assert {turn.status for turn in served(system, forced, noisy, stopped)} == {"refused"}


def test_an_engine_that_dies_or_is_closed_surfaces_in_poll_and_one_that_fails_to_start_is_closed() -> None:
    def dies(request: Request, channel: Channel) -> Reply:
        raise EngineFailed("llama.cpp ended with status 9; the last lines of its log:\nboom")

    engine = FakeEngine(dies)
    system = begun(engine)
    system.submit(ask(1, "a", prompt(4)))
    with pytest.raises(WorkerError, match="boom"):
        system.poll(None)
    system.close()
    assert engine.closed == 1
    waits = threading.Event()
    system = begun(FakeEngine(lambda request, channel: Reply(str(waits.wait(10)))))
    system.submit(ask(1, "a", prompt(4)))
    threading.Timer(0.1, waits.set).start()
    system.close()  # comes back while a request waits
    broken = FakeEngine(dies, fails=True)
    with pytest.raises(EngineFailed):
        OutsideSystem(broken).start()
    assert broken.closed == 1


def test_a_cancelled_request_keeps_what_it_had() -> None:
    told, go = threading.Event(), threading.Event()

    def how(request: Request, channel: Channel) -> Reply:
        channel.tell(7)
        told.set()
        assert go.wait(10)
        assert not channel.tell(8), "nobody wants more"
        return Reply("length")

    system = begun(FakeEngine(how))
    system.submit(ask(1, "a", prompt(4), output=5))
    assert told.wait(10)
    system.cancel(1, "timeout")
    go.set()
    turns: list[TurnRecord] = []
    while not turns:
        turns = [event.turn for event in system.poll(None) if event.turn]
    assert [(turn.status, turn.error, list(turn.token_ids)) for turn in turns] == [("timeout", None, [7])]
