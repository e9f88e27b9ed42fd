"""KV that has left its window is not kept: what is held, that no token needs more, and where nothing may change."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.lru import Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Fork, Length, Request
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.core.session import NO_BLOCK
from pensieve.device.worker import TorchOptions
from pensieve.errors import PensieveError
from pensieve.lab.compose.plan import plan_trial
from pensieve.plugins.caches.windowed import WindowedCache
from pensieve.sim.worker import simulated_cost
from pensieve.specs import ModelSpec
from tests.composed import checked
from tests.exact import CheckedEngine, Paths
from tests.invariants import check_cache
from tests.simulated import make_engine, policy_context, request, run
from tests.worker.torch.driver import random_tokens, tiny_model

CHUNK = 4
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97}


class Forgetful(CheckedEngine):
    """Overwrites what an idle conversation's windowed layers have of chunks without blocks beside them."""

    overwritten = 0

    def step(self, until_ns=None):
        events = super().step(until_ns)
        tensors, cache = self.torch_worker.tensors, self.cache
        for session in cache.sessions.values():
            if session.running:
                continue
            for index in range(min(cache.tiers.left.get(session.number, 0), len(session.chunks))):
                gpu, cpu = session.chunks.gpu[index], session.chunks.cpu[index]
                for pool, block in ((tensors.gpu, gpu), (tensors.cpu, cpu)):
                    if block != NO_BLOCK and not session.chunks.copying[index]:
                        pool[0, block] = 1e4  # the first of two layers has the window
                        self.overwritten += 1
        return events


def drive(engine, seed, most=400):
    """Turns, edits, forks, cancelled and interrupted requests of five conversations in a random order."""
    rng = random.Random(seed)
    for number in range(40):
        name, parent = rng.sample("abcde", 2)
        sessions = engine.cache.sessions
        held = sessions[name].tokens[:] if name in sessions else random_tokens(0, 0)
        kept = rng.choice([len(held)] * 4 + [rng.randrange(len(held) + 1)])
        fork = None
        if name not in sessions and parent in sessions:
            held = sessions[parent].tokens[:]
            kept = rng.randrange(len(held) + 1)
            fork = Fork(parent, kept, takes_kv=True)
        if len(held) > most:
            engine.forget(name)
            continue
        prompt = held[:kept] + random_tokens(rng.randrange(1, 60), number)
        output = Length(rng.randrange(1, 30))
        engine.submit(Request(id=number, session=name, turn=number + 1, prompt=prompt, output=output, fork=fork))
        for _ in range(rng.randrange(16)):
            engine.step(None)
        if rng.random() < 0.15:
            engine.cancel(number, "cancelled")


def test_no_token_needs_what_has_left_the_window():
    paths = Paths()
    for seed in range(2):
        rng = random.Random(seed)
        gpu, cpu, budget = rng.choice([40, 70, 120]), rng.choice([0, 20, 90]), rng.choice([6, 24, 64])
        policy = rng.choice([Lru, RetentionValue])(policy_context(CHUNK, gpu, cpu))
        sizes = {"chunk_tokens": CHUNK, "gpu_blocks": gpu, "cpu_blocks": cpu}
        cache = WindowedCache(window_tokens=20, beside=1, policy=policy, **sizes)
        cache.begin(batch_tokens=budget)
        settings = SchedulerSettings(max_batch_tokens=budget, max_batch_requests=rng.choice([1, 3, 8]))
        engine = Forgetful(tiny_model("gemma2"), cache, settings, 512, options=TorchOptions(depth=rng.choice([1, 2])))
        drive(engine, seed)
        engine.run()
        assert engine.overwritten
        paths.add(engine.paths)
    assert paths.gpu_hit and paths.cpu_restore and paths.recompute and paths.cancelled


