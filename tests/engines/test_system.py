"""The System around an outside engine: what it knows of a turn, and that every call comes back."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable

import pytest

from pensieve.core.plan import StartReport
from pensieve.core.request import Forced, History, Request, Sampling
from pensieve.errors import ContextLengthError, EngineFailed, RequestFailed, WorkerError
from pensieve.lab.compose.build import build_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.replay import replay
from pensieve.plugins.engines.base import Channel, OutsideEngine, Reply
from pensieve.plugins.engines.system import OutsideSystem
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities
from tests.composed import SHORT, checked
from tests.engines.small import ask, begun, prompt, served
from tests.scripted import ScriptedSystem


class FakeEngine(OutsideEngine):
    """Answers as `how` says; counts what was started and closed."""

    def __init__(self, how: Callable[[Request, Channel], Reply], at_once: int = 4) -> None:
        self.can = Capabilities()
        self.at_once, self._how = at_once, how
        self.closed = 0

    def start(self) -> StartReport:
        return StartReport(1.0, 2.0, {"gpu_tokens": 64})

    def answer(self, request: Request, channel: Channel) -> Reply:
        return self._how(request, channel)

    def close(self) -> None:
        self.closed += 1


def tokens(cached: int | None = None, **fields: object) -> Callable[[Request, Channel], Reply]:
    def how(request: Request, channel: Channel) -> Reply:
        for token in range(request.output.max_new_tokens):
            channel.tell(token + 1)
        return Reply("length", cached_tokens=cached, **fields)  # type: ignore[arg-type]

    return how


def started(how: Callable[[Request, Channel], Reply], at_once: int = 4) -> tuple[OutsideSystem, FakeEngine]:
    engine = FakeEngine(how, at_once)
    return begun(engine), engine


def counts(turn: TurnRecord) -> tuple[int | None, ...]:
    found = (turn.gpu_hit_tokens, turn.cpu_hit_tokens, turn.recomputed_tokens, turn.shared_hit_tokens)
    return (turn.prompt_tokens, turn.history_tokens, turn.new_tokens, *found)


def test_cached_tokens_are_history_first_and_shared_beyond_it() -> None:
    cached = {1: 0, 2: 30, 3: 12}
    system, _ = started(lambda request, channel: tokens(cached[request.id])(request, channel))
    first, second, third = prompt(20), prompt(20) + array("i", range(1, 7)) + prompt(14, start=9), prompt(40)
    [one] = served(system, ask(1, "a", first))
    [two] = served(system, ask(2, "a", second, turn=2))
    [three] = served(system, ask(3, "b", third))
    assert counts(one) == (20, 0, 20, 0, None, 0, 0)
    # 20 + 6 were said, and the last of them has no KV: 25 could have been found, and five more were somebody else's.
    assert counts(two) == (40, 25, 15, 25, None, 0, 5)
    assert counts(three) == (40, 0, 40, 0, None, 0, 12)
    assert [turn.status for turn in (one, two, three)] == ["completed"] * 3


def test_what_the_engine_does_not_report_is_unknown_and_not_zero() -> None:
    system, _ = started(tokens(None))
    [turn] = served(system, ask(1, "a", prompt(20)))
    assert counts(turn) == (20, 0, 20, None, None, None, None)
    unknown = (turn.admitted_s, turn.queue_ms, turn.compute_ms, turn.h2d_bytes, turn.d2h_bytes, turn.sent_bytes)
    assert set(unknown) == {None}


def test_what_the_workload_warmed_is_history_whatever_was_said() -> None:
    system, _ = started(tokens(10))
    [turn] = served(system, ask(1, "a", prompt(20), history=History(8)))
    assert counts(turn) == (20, 8, 12, 8, None, 0, 2)


def test_a_whole_answer_has_a_first_token_only_if_it_is_one_token() -> None:
    def how(request: Request, channel: Channel) -> Reply:
        return Reply("length", tokens=array("i", range(request.output.max_new_tokens)))

    system, _ = started(how)
    one, many = served(system, ask(1, "a", prompt(8), output=1), ask(2, "b", prompt(8), output=5))
    assert one.ttft_ms == one.latency_ms
    assert many.ttft_ms is None and len(many.emitted_s) == 0, "when its tokens came nobody saw"
    assert many.latency_ms is not None and many.output_tokens == 5


def test_the_times_of_another_process_are_read_by_our_clock() -> None:
    def how(request: Request, channel: Channel) -> Reply:
        now = time.perf_counter()
        return Reply("length", tokens=array("i", [1, 2]), emitted_s=array("d", [now, now + 1.0]), admitted_s=now)

    system, _ = started(how)
    [turn] = served(system, ask(1, "a", prompt(4), output=2))
    assert turn.admitted_s == turn.emitted_s[0] == turn.first_token_s
    assert turn.first_token_s == pytest.approx(system.clock.now_s(), abs=5.0)
    assert turn.finished_s == pytest.approx(turn.first_token_s + 1.0)


def test_an_output_that_ends_early_has_failed() -> None:
    def how(request: Request, channel: Channel) -> Reply:
        channel.tell(1)
        return Reply("length")

    system, _ = started(how)
    [turn] = served(system, ask(1, "a", prompt(4), output=5))
    assert (turn.status, turn.finish_reason) == ("failed", "context")
    assert "after 1 of 5 tokens" in str(turn.error)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [(ContextLengthError("too long"), "refused", "context"), (RequestFailed("broke"), "failed", None)],
)
def test_a_request_that_fails_ends_alone(error: Exception, status: str, reason: str | None) -> None:
    def how(request: Request, channel: Channel) -> Reply:
        if request.session == "bad":
            raise error
        return tokens(0)(request, channel)

    system, _ = started(how)
    bad, good = served(system, ask(1, "bad", prompt(4)), ask(2, "good", prompt(4)))
    assert (bad.status, bad.finish_reason, bad.error) == (status, reason, str(error))
    assert good.status == "completed"


def test_forced_tokens_and_noise_are_refused_in_a_sentence() -> None:
    system, _ = started(tokens(0))
    forced = Request(1, "a", 1, prompt(4), Forced(array("i", [1])))
    noisy = ask(2, "b", prompt(4), sampling=Sampling(temperature=1.0))
    turns = served(system, forced, noisy)
    assert [turn.status for turn in turns] == ["refused", "refused"]
    assert all(str(turn.error).endswith(".") for turn in turns)


def test_an_engine_that_dies_surfaces_in_poll() -> None:
    def how(request: Request, channel: Channel) -> Reply:
        raise EngineFailed("llama.cpp ended with status 9; the last lines of its log:\nboom")

    system, engine = started(how)
    system.submit(ask(1, "a", prompt(4)))
    with pytest.raises(WorkerError, match="boom"):
        system.poll(None)
    system.close()
    assert engine.closed == 1


def test_a_cancelled_request_keeps_what_it_had() -> None:
    told, go = threading.Event(), threading.Event()

    def how(request: Request, channel: Channel) -> Reply:
        channel.tell(7)
        told.set()
        assert go.wait(10)
        assert not channel.tell(8), "nobody wants more"
        return Reply("length")

    system, _ = started(how)
    system.submit(ask(1, "a", prompt(4), output=5))
    assert told.wait(10)
    system.cancel(1, "timeout")
    go.set()
    turns: list[TurnRecord] = []
    while not turns:
        turns = [event.turn for event in system.poll(None) if event.turn]
    assert [(turn.status, list(turn.token_ids)) for turn in turns] == [("timeout", [7])]


def test_a_replay_sends_whole_prompts_and_counts_history_as_our_engine_does() -> None:
    """The scripted system keeps sessions; the same workload on an engine without any has the same history and prompts."""
    config = checked(*SHORT, "workload.think_time_s=0", "workload.request_interval=0")
    plan = plan_trial(config)
    tokenizer = build_tokenizer(config.model, plan.model.vocab, simulated=True)
    record = {}
    engine, _ = started(tokens(None), at_once=16)
    for name, system in (("ours", ScriptedSystem()), ("theirs", engine)):
        workload, _ = build_workload(plan, tokenizer)
        record[name] = {(turn.session, turn.turn): turn.prompt_tokens for turn in replay(system, workload).turns}
    assert record["ours"] == record["theirs"]
    engine.close()
