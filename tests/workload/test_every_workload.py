"""What holds of every workload: what it says of itself is what it sends, under the seed alone."""

from array import array
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.settings import factory
from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.trial.inspection import inspect
from pensieve.lab.workload.base import part_of
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.lab.workload.exact import PrefixInvalidationWorkload, RoundsWorkload, prose
from pensieve.lab.workload.fit import filler
from pensieve.serve.record import is_measured
from tests.scripted import Latency, ScriptedSystem, context
from tests.workload.dry import MAKERS, drive, measured

ALL = pytest.mark.parametrize("name", MAKERS)


ASKED = {
    "chat": "7e0d4e4135a6c43c",
    "chat users": "35b042b10ed0cca6",
    "chat auto": "d98f92af13470565",
    "hotness": "af662333e15c26a2",
    "sharegpt": "ec52bc944a2eb100",
    "sharegpt systems": "9cc07987dc789f3e",
    "sharegpt users": "b7497550e5de1ed6",
    "rounds system": "4282107cb27363bf",
    "rounds": "46126b72d03557e9",
    "rounds pressed": "41977f80f1cf8778",
    "agents": "4b7e1ef150502a25",
    "prefix": "ec5fc6eb9e406806",
    "decode": "d163609eeb76111e",
}
"""Of each with the seed 0, a digest of all that it asks, when, and with which fields."""


@ALL
def test_the_seed_decides_what_is_asked_and_it_is_what_it_was(name):
    def asked(seed):
        told = [
            (
                round(a.at_s, 6), a.deadline_s and round(a.deadline_s, 6), a.continues, a.request.id, a.request.session,
                a.request.turn, a.request.phase, a.request.label, a.request.iteration, a.request.stream, a.request.hint,
                a.due().history, a.due().prompt.tolist(), type(a.request.output).__name__, a.request.output.max_new_tokens,
            )
            for a in drive(MAKERS[name](context(seed)))
        ]  # fmt: skip
        return sha256(repr(told).encode()).hexdigest()[:16]

    assert asked(0) == ASKED[name] != asked(1)


@ALL
def test_what_is_planned_is_sent_once_and_in_order(name):
    plan, arrivals = MAKERS[name](context()).describe(), drive(MAKERS[name](context()))
    assert len(arrivals) == len({a.request.id for a in arrivals}) == plan.turns
    assert plan.warmup_turns == plan.turns - len(measured(arrivals))
    turns = {}
    for arrival in arrivals:
        turns.setdefault(arrival.request.session, []).append(arrival.request.turn)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in turns.values())
    assert len({a.request.session for a in measured(arrivals)}) == plan.sessions
    assert all(a.deadline_s == pytest.approx(a.at_s + 7.0) for a in arrivals), "it counts from the intended arrival"
    if name not in ("prefix", "decode"):  # those keep one conversation at a time
        held = sum(len(a.due().prompt) + a.request.output.max_new_tokens for a in measured(arrivals))
        assert plan.working_set_tokens == held - plan.sessions, "the last token of each has no KV"
    found = inspect(MAKERS[name](context()))
    assert (len(found.turns), found.warmup_turns) == (plan.turns - plan.warmup_turns, plan.warmup_turns)
    assert found.sessions == plan.sessions


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"prefix"}))
def test_measured_turns_wait_for_the_last_of_the_warm_up_also_where_it_failed(name):
    for fail in ((), {("warmup-0", 1), ("warmup-1", 1), ("warmup", 1)}):
        arrivals = drive(MAKERS[name](context()), fail=fail)
        warm = [a.at_s for a in arrivals if not is_measured(a.request.phase)]
        assert min(a.at_s for a in measured(arrivals)) >= max(warm) + 1.0
        assert len(measured(arrivals)) == len(measured(drive(MAKERS[name](context()))))


@ALL
def test_a_failed_turn_ends_its_conversation_only(name):
    whole = Counter(a.request.session for a in measured(drive(MAKERS[name](context()))))
    victim = next(a.request for a in measured(drive(MAKERS[name](context()))) if a.request.turn < 3)
    cut = Counter(
        a.request.session for a in measured(drive(MAKERS[name](context()), fail={(victim.session, victim.turn)}))
    )
    before = {session: turns for session, turns in cut.items() if session != victim.session}
    assert before == {session: turns for session, turns in whole.items() if session != victim.session}
    assert cut[victim.session] == 1


