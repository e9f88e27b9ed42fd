"""Drives a worker with hand-written plans: the part of the scheduler and cache that these tests need, and no more."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Move, Row, Sample, StepPlan, StepResult
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Request
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import IMPLEMENTATION
from pensieve.device.model import LoadedModel, load_model
from pensieve.device.sampler import draw, draws_of, numbers_of
from pensieve.device.transfers.transfer import Link
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.plugins.overlap import strategies_of
from pensieve.serve.books.books import Books
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import WallClock
from pensieve.specs import ModelSpec
from tests.simulated import TalkingEngine, policy_context, run

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}
ARCHITECTURES = {
    "llama": {"model_type": "llama", **_COMMON},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 512},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "vocab_size": 97,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    # With the default scale of its queries, 1/16 and not 1/4, attention of this size is a plain mean, and text repeats.
    "gemma2": {
        "model_type": "gemma2",
        **_COMMON,
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 16,
    },
    "qwen2": {"model_type": "qwen2", **_COMMON, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_COMMON, "head_dim": 32},
    "mistral": {"model_type": "mistral", **_COMMON, "head_dim": 16, "sliding_window": 20},
}

PROCESSORS = {  # options, and what a machine needs to run what they make
    "zen 3": (("-march=haswell", "-mtune=znver3"), {"avx2", "fma", "bmi2"}),
    "any": ((), set[str]()),
}


def tiny_spec(name: str, **changes: object) -> ModelSpec:
    return ModelSpec.from_architecture(name, {**ARCHITECTURES[name], **changes})


def tiny_model(name: str, seed: int = 0, fused: bool = True, attention: str = "auto") -> LoadedModel:
    return load_model(ModelAsked(tiny_spec(name), seed=seed, threads=1, fused=fused, attention=attention))


def random_tokens(count: int, seed: int, vocab: int = 97) -> array[int]:
    source = random.Random(seed)
    return array("i", [source.randrange(3, vocab) for _ in range(count)])


def plain_logits(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], float32: one forward of transformers' own eager attention over the whole history."""
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=model.device)
            return model.module(input_ids=ids, use_cache=False).logits[0].float().cpu()
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)


def drawn(logits: torch.Tensor, samples: Sequence[Sample]) -> tuple[list[int], list[float]]:
    """Tokens and margins of a row for each sample."""
    numbers, limited = numbers_of(samples)
    found = draw(logits, draws_of([torch.from_numpy(part) for part in numbers], limited))
    return found.tokens.tolist(), found.margins.tolist()


def plain_generate(model: LoadedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy tokens by transformers' own eager attention, each from one forward over all that is before it."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def engine_on(
    worker: Any,
    gpu_blocks: int,
    cpu_blocks: int,
    chunk: int = 8,
    max_context: int = 512,
    policy: Any = Lru,
    **settings: int,
) -> TalkingEngine:
    """An engine over a worker that is started with these pools."""
    pools = {"chunk_tokens": chunk, "gpu_blocks": gpu_blocks, "cpu_blocks": cpu_blocks}
    worker.start(gpu_blocks, cpu_blocks)
    asked = SchedulerSettings(**settings)
    return TalkingEngine(
        cache=TwoTierCache(policy=policy(policy_context(chunk, gpu_blocks, cpu_blocks)), **pools),
        settings=asked,
        worker=worker,
        clock=WallClock(),
        max_context=max_context,
        facts=Books(chunk),
        strategies=strategies_of(asked, chunk, None),
    )


def served(engine: TalkingEngine, *requests: Request) -> dict[int, TurnRecord]:
    """Their turns, by id."""
    for request in requests:
        engine.say(request)
    return run(engine)


Table = tuple[int, int, tuple[int, ...]]  # slot, first chunk, blocks


