"""Tiny models, what transformers alone says of them, and workers driven by plans written by hand."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Row, Sample, StepPlan, StepResult
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


CHUNK = 8


class Hand:
    """A worker driven by plans written by hand, in blocks of CHUNK; what a real scheduler would not plan can be asked too."""

    def __init__(
        self,
        model: LoadedModel,
        options: TorchOptions | None = None,
        blocks: int = 40,
        link: Link | None = None,
        keep_logits: bool = False,
    ) -> None:
        self.worker = TorchWorker(model, CHUNK, WallClock(), keep_logits, link, options)
        self.settings = self.worker.start(blocks, blocks).settings
        self._steps = 0

    def launch(self, *rows: Row, **parts: Any) -> None:
        self.worker.launch(StepPlan(self._steps, rows, **parts))
        self._steps += 1

    def perform(self, *rows: Row, **parts: Any) -> StepResult:
        """Also a plan that fails."""
        self.launch(*rows, **parts)
        result = self.worker.collect(None)
        assert result is not None
        return result

    def step(self, *rows: Row, **parts: Any) -> StepResult:
        self.launch(*rows, **parts)
        return self.collect()

    def collect(self) -> StepResult:
        result = self.worker.collect(None)
        assert result is not None and result.error is None, result
        return result

    def prompt(self, slot: int = 0, tokens: int = 40, first_block: int = 3) -> list[int]:
        """Computes a prompt; returns its tokens and the one that was sampled."""
        row, blocks = self.prompt_row(slot, tokens), tuple(range(first_block, first_block + tokens // CHUNK + 2))
        result = self.step(row, tables=((slot, 0, blocks),))
        return [*(row.tokens or ()), result.tokens[slot]]

    @staticmethod
    def prompt_row(slot: int, tokens: int) -> Row:
        return Row(slot, ((0, tokens),), tuple(random_tokens(tokens, slot)), Sample(tokens))

    @staticmethod
    def decode(position: int, slot: int = 0, **sampling: Any) -> Row:
        """Of the token that the slot sampled last, at `position`."""
        return Row(slot, ((position, position + 1),), None, Sample(position + 1, **sampling))

    def close(self) -> None:
        while self.worker._flights:
            self.worker.collect(None)
        self.worker.close()
