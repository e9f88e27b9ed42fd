"""Random conversations on tiny models through every path, every invariant held after each step and each token compared
with the plain model:
`python -m tests.soak 10000 3`, the number of turns and the seed.

An episode is a model, an engine and a list of operations, all drawn from (seed, episode number). The first difference ends
the run, and what is printed runs that episode again.
"""

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, get_args

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.base import PolicyContext
from pensieve.core.policies.lru import ConversationLru, Fifo, Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Fork, Length, Request, Sampling, tokens_of
from pensieve.core.scheduler.scheduler import SchedulerSettings, split, unified
from pensieve.device.worker import TorchOptions
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.restore import RestoreMode, RestoringCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.policies.learned_return import LearnedReturn
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.plugins.tiers.disk_transfer import DiskOptions
from pensieve.serve.record import TurnRecord
from pensieve.sim.profile import Profile
from tests.exact import CheckedEngine, Mismatch, Paths
from tests.thread_link import ThreadLink
from tests.worker.torch.driver import ARCHITECTURES, tiny_model

TURNS_AN_EPISODE = 60
_model = lru_cache(maxsize=16)(tiny_model)
_VOCAB, _CONTEXT = 97, 512
_SHARED = tuple(5 + 7 * i % 83 for i in range(40))  # a prompt that several conversations begin with
_POLICIES: tuple[Any, ...] = (RetentionValue, RetentionValue, Lru, Fifo, ConversationLru, LearnedReturn)
_RESTORING = (RestoringCache, SharedCache)
_CACHES: tuple[Any, ...] = (
    *_RESTORING,
    *_RESTORING,
    TwoTierCache,
    *(partial(make, reuse="prefix") for make in _RESTORING),
    StatelessCache,
    PrefixCache,
    SlotCache,
    VllmOffload,
    partial(VllmOffload, order="eviction", offload_prompt_only=False),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """kind: ask (a new message), edit (a whole prompt that keeps a share `keep` of the conversation), step (`count`
    iterations), forget, cancel, damage (bytes of the file of a disk tier). A conversation that is new begins with a share
    `keep` of `parent`, where that is known."""

    kind: str
    session: str = ""
    tokens: tuple[int, ...] = ()
    output: int = 0
    keep: float = 1.0
    parent: str = ""
    count: int = 0
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Episode:
    seed: int
    number: int

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}/{self.number}/{purpose}")

    def operations(self, turns: int) -> list[Operation]:
        rng, operations, asked = self.rng("operations"), [], 0
        names = "abcdefgh"[: rng.randint(2, 8)]
        while asked < turns:
            kind = rng.choices(("ask", "edit", "step", "forget", "cancel", "damage"), (60, 6, 25, 1, 2, 1))[0]
            name = rng.choice(names)
            if kind in ("ask", "edit"):
                asked += 1
                tokens = tuple(rng.randrange(3, _VOCAB) for _ in range(rng.choice((1, 3, 9, 20, 45))))
                if rng.random() < 0.2:
                    tokens = _SHARED[: rng.randint(1, len(_SHARED))] + tokens
                temperature = rng.choice((0.0, 0.0, 1.0))
                parent = rng.choice(names) if rng.random() < 0.3 else ""
                output, keep = rng.choice((1, 4, 10, 40)), rng.random()
                operations.append(Operation(kind, name, tokens, output, keep, parent, temperature=temperature))
            else:
                operations.append(Operation(kind, name, count=rng.randint(1, 12)))
        return operations

    def returns(self, rounds: int) -> list[Operation]:
        """Four replies at once, longer than small tiers hold: somebody is preempted. Then four conversations that return in
        turn, each alone in the engine: a restore that splits needs that."""
        rng = self.rng("returns")

        def ask(name: str, output: int) -> Operation:
            return Operation("ask", name, tuple(rng.randrange(3, _VOCAB) for _ in range(30)), output)

        alone = [(ask(name, 4), Operation("step", count=60)) for name in "wxyz" * rounds]
        return [*(ask(name, 40) for name in "mnop"), Operation("step", count=300), *chain.from_iterable(alone)]

    def engine(self) -> CheckedEngine:
        rng = self.rng("engine")
        chunk, make = rng.choice((4, 8, 32)), rng.choice(_CACHES)
        gpu = -(-_CONTEXT // chunk) + rng.randint(2, 40) if make is SlotCache else rng.randint(130, 450) // chunk
        cpu = rng.choice((0, rng.randint(30, 300), rng.randint(300, 900))) // chunk
        context = PolicyContext(chunk, gpu, cpu, lambda tokens: 1.0 + tokens / 200, 0.1, self.seed)
        restore = {"restore": rng.choice(get_args(RestoreMode))} if make in _RESTORING else {}
        prefix = isinstance(make, partial) and make.keywords.get("reuse") == "prefix"
        policy = rng.choice(_POLICIES)(context)
        cache = make(policy=policy, chunk_tokens=chunk, gpu_blocks=gpu, cpu_blocks=cpu, **restore)
        settings = SchedulerSettings(
            composition=rng.choice((unified, unified, split)),
            max_batch_tokens=rng.choice((7, 48, 256)),
            max_batch_requests=rng.choice((1, 4, 16)),
            copy_ahead=rng.choice(("paper", "spare", "never")),
        )
        source = self.rng("model")
        model = _model(source.choice(sorted(ARCHITECTURES)), attention=source.choice(("auto", "reference")))
        # Copies in the background and now and then so slow that they outlast their plans, or made at once.
        link = ThreadLink(rng.choice((None, 2e6))) if rng.random() < 0.4 else None
        options, load = TorchOptions(depth=rng.choice((1, 2))), rng.choice((0.0, 0.1, 1.0, 10.0))
        # A prefill of 1 ms a token; a chunk takes `load` times as long to load as to compute.
        cost = Profile(chunk, {128: 0.128, 256: 0.256}, load * chunk / 1000, {})
        prices: dict[str, Any] = {"cost": cost, "layers": model.spec.layers}
        prices["batch_tokens"] = settings.max_batch_tokens
        on_disk = isinstance(cache, TwoTierCache) and not prefix and options.depth == 1 and rng.random() < 0.5
        if on_disk:
            folder, blocks = Path(mkdtemp()), rng.choice((4, 60))
            options = replace(options, transfer=DiskOptions(folder / "pool.kv", folder, bytes(32), blocks))
        engine = CheckedEngine(model, cache, settings, _CONTEXT, link, options)
        if on_disk:
            report = replace(engine.report, below_load_s=cost.load_s())
            cache.begin(**prices, below=DiskTier(blocks, transfer=options.transfer), report=report)
        elif make in _RESTORING:
            cache.begin(**prices)
        return engine

    def run(self, operations: list[Operation]) -> Paths:
        """Raises Mismatch (or AssertionError, from an invariant) at the first fault."""
        return perform(self.engine(), operations)


def perform(engine: CheckedEngine, operations: Sequence[Operation]) -> Paths:
    """Perform the operations, then whatever still waits, and close the engine. A turn is asked when the turn before it in its
    conversation is over. Raises as `Episode.run` does."""
    number, waiting = 0, list[tuple[int, Operation]]()

    def ask() -> None:
        for one in waiting[:]:
            session = engine.cache.sessions.get(one[1].session)
            if session is None or not (session.running or session.waiting):
                waiting.remove(one)
                _submit(engine, one[1], one[0])

    def told(turns: Iterable[TurnRecord]) -> None:
        for turn in turns:
            assert turn.request_id not in ended, "a request ends once"
            ended.add(turn.request_id)
            if turn.history_tokens is None:
                assert turn.status in ("refused", "cancelled")
                continue
            hits = (turn.gpu_hit_tokens, turn.cpu_hit_tokens, turn.disk_hit_tokens, turn.recomputed_tokens)
            assert sum(one or 0 for one in hits) == turn.history_tokens
            assert turn.history_tokens + (turn.new_tokens or 0) == turn.prompt_tokens
            assert (turn.new_tokens or 0) >= max(1, turn.shared_hit_tokens or 0)

    def damage(seed: int) -> None:
        store = engine.torch_worker.options.transfer
        if isinstance(store, DiskOptions) and store.path is not None:
            rng, size = random.Random(seed), store.path.stat().st_size
            with store.path.open("r+b") as file:
                for _ in range(6):
                    file.seek(rng.randrange(size))
                    file.write(bytes([rng.randrange(256)]))

    ended = set[int]()
    for operation in operations:
        if operation.kind in ("ask", "edit"):
            number += 1
            waiting.append((number, operation))
        elif operation.kind == "forget":
            engine.forget(operation.session)
        elif operation.kind == "cancel":
            cancelled = max(1, number - operation.count % 4)
            waiting[:] = [one for one in waiting if one[0] != cancelled]
            engine.cancel(cancelled, "cancelled")
        elif operation.kind == "damage":
            damage(operation.count)
        else:
            for _ in range(operation.count):
                told(event.turn for event in engine.step() if event.turn is not None)
                ask()
        ask()
    while waiting:
        told(event.turn for event in engine.step() if event.turn is not None)
        assert engine.progressed, "requests wait, and nothing runs that could let them in"
        ask()
    told(engine.run())
    engine.forget(None)
    while engine.step() or engine.progressed:
        pass
    assert engine.cache.room.available == engine.cache.gpu_blocks, "blocks leaked"
    engine.torch_worker.close()
    return engine.paths


def _submit(engine: CheckedEngine, operation: Operation, number: int) -> None:
    session = engine.cache.sessions.get(operation.session)
    if session is not None and len(session.tokens) > 0.35 * min(
        _CONTEXT, engine.cache.request_blocks * engine.cache.chunk_tokens
    ):
        engine.forget(operation.session)  # begin anew rather than be refused from now on
        session = engine.cache.sessions.get(operation.session)
    prompt, fork = tokens_of(operation.tokens), None
    parent = engine.cache.sessions.get(operation.parent)
    if session is None and parent is not None:
        kept = int(operation.keep * len(parent.tokens))
        prompt, fork = parent.tokens[:kept] + prompt, Fork(parent.name, kept, takes_kv=operation.output == 4)
    if session is not None:
        kept = int(operation.keep * len(session.tokens)) if operation.kind == "edit" else None
        prompt = session.tokens[:kept] + prompt
    sampling = Sampling(temperature=operation.temperature, top_k=20, seed=number)
    engine.submit(Request(number, operation.session, number, prompt, Length(operation.output), sampling, fork=fork))


def soak(turns: int, seed: int) -> int:
    """Exit status: 0 when `turns` turns agreed with the plain model, 1 at the first that did not."""
    total, number = Paths(), 0
    while total.turns < turns:
        episode, asked = Episode(seed, number), min(TURNS_AN_EPISODE, turns - total.turns)
        try:
            total.add(episode.run(episode.operations(asked)))
        except (Mismatch, AssertionError) as error:
            print(f"{type(error).__name__}: {error}\nfrom tests.soak import Episode\nepisode = {episode}")
            print(f"episode.run(episode.operations({asked}))")
            return 1
        number += 1
    print(f"All as the plain model, by path: {total}")
    return 0


if __name__ == "__main__":
    sys.exit(soak(*(int(given) for given in [*sys.argv[1:], *("300", "0")[len(sys.argv) - 1 :]])))
