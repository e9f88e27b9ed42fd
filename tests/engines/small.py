"""Small models for tests of engines: real architectures, a few thousand weights, and what plain generate says of them."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from pensieve.core.request import Length, Request
from pensieve.errors import EngineMissing
from pensieve.plugins.engines.base import EngineSetup, OutsideEngine, OutsideSystem
from pensieve.plugins.engines.vllm import Vllm
from pensieve.serve.record import TurnRecord
from pensieve.specs import ModelSpec

_LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 320, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "tied_llama": {
        **_LLAMA, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "tie_word_embeddings": True,
    },
    "wide_llama": {
        **_LLAMA, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 96,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 300,
        "layer_norm_epsilon": 1e-5, "bos_token_id": 299, "eos_token_id": 299,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64,
        "vocab_size": 300, "max_position_embeddings": 512, "word_embed_proj_dim": 32,
    },
}  # fmt: skip


OPEN: list[OutsideSystem] = []


def begun(engine: OutsideEngine) -> OutsideSystem:
    """Its system, which is closed when the test is over."""
    OPEN.append(OutsideSystem(engine))
    OPEN[-1].start()
    return OPEN[-1]


def setup_of(family: str = "llama", **changes: Any) -> EngineSetup:
    architecture = ARCHITECTURES[family]
    model = replace(ModelSpec.from_architecture(family, architecture, "float32"), architecture=architecture)
    given: dict[str, Any] = {
        "baseline": "tested", "model": model, "weights": "random", "hub_id": None, "revision": None, "seed": 3,
        "device": "cpu", "threads": 1, "kv_tokens": 1024, "host_tokens": 0, "block_tokens": 32, "batch_tokens": 128,
        "batch_requests": 8, "longest_tokens": 200,
    }  # fmt: skip
    return EngineSetup(**{**given, **changes})


def _vllm_is_there() -> bool:
    try:
        Vllm(setup_of("wide_llama")).check()
    except EngineMissing:
        return False
    return True


NEEDS_VLLM = pytest.mark.skipif(not _vllm_is_there(), reason="no environment with vLLM: make vllm-env")


def prompt(length: int, vocab: int = 290, start: int = 5) -> array[int]:
    return array("i", ((start + 37 * i + i * i) % vocab for i in range(length)))


def ask(
    number: int, session: str, tokens: array[int], output: int = 6, stream: bool = True, turn: int = 1, **fields: Any
) -> Request:
    return Request(number, session, turn, tokens, Length(output), stream=stream, **fields)


def served(system: Any, *requests: Request) -> list[TurnRecord]:
    """Their records, in order of the requests."""
    for request in requests:
        system.submit(request)
    turns: dict[int, TurnRecord] = {}
    while len(turns) < len(requests):
        turns |= {event.request_id: event.turn for event in system.poll(None) if event.turn is not None}
    return [turns[request.id] for request in requests]


def greedy(module: Any, tokens: array[int], count: int) -> list[int]:
    """Plain transformers, token by token, whole context each time: no cache that could be wrong."""
    import torch

    ids = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(tokens) :]
