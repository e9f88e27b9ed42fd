"""Hypothesis drives conversations against a tiny model: every invariant after every step, every token as the plain model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache as remember
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.conversation_lru import ConversationLru
from pensieve.core.policies.fifo import Fifo
from pensieve.core.policies.lru import Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Fork, Length, Request, Sampling, tokens_of
from pensieve.core.scheduler.scheduler import SchedulerSettings, split, unified
from pensieve.device.options import TorchOptions
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.restore import RestoringCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.device.thread_link import ThreadLink
from pensieve.plugins.policies.adaptive_retention import AdaptiveRetention
from pensieve.plugins.policies.learned_return import LearnedReturn
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.plugins.tiers.disk_transfer import DiskOptions
from pensieve.sim.profile import Profile
from tests.exact import CheckedEngine
from tests.simulated import policy_context
from tests.worker.torch.driver import tiny_model

model_of = remember(tiny_model)
NAMES = st.sampled_from("abcde")
CHUNK = 4
OFFLOAD = (
    VllmOffload,
    partial(VllmOffload, order="arc", blocks_per_chunk=2, offload_prompt_only=False),
    partial(VllmOffload, order="eviction", offload_prompt_only=False),
)


class Serving(RuleBasedStateMachine):
    @initialize(
        gpu=st.integers(10, 30),
        cpu=st.sampled_from([0, 3, 12, 40]),
        make=st.sampled_from(
            [RestoringCache, RestoringCache, SharedCache, SharedCache, StatelessCache, PrefixCache, SlotCache, *OFFLOAD]
        ),
        policy=st.sampled_from([RetentionValue, Lru, Fifo, ConversationLru, AdaptiveRetention, LearnedReturn]),
        composition=st.sampled_from([unified, split]),
        budget=st.sampled_from([3, 10, 64]),
        requests=st.sampled_from([1, 3, 8]),
        restore=st.sampled_from(["load", "hybrid", "recompute"]),
        reuse=st.sampled_from(["any", "any", "prefix"]),
        load=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        late=st.booleans(),
        depth=st.sampled_from([1, 2]),
        disk_blocks=st.sampled_from([0, 4, 60]),
        ahead=st.sampled_from(["paper", "spare", "never"]),
    )
    def start(
        self,
        gpu,
        cpu,
        make,
        policy,
        composition,
        budget,
        requests,
        restore,
        reuse,
        load,
        late,
        depth,
        disk_blocks,
        ahead,
    ):
        prefix = reuse == "prefix" and make in (RestoringCache, SharedCache)
        if make in (RestoringCache, SharedCache):
            make = partial(make, reuse=reuse) if prefix else partial(make, restore=restore)
        cache = make(policy=policy(policy_context(CHUNK, gpu, cpu)), chunk_tokens=CHUNK, gpu_blocks=gpu, cpu_blocks=cpu)
        costs = {"cost": Profile(CHUNK, {128: 0.128, 256: 0.256}, load * CHUNK / 1000, {}), "layers": 2}
        if isinstance(cache, TwoTierCache):
            cache.begin(**costs, batch_tokens=budget)
        limits = SchedulerSettings(
            composition=composition, max_batch_tokens=budget, max_batch_requests=requests, copy_ahead=ahead
        )
        link = ThreadLink(2e6) if late else None
        self.file = Path(mkdtemp()) / "pool.kv"
        on_disk = bool(disk_blocks) and depth == 1 and not (prefix or isinstance(cache, VllmOffload))
        store = DiskOptions(self.file, self.file.parent, bytes(32), disk_blocks)
        options = TorchOptions(depth=depth, transfer=store) if on_disk else TorchOptions(depth=depth)
        self.engine = CheckedEngine(model_of("llama"), cache, limits, 512, link, options)
        if on_disk:
            report = replace(self.engine.report, below_load_s=load * CHUNK / 1000)
            cache.begin(**costs, batch_tokens=budget, below=DiskTier(disk_blocks), report=report)
        self.number = 0
        self.finished = {}

    def submit(self, name, message, output, temperature, share=1.0, fork=None):
        """share: of what the conversation holds, before the message."""
        self.number += 1
        session = self.engine.cache.sessions.get(name)
        prompt = message if session is None else session.tokens[: int(share * len(session.tokens))] + message
        sampling = Sampling(temperature=temperature, seed=self.number)
        self.engine.submit(Request(self.number, name, self.number, prompt, Length(output), sampling, fork=fork))

    @rule(name=NAMES, tokens=st.lists(st.integers(3, 96), min_size=1, max_size=14), output=st.integers(1, 12))
    def ask(self, name, tokens, output):
        self.submit(name, tokens_of(tokens), output, 0.0)

    @rule(
        name=NAMES, tokens=st.lists(st.integers(3, 96), min_size=1, max_size=6), temperature=st.sampled_from([0.0, 1.0])
    )
    def ask_sampled(self, name, tokens, temperature):
        self.submit(name, tokens_of(tokens), 3, temperature)

    @rule(name=NAMES, share=st.floats(0, 1), tokens=st.lists(st.integers(3, 96), min_size=1, max_size=6))
    def edit(self, name, share, tokens):
        self.submit(name, tokens_of(tokens), 2, 0.0, share)

    @rule(name=NAMES, length=st.integers(1, 20), output=st.integers(1, 12))
    def ask_what_others_ask(self, name, length, output):
        self.submit(name, tokens_of(range(3, 3 + length)), output, 0.0)

    @rule(name=NAMES, parent=NAMES, share=st.floats(0, 1), takes_kv=st.booleans())
    def fork(self, name, parent, share, takes_kv):
        known, sessions = self.engine.cache.sessions.get(parent), self.engine.cache.sessions
        if known is not None and name not in sessions:
            kept = int(share * len(known.tokens))
            self.submit(name, known.tokens[:kept] + tokens_of([5]), 3, 0.0, fork=Fork(parent, kept, takes_kv))

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            for event in self.engine.step():
                if event.turn is not None:
                    assert event.request_id not in self.finished, "a request finishes exactly once"
                    self.finished[event.request_id] = event.turn

    @rule(name=NAMES)
    def forget(self, name):
        self.engine.forget(name)

    @rule(places=st.lists(st.floats(0, 1, exclude_max=True), max_size=6), byte=st.integers(0, 255))
    def damage(self, places, byte):
        """Of the file on disk."""
        if self.file.exists():
            with self.file.open("r+b") as file:
                for place in places:
                    file.seek(int(place * self.file.stat().st_size))
                    file.write(bytes([byte]))

    @rule(back=st.integers(0, 3))
    def cancel(self, back):
        self.engine.cancel(self.number - back, "cancelled")

    @invariant()
    def the_records_add_up(self):
        if not hasattr(self, "engine"):
            return
        self.engine.cache.check()
        for turn in self.finished.values():
            if turn.history_tokens is None:
                assert turn.status in ("refused", "cancelled")
                continue
            hits = (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) + (turn.disk_hit_tokens or 0)
            assert hits + (turn.recomputed_tokens or 0) == turn.history_tokens
            assert turn.history_tokens + (turn.new_tokens or 0) == turn.prompt_tokens
            assert (turn.new_tokens or 0) >= max(1, turn.shared_hit_tokens or 0)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for turn in self.engine.run():
            assert turn.request_id not in self.finished
            self.finished[turn.request_id] = turn
        assert len(self.finished) == self.number, "every request finishes"
        self.engine.forget(None)
        while self.engine.step() or self.engine.progressed:
            pass
        assert self.engine.cache.room.available == self.engine.cache.gpu_blocks, "nothing leaks"
        self.engine.torch_worker.close()
        rmtree(self.file.parent)


Serving.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestServing = pytest.mark.slow(Serving.TestCase)
