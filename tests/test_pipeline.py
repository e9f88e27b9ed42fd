"""One step ahead: with two plans in flight the engine says the same, token for token, and leaks nothing."""

import random
from dataclasses import replace

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.belady import Belady
from pensieve.core.policies.lru import ConversationLru, Fifo, Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Forced, Free, Request, tokens_of
from pensieve.core.scheduler.scheduler import Strategies, split, unified
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.policies.learned_return import LearnedReturn
from pensieve.serve.books.books import Books
from pensieve.serve.systems.inline_system import forward_for
from pensieve.serve.tokenizer import TextStream
from pensieve.sim.worker import SimulatedWorker
from tests.invariants import check_cache
from tests.simulated import MACHINE, MODEL, LateWorker, TalkingEngine, make_engine, request, run

VOCAB = 97


def letters(tokens):
    """Token ids as text: stop strings are found in it."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


class Watched(LateWorker):
    """Fails the steps it is told to, or one sampled row of them, and checks that plans are collected in order and never more
    than two at a time.

    A row without tokens must be of a slot that has sampled before: its token is what that slot sampled last.
    """

    def __init__(self, worker):
        self.__dict__.update(worker.__dict__)
        self.is_late = isinstance(worker, LateWorker)
        self.failing = set()
        self.broken = set()
        self.over = set()
        self.most = self.unseen = 0
        self.steps = []
        self.sampled = {}

    def launch(self, plan):
        super().launch(plan)
        self.most = max(self.most, len(self._launched))

    def _perform(self, plan):
        self.steps.append(plan.step)
        for row in plan.rows:
            if row.tokens is None:
                self.unseen += 1
                assert row.positions == 1
                assert self.sampled[row.slot] == row.runs[0][0], "the position after the one this slot sampled at"
            if row.sample is not None:
                self.sampled[row.slot] = row.sample.position
        result = super()._perform(plan)
        if plan.step in self.broken and result.tokens:
            slot = max(result.tokens)
            return replace(result, tokens=without(result.tokens, slot), not_finite=(slot,))
        if plan.step not in self.failing:
            return result
        self.over |= {move.ticket for move in plan.moves}  # a failed plan's are not heard of again
        return replace(result, tokens={}, error="The device stumbled.")

    def collect(self, until_ns):
        result = (LateWorker if self.is_late else SimulatedWorker).collect(self, until_ns)
        return result and replace(result, moved=tuple(one for one in result.moved if one.ticket not in self.over))


def without(tokens, slot):
    return {one: token for one, token in tokens.items() if one != slot}


def engine_of(depth, eos=frozenset(), **options):
    made = make_engine(**options)
    worker = Watched(made.worker)
    worker.depth = depth
    return TalkingEngine(
        cache=made.cache,
        settings=made.scheduler.settings,
        worker=worker,
        clock=made.clock,
        max_context=4096,
        eos=eos,
        search=lambda stops: TextStream(letters, stops).ends,
        facts=Books(made.cache.chunk_tokens),
        strategies=Strategies(forward=forward_for(worker.computes, depth, MODEL)),
    )


def worker_of(engine):
    assert isinstance(engine.worker, Watched)
    return engine.worker


def settle(engine):
    """Nothing is left in flight or under way, and no block is lost."""
    engine.forget(None)
    while engine.step(None) or engine.progressed:
        check_cache(engine.cache)
    assert not engine.busy
    assert engine.cache.room.available == engine.cache.gpu_blocks


@pytest.mark.parametrize("ends", ["eos", "stop"])
def test_a_stop_makes_one_row_waste(ends):
    plain = make_engine(gpu_blocks=32)
    plain.say(request(1, "a", tokens=9, output=20))
    tokens = list(run(plain)[1].token_ids)
    cut = next(
        i for i in range(4, 20) if tokens[i] not in tokens[:i] and tokens[i] % 26 not in [t % 26 for t in tokens[:i]]
    )
    eos = frozenset({tokens[cut]} if ends == "eos" else ())
    output = Free(20, () if ends == "eos" else (letters(tokens[cut : cut + 1]),))
    records = []
    for depth in (1, 2):
        engine = engine_of(depth, eos, gpu_blocks=32)
        engine.submit(replace(request(1, "a", tokens=9, output=20), output=output))
        first = run(engine)[1]
        assert (first.finish_reason, list(first.token_ids)) == (ends, tokens[: cut + 1])
        assert engine.facts.counts.steps == cut + depth, "one step is waste at depth 2"
        engine.say(request(2, "a", tokens=4, output=6, turn=2))
        second = run(engine)[2]
        records.append((second.history_tokens, second.gpu_hit_tokens, second.new_tokens, list(second.token_ids)))
        settle(engine)
    assert records[0] == records[1], "the waste left no position behind"


@pytest.mark.parametrize("make", [TwoTierCache, PrefixCache, VllmOffload, SlotCache, StatelessCache])
def test_a_failure_in_mid_pipeline_fails_its_requests_and_what_was_built_on_it(make):
    engine = engine_of(2, gpu_blocks=64, cache=make)
    shared = tokens_of(range(3, 24))
    engine.say(request(1, "a", tokens=9, output=4))
    run(engine)
    kept = list(engine.cache.sessions.get("a").tokens)
    worker = worker_of(engine)
    worker.failing = {engine.scheduler.counters.steps + 2}
    engine.say(request(2, "a", tokens=4, output=12, turn=2))
    engine.say(request(3, "b", tokens=5, output=1))
    events = engine.step(None)
    engine.say(Request(4, "c", 1, shared, Forced(tokens_of([1, 2, 3, 4]))))  # in the failing step
    events += engine.step(None)
    engine.say(Request(5, "d", 1, shared, Forced(tokens_of([1, 2, 3, 4]))))  # admitted behind it
    turns = run(engine) | {event.request_id: event.turn for event in events if event.turn}
    assert [turns[n].status for n in (2, 3, 4)] == ["failed", "completed", "failed"]
    assert turns[5].status == ("failed" if make in (PrefixCache, VllmOffload) else "completed"), (
        "it hit blocks of the failed step"
    )
    assert list(engine.cache.sessions.get("a").tokens) == kept
    engine.say(request(6, "a", tokens=4, output=3, turn=2))
    engine.say(Request(7, "e", 1, shared, Forced(tokens_of([1, 2]))))
    turns = run(engine)
    assert [turns[n].status for n in (6, 7)] == ["completed", "completed"]
    assert make is SlotCache or turns[7].shared_hit_tokens == 0, "nothing of the failed step may hit (d's slot may)"
    settle(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [TwoTierCache, VllmOffload, SlotCache])
def test_a_row_that_is_not_finite_fails_its_own_turn_only(make, depth):
    engine, plain = engine_of(depth, gpu_blocks=64, cache=make), engine_of(1, gpu_blocks=64, cache=make)
    for one in (engine, plain):
        one.say(request(1, "a", tokens=9, output=4))
        run(one)
    kept = list(engine.cache.sessions.get("a").tokens)
    worker = worker_of(engine)
    worker.broken = {engine.scheduler.counters.steps + 2}
    others = [request(2, "b", tokens=5, output=6), request(3, "c", tokens=6, output=6)]
    for asked in (*others, request(4, "a", tokens=4, output=6, turn=2)):  # the last one has the highest slot
        engine.say(asked)
    turns = run(engine)
    assert [turns[n].status for n in (2, 3, 4)] == ["completed", "completed", "failed"]
    assert "not finite" in (turns[4].error or "") and len(turns[4].token_ids) < 6
    assert list(engine.cache.sessions.get("a").tokens) == kept, "the turn is undone"
    again = request(5, "a", tokens=4, output=6, turn=2)
    for asked in (*others, again):
        plain.say(asked)
    engine.say(again)
    alike, mine = run(plain), run(engine)
    assert {n: turns[n].token_ids for n in (2, 3)} == {n: alike[n].token_ids for n in (2, 3)}
    assert mine[5].token_ids == alike[5].token_ids
    assert (mine[5].history_tokens, mine[5].gpu_hit_tokens) == (12, 0), "what the row read is computed again"
    settle(engine)


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_never_jams_and_gives_the_same_tokens_at_both_depths(seed):
    """Small pools, slow links, late copies, stops, cancellations, forgetting and failures, against a roomy engine."""
    rng = random.Random(seed)
    depth, gpu = 1 + seed // 6, rng.randint(8, 26)
    make = (TwoTierCache, TwoTierCache, VllmOffload, PrefixCache, SlotCache, StatelessCache)[seed % 6]
    eos = frozenset(rng.sample(range(VOCAB), 8))
    engine = engine_of(
        depth,
        eos,
        gpu_blocks=gpu,
        cpu_blocks=rng.choice((0, 3, 8, 24)),
        cache=make,
        policy=rng.choice((RetentionValue, Lru, Fifo, ConversationLru, Belady, LearnedReturn)),
        hardware=replace(MACHINE, d2h_bw=rng.choice((1e5, 1e8)), h2d_bw=rng.choice((1e6, 1e9))),
        composition=rng.choice((unified, split)),
        max_batch_tokens=rng.choice((3, 16, 64)),
        max_batch_requests=rng.choice((2, 8)),
        late=rng if seed % 2 else None,
    )
    worker = worker_of(engine)
    roomy = engine_of(1, eos, gpu_blocks=4096, cpu_blocks=0)
    asked = {}
    done = {}
    number, fails = 0, rng.random() < 0.4
    for _ in range(60):
        for _ in range(rng.randint(0, 2)):
            number += 1
            made = request(number, rng.choice("abcdefgh"), rng.randint(1, 12), rng.randint(1, 9), turn=number)
            length = made.output.max_new_tokens
            output = rng.choice((made.output, Free(length), Free(length, ("kz", "q")), Forced(made.prompt[:length])))
            asked[number] = replace(made, output=output)
            engine.say(asked[number])
        if rng.random() < 0.08 and number:
            engine.cancel(rng.randint(max(1, number - 4), number), "cancelled")
        if rng.random() < 0.05:
            engine.forget(rng.choice("abcdefgh"))
        if fails and rng.random() < 0.05:
            rng.choice((worker.failing, worker.broken)).add(engine.scheduler.counters.steps + rng.randint(0, 2))
        for event in engine.step(None):
            if event.turn:
                assert event.request_id not in done
                done[event.request_id] = event.turn
        check_cache(engine.cache)
    done.update(run(engine))
    assert len(done) == number
    compared = 0
    for again in asked.values():
        turn = done[again.id]
        assert turn.status in ("completed", "refused", "cancelled") or fails
        if turn.status != "completed":
            continue
        # The simulated token is a function of key and position, so the same position gives the same tokens.
        assert turn.prompt_tokens is not None
        filler = tokens_of([1] * (turn.prompt_tokens - len(again.prompt)))
        alone = replace(again, session=again.session, prompt=filler + again.prompt)
        roomy.forget(again.session)
        roomy.say(alone)
        assert run(roomy)[again.id].token_ids == turn.token_ids
        assert turn.history_tokens is not None and turn.new_tokens is not None
        hits = (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0)
        assert hits + (turn.recomputed_tokens or 0) == turn.history_tokens
        assert 1 <= turn.new_tokens == turn.prompt_tokens - turn.history_tokens
        compared += 1
    assert compared > 5
    assert worker.most == depth
    settle(engine)