REFUSED = {
    "chat": "conversations=2.5 pressure=float('nan') max_turns=4 free=True",
    "decode": "iterations=5",
    "prefix_invalidation": "blocks='512' blocks='0/5' blocks='8000/500'",
    "rounds": "rounds=10**6",
}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in REFUSED.items() for field in fields.split()]
)
def test_a_field_out_of_range_is_refused_by_name(name, field):
    key, _, text = field.partition("=")
    node = read_option("workload", name) | {key: eval(text)}
    if key == "max_turns":
        node["min_turns"] = 5
    with pytest.raises(ConfigError, match=rf"workload\.{key}="):
        factory("workload", node)(context())


# -- of one workload alone -----------------------------------------------------------------------------------------------


def test_the_live_set_is_the_multiple_that_was_asked_of_both_tiers():
    at, each = replace(context(gpu_tokens=1000), cpu_tokens=3000), 5 * 50 - 1
    for pressure in (0.5, 3.7):
        plan = RoundsWorkload(at, pressure=pressure, rounds=5, message_tokens=40, reply_tokens=10).describe()
        assert pressure * 4000 <= plan.working_set_tokens == plan.sessions * each < pressure * 4000 + each


def test_a_conversation_ends_before_it_outgrows_the_context():
    workload = ChatWorkload(context(max_context=600))
    plan, held = workload.describe(), {}
    for arrival in drive(workload):
        request = arrival.request
        held[request.session] = held.get(request.session, 0) + len(arrival.due().prompt) + request.output.max_new_tokens
    assert max(held.values()) <= 600
    assert plan.facts["conversations_cut_by_context"] == plan.sessions
    assert plan.turns < 8 * plan.sessions


def test_scripted_hits_and_misses_give_the_difference_back():
    def latency(request):
        first = {"hit": 20, "miss": 80}.get(request.phase, 300) + (0 if request.stream else 7)
        first += {("warmup", "miss"): 50, ("throughput", "throughput_miss"): 100}.get((request.phase, request.label), 0)
        return Latency(queue=0, first=first, gap=4)

    system = ScriptedSystem(latency)
    record = replay(system, PrefixInvalidationWorkload(context(), blocks="16/8", rounds=5, new_tokens=11))
    found = {(m.name, m.label): m.value for m in summarise(record.measurement, system.start())}
    expected = {
        ("ttft_ms_mean", "hit"): 23.5, ("ttft_ms_mean", "miss"): 83.5, ("ttft_degradation_pct", ""): 100 * 60 / 23.5,
        ("stream_overhead_ms", ""): -7, ("total_ms_mean", ""): 393.5, ("per_token_ms_mean", ""): 393.5 / 11,
        ("throughput_output_tok_s", "throughput"): 11 / 0.3935, ("warmup_ms_mean", "hit"): 303.5,
        ("throughput_output_tok_s", "throughput_hit"): 11 / 0.3435, ("warmup_ms_mean", "miss"): 353.5,
        ("throughput_output_tok_s", "throughput_miss"): 11 / 0.4435,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    window = record.measurement
    assert window.measure_end_s - window.measure_start_s > 3.0, "later warm-ups do not cut the window short"


# -- what is drawn by name alone ----------------------------------------------------------------------------------------


def test_draws_of_names_alone_are_what_they_were_when_trials_were_recorded():
    assert [part_of(f"mooncake-{number}", 2) for number in range(3)] == [1, 2, 1]
    assert list(filler(6, 32_000, 0, "a")) == [12447, 8872, 16372, 12906, 16232, 4308]
    assert list(filler(6, 97, 0, "a")) == [31, 48, 40, 34, 52, 63], "a byte each"


def test_prose_has_exactly_the_length_and_may_begin_unlike_another():
    assert [len(prose(context(), tokens, "a")) for tokens in (1, 7, 512)] == [1, 7, 512]
    first = prose(context(), 8, "first")
    assert all(prose(context(), 8, "other", n, unlike=first)[0] != first[0] for n in range(200))
    assert any(prose(context(), 8, "other", n)[0] == first[0] for n in range(200))


@pytest.mark.parametrize("vocab", [2, 97, 259, 128_256])
def test_ids_lie_in_the_vocabulary_and_fewer_are_the_beginning_of_more(vocab):
    tokens = filler(20_000, vocab, 0, "a")
    assert isinstance(tokens, array) and tokens.typecode == "i" and len(tokens) == 20_000
    assert min(tokens) >= 0 and max(tokens) < vocab
    assert len(set(tokens)) > min(vocab, 10_000) // 4
    assert filler(50, vocab, 0, "a") == tokens[:50] and filler(0, vocab, "a") == array("i")