class Driver:
    """Conversations in a started worker, one a slot. Blocks are handed out scattered, and hold NaN until they are written.

    tokens: all known tokens of a slot; the last may have no KV yet. tables: a slot's GPU block by chunk, None where its
    chunk was dropped or is on CPU.
    """

    def __init__(
        self,
        model: LoadedModel,
        chunk: int = 8,
        gpu_blocks: int = 96,
        cpu_blocks: int = 64,
        link: Link | None = None,
        options: TorchOptions | None = None,
    ):
        self.model, self.chunk = model, chunk
        self.worker = TorchWorker(model, chunk, WallClock(), keep_logits=True, link=link, options=options)
        self.worker.start(gpu_blocks, cpu_blocks)
        self.free = list(range(gpu_blocks))
        random.Random(7).shuffle(self.free)
        self.tokens: dict[int, array[int]] = {}
        self.tables: dict[int, list[int | None]] = {}
        self.computed: dict[int, int] = {}
        self.kept: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.steps = 0
        self.worker.tensors.gpu.fill_(float("nan"))

    def perform(self, rows: Iterable[Row] = (), tables: Iterable[Table] = (), moves: Iterable[Move] = ()) -> StepResult:
        self.steps += 1
        self.worker.launch(StepPlan(self.steps, tuple(rows), tuple(tables), tuple(moves)))
        result = self.worker.collect(None)
        assert result is not None and result.step == self.steps
        return result

    def step(self, *rows: Row, moves: Iterable[Move] = ()) -> StepResult:
        """Allocate what the rows lack, perform, and append the sampled tokens."""
        deltas = [delta for row in rows for delta in self.allocate(row.slot, row.runs[-1][1])]
        result = self.perform(rows, deltas, moves)
        assert result.error is None, result.error
        for slot, token in result.tokens.items():
            self.tokens[slot].append(token)
        return result

    def allocate(self, slot: int, stop: int) -> list[Table]:
        """Blocks for the chunks below `stop` that have none; one delta a chunk."""
        table = self.tables.setdefault(slot, [])
        table.extend([None] * (-(-stop // self.chunk) - len(table)))
        deltas = []
        for chunk in range(-(-stop // self.chunk)):
            if table[chunk] is None:
                table[chunk] = block = self.free.pop()
                deltas.append((slot, chunk, (block,)))
        return deltas

    def release(self, slot: int, chunk: int) -> int:
        """Take the chunk's GPU block away and poison it."""
        block = self.tables[slot][chunk]
        assert block is not None
        self.tables[slot][chunk] = None
        self.worker.tensors.gpu[:, block] = float("nan")
        self.free.insert(0, block)
        return block

    def prompt_row(self, slot: int, new: Sequence[int], sample: bool = True) -> Row:
        """The new tokens of a turn, with the last sampled token of the turn before, which has no KV yet."""
        known = self.tokens.setdefault(slot, array("i"))
        start = max(0, len(known) - 1)
        known.extend(new)
        return self.row(slot, ((start, len(known)),), sample)

    def row(self, slot: int, runs: tuple[tuple[int, int], ...], sample: bool = True) -> Row:
        """Positions computed from the known tokens."""
        ids = tuple(self.tokens[slot][i] for start, stop in runs for i in range(start, stop))
        return Row(slot, runs, ids, Sample(runs[-1][1]) if sample else None)

    def decode_row(self, slot: int) -> Row:
        known = len(self.tokens[slot])
        return Row(slot, ((known - 1, known),), None, Sample(known))

    def check_logits(self, slot: int, tolerance: float = 1e-4) -> None:
        """The last step's logits of the slot against transformers alone, over everything before the sampled token."""
        self.keep_logits(slot)
        self.check_kept(tolerance)

    def keep_logits(self, *slots: int) -> None:
        """The last step's logits of these slots, for `check_kept`."""
        for slot in slots:
            kept = self.worker.last_logits[slot].clone()
            self.kept.setdefault(slot, []).append((len(self.tokens[slot]) - 1, kept))

    def check_kept(self, tolerance: float = 1e-4) -> None:
        """All that were kept against transformers alone: one forward a slot, since no position sees a later one."""
        for slot, kept in self.kept.items():
            expected = plain_logits(self.model, self.tokens[slot][: kept[-1][0]])
            for length, logits in kept:
                difference = float((logits - expected[length - 1]).abs().max())
                assert difference <= tolerance, difference
        self.kept.clear()