@pytest.mark.parametrize(
    ("model_type", "layers", "window", "beside"),
    [("gemma3_text", 14, 24, 6), ("gpt_oss", 6, 16, 1)],
)
def test_as_much_is_held_as_the_cache_of_transformers_holds(model_type, layers, window, beside):
    """Counted on tensors without memory, layer by layer. Ours may have a chunk more at either end of the window, and what
    fills up the last group of layers."""
    transformers = pytest.importorskip("transformers")
    given = {**SIZES, "num_hidden_layers": layers, "sliding_window": window, "max_position_embeddings": 4096}
    spec = ModelSpec.from_architecture("x", {**given, "model_type": model_type, "intermediate_size": 64,
        **({"num_local_experts": 2, "num_experts_per_tok": 1} if model_type == "gpt_oss" else {})})  # fmt: skip
    spec = replace(spec, slides=True)
    assert spec.blocks_beside(CHUNK) == beside
    theirs = transformers.DynamicCache(config=transformers.AutoConfig.for_model(model_type, **given))
    make = partial(WindowedCache, window_tokens=window, beside=beside)
    engine = make_engine(gpu_blocks=2000, cpu_blocks=0, cache=make)
    held = 0
    for turn, length in enumerate((10, 30, 100, 7), 1):
        engine.say(request(turn, "a", length, 8, turn))
        run(engine)
        session = engine.cache.sessions["a"]
        for _ in range(session.computed - held):  # one by one: of many at once it keeps all until the next
            one = torch.empty(1, 2, 1, 16, device="meta")
            for layer in range(layers):
                theirs.update(one, one, layer)
        held = session.computed
        kept = 2 * sum(layer.keys.shape[2] for layer in theirs.layers) * 2 * 16 * spec.dtype_bytes
        block_bytes = CHUNK * spec.kept_bytes_per_token
        full = layers - spec.windowed_layers
        padding = (beside * full - spec.windowed_layers) * (min(held, window) + CHUNK)
        most = kept + 2 * 2 * 16 * spec.dtype_bytes * (full * CHUNK + 2 * CHUNK * spec.windowed_layers + padding)
        assert kept <= engine.cache.gpu_blocks_used * block_bytes <= most


def test_an_edit_behind_the_window_is_computed_again_and_one_within_is_not():
    make = partial(WindowedCache, window_tokens=10, beside=2)
    engine = make_engine(gpu_blocks=200, cpu_blocks=0, cache=make)
    engine.say(request(1, "a", 60, 8))
    turns = run(engine)
    for number, cut, found in ((2, 0, 67), (3, 40, 0)):
        held = engine.cache.sessions["a"].tokens
        engine.submit(replace(request(number, "a", 5, 1, number), prompt=held[: len(held) - cut] + held[:5]))
        turns |= run(engine)
        assert turns[number].gpu_hit_tokens == found


@pytest.mark.parametrize("cpu_blocks", [0, 30])
def test_a_window_longer_than_every_conversation_keeps_as_many_conversations_as_all_whole(cpu_blocks):
    """With blocks that are a third as large, of which each chunk has three."""
    seen = []
    for cache, times in ((TwoTierCache, 1), (partial(WindowedCache, window_tokens=10**6, beside=2), 3)):
        engine = make_engine(gpu_blocks=40 * times, cpu_blocks=cpu_blocks * times, cache=cache, policy=Lru)
        rng, turns = random.Random(3), {}
        for number in range(60):
            engine.say(request(number, rng.choice("abcdef"), rng.randrange(1, 20), 4, number + 1))
            turns |= run(engine)
        seen.append([(turn.gpu_hit_tokens, turn.cpu_hit_tokens) for _, turn in sorted(turns.items())])
    assert seen[0] == seen[1] and any(gpu for gpu, _ in seen[0])


