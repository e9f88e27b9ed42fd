"""Models that are small enough for a test and large enough for the kernels of a GPU."""

from functools import cache
from typing import Any

from pensieve.device.asked import ModelAsked
from pensieve.device.model import LoadedModel, load_model
from pensieve.specs import ModelSpec

_COMMON = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": 512,
        **_COMMON,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 97,
        "sliding_window": 40, **_COMMON,
    },
    "deep": {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 32, "intermediate_size": 1024,
        "vocab_size": 1024, **_COMMON,
    },
}  # fmt: skip


@cache
def small_model(
    name: str, chunk_tokens: int = 32, dtype: str = "float32", device: str = "cuda", fused: bool = True
) -> LoadedModel:
    """float32, so that tokens can be compared one by one."""
    spec = ModelSpec.from_architecture(name, SIZES[name], dtype)
    return load_model(ModelAsked(spec, device=device, chunk_tokens=chunk_tokens, fused=fused))
