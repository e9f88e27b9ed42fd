"""The engine over a simulated worker: admission, eviction, suspension, failure; every invariant after every step."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import MemoryLimits
from pensieve.core.request import Free, Length, Request, tokens_of
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.serve.tokenizer import TextStream
from tests.invariants import check_cache
from tests.simulated import make_engine, request, run


def test_a_conversation_is_idle_from_the_end_of_its_last_request_however_it_ended():
    """One whose request was cancelled before it was admitted was asked for all the same."""
    engine = make_engine(limits=MemoryLimits(ttl_s=5.0))
    clock = engine.clock
    for number, name in enumerate("ab", start=1):
        engine.say(request(number, name, tokens=4, output=2))
    run(engine)
    clock.advance_to(4 * 10**9)
    engine.say(request(3, "a", tokens=4, output=2, turn=2))
    engine.cancel(3, "cancelled")
    assert engine.sessions.next_expiry_ns is not None
    assert engine.sessions.next_expiry_ns < 6 * 10**9, "b's"
    clock.advance_to(6 * 10**9)
    engine.step(None)
    assert list(engine.cache.sessions) == ["a"]
    assert engine.sessions.next_expiry_ns == 9 * 10**9
    clock.advance_to(9 * 10**9)
    engine.step(None)
    assert list(engine.cache.sessions) == []
    assert engine.sessions.next_expiry_ns is None


def test_a_stop_string_is_found_however_many_tokens_without_text_are_in_it():
    probe = make_engine(gpu_blocks=64)
    probe.say(request(1, "a", tokens=4, output=40))
    ids = list(run(probe)[1].token_ids)
    last = next(at for at in range(20, 40) if ids[at] not in ids[:at])
    letters = {ids[0]: "a", ids[last]: "b"}
    engine = make_engine(gpu_blocks=64)
    engine._search = lambda stops: TextStream(lambda ids: "".join(letters.get(one, "") for one in ids), stops).ends
    engine.submit(replace(request(1, "a", tokens=4, output=1), output=Free(40, ("ab",))))
    turn = run(engine)[1]
    assert (turn.finish_reason, list(turn.token_ids)) == ("stop", ids[: last + 1])


def test_cancelling_a_turn_that_waits_behind_a_preempted_one_costs_that_one_nothing():
    """Without the cancellation the same turns are the same, down to what their resumption recomputes."""
    resumed = []
    for cancels in (False, True):
        engine = make_engine(cache=StatelessCache, gpu_blocks=10)
        engine.say(request(1, "a", tokens=8, output=24))
        engine.say(request(2, "b", tokens=8, output=24))
        while not engine.scheduler.counters.preempted:
            engine.step(None)
        assert [sequence.session.name for sequence in engine.scheduler.running] == ["a"]
        held = len(engine.cache.sessions.get("b").chunks)
        assert held > 0
        if cancels:
            engine.say(request(3, "b", tokens=2, output=2, turn=2))
            engine.cancel(3, "cancelled")
            assert len(engine.cache.sessions.get("b").chunks) == held, "the preempted turn's KV"
        resumed.append((run(engine)[2].token_ids, engine.cache.counters.dropped_chunks))
    assert resumed[0] == resumed[1]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    cache=st.sampled_from([TwoTierCache, PrefixCache, VllmOffload, SlotCache, StatelessCache]),
    depth=st.sampled_from([1, 2]),
    gpu=st.integers(8, 14),
    asked=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 14), st.integers(1, 10), st.integers(0, 6), st.booleans()),
        min_size=1,
        max_size=9,
    ),
    victims=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), max_size=6),
)
def test_cancelled_in_any_state_a_turn_stands_or_never_was(cache, depth, gpu, asked, victims):
    """Queued, deferred, parked, in prefill, decoding, preempted, in flight: what is left is what turns that stand said."""
    engine = make_engine(cache=cache, gpu_blocks=gpu, cpu_blocks=8, depth=depth, max_batch_tokens=5)
    submitted = {}
    done = []
    after = {}

    def step():
        events = engine.step(None)
        check_cache(engine.cache)
        for event in events:
            if event.turn is not None:
                done.append(event.turn)

    steps = 0
    for number, (name, tokens, output, wait, edits) in enumerate(asked, start=1):
        made = request(number, name, tokens, output, turn=0)
        if (held := engine.cache.sessions.get(name)) is not None:
            made = replace(made, prompt=held.tokens[: tokens if edits else None] + made.prompt)
        submitted[number] = made
        engine.submit(made)
        for _ in range(wait):
            steps += 1
            for at, victim in victims:
                if at == steps:
                    engine.cancel(victim, "cancelled")
                    check_cache(engine.cache)
            step()
    for at, victim in victims:
        if at > steps:
            engine.cancel(victim, "timeout")
            check_cache(engine.cache)
    while engine.busy:
        step()
        assert engine.progressed or not engine.busy, "jammed"
    done += [event.turn for event in engine.take_events() if event.turn is not None]
    assert sorted(turn.request_id for turn in done) == sorted(submitted), "each finishes once"
    turns_of = {}
    for turn in sorted(done, key=lambda turn: turn.request_id):
        if turn.status != "refused":  # a conversation whose first turn is refused is not even begun
            turns_of.setdefault(turn.session, []).append(turn.turn)
        made = submitted[turn.request_id]
        after.setdefault(turn.session, [])
        if turn.stands:
            assert turn.prompt_tokens == len(made.prompt)
            after[turn.session] = [*made.prompt, *turn.token_ids]
    for name, said in after.items():
        known = engine.cache.sessions.get(name)
        assert known is None or list(known.tokens) == said[: len(known.tokens)]
        roomy = make_engine(gpu_blocks=200)
        for one in (engine, roomy):
            one.submit(Request(99, name, 99, tokens_of([*said, 11, 12]), Length(2)))
        small, large = run(engine)[99], run(roomy)[99]
        assert small.status == "refused" or small.token_ids == large.token_ids
        numbers = turns_of.get(name, [])
        assert numbers == sorted(set(numbers)), "no number is given twice"