def test_a_budget_is_as_many_bytes_either_way_and_what_cannot_slide_is_refused():
    given = ("model=gpt_oss_20b", "hardware=sim_h100", "cache.gpu=24000 tokens", "cache.cpu=2GiB")
    whole, slides = (plan_trial(checked(*given, f"cache.windows={windows}")) for windows in ("whole", "slide"))
    assert slides.gpu_blocks == 2 * whole.gpu_blocks and slides.gpu_bytes == whole.gpu_bytes == 750 * 32 * 49_152
    assert 0 <= slides.cpu_bytes - whole.cpu_bytes <= whole.block_bytes
    plain = ("model=llama3_8b", *given[1:])
    assert plan_trial(checked(*plain, "cache.windows=slide")).model == plan_trial(checked(*plain)).model
    for more in (
        ("hardware=cpu",),
        ("baseline=prefix_cache",),
        ("scheduler.copy_ahead=never",),
        ("cache.disk=1GB", "hardware.disk_bw=1e9"),
        ("+model.architecture.layer_types=[sliding_attention]", "model.architecture.num_hidden_layers=1"),
    ):
        with pytest.raises(PensieveError, match=r"cache\.windows=slide"):
            plan_trial(checked(*given, "cache.windows=slide", *more))


STATES = partial(WindowedCache, window_tokens=None, beside=7, states=True)


@pytest.mark.parametrize(("length", "cut", "found"), [(60, 0, 61), (63, 0, 64), (60, 1, 0), (60, 20, 0)])
def test_an_idle_conversation_holds_its_kv_and_one_state_which_serves_the_last_position_alone(length, cut, found):
    """A window would serve the one before too."""
    engine = make_engine(gpu_blocks=200, cpu_blocks=0, cache=STATES)
    engine.say(request(1, "a", length, 2))
    run(engine)
    assert engine.cache.gpu_blocks_used == -(-(length + 1) // CHUNK) + 7
    prompt = engine.cache.sessions["a"].tokens[: length + 1 - cut] + random_tokens(5, 1)
    engine.submit(replace(request(2, "a", 5, 1, 2), prompt=prompt))
    assert run(engine)[2].gpu_hit_tokens == found


def test_states_move_with_the_last_chunk_and_leave_last():
    engine = make_engine(gpu_blocks=90, cpu_blocks=300, cache=STATES, swap_out_start=0.8, swap_out_stop=0.95)
    engine.say(request(1, "a", 60, 2))
    turns = run(engine)
    for number in range(2, 6):  # others take the room
        engine.say(request(number, f"{number}", 60, 2))
        turns |= run(engine)
    assert set(engine.cache.places(engine.cache.sessions["a"])) == {"C"}
    before = engine.cache.counters.swapped_in_blocks
    engine.say(request(9, "a", 3, 2, 2))
    turns |= run(engine)
    assert turns[9].cpu_hit_tokens == 61 and not turns[9].recomputed_tokens
    assert engine.cache.counters.swapped_in_blocks - before == 16 + 7


@pytest.mark.parametrize("seed", range(2))
def test_states_survive_any_order_of_turns_and_edits(seed):
    """check() runs after every step; the counts of a turn are all of its history."""
    rng = random.Random(seed)
    engine = make_engine(gpu_blocks=rng.choice([60, 120]), cpu_blocks=rng.choice([0, 90]), cache=STATES, policy=Lru)
    drive(engine, seed, most=120)
    turns = run(engine)
    assert all(t.gpu_hit_tokens + t.cpu_hit_tokens + t.recomputed_tokens == t.history_tokens for t in turns.values())
    check_cache(engine.cache)


def test_a_model_with_states_is_simulated_and_refused_for_real():
    def priced(*hardware):
        plan = plan_trial(checked("model=qwen3_next_80b_a3b", "cache.gpu=2GiB", "cache.cpu=8GiB", *hardware))
        simulated_cost(plan.model, plan.hardware, plan.chunk_tokens)
        return plan

    efficient = ("hardware=sim_h100", "hardware.compute_efficiency=0.7", "hardware.memory_efficiency=0.8")
    simulated = (*efficient, "hardware.terms.projections=roofline", "hardware.terms.attention=roofline")
    plan = priced(*simulated)
    assert plan.model.blocks_beside(32) == 99 and plan.block_bytes == 32 * 24_576
    for hardware in (("hardware=cpu",), ("hardware=sim_h100",), (*simulated, "baseline=prefix_cache")):
        with pytest.raises(PensieveError, match="model=qwen3_next_80b_a3b"):
            priced(*hardware)
