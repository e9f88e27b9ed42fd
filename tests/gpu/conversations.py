"""Random conversations on a checked engine whose tiers are too small for them: the same on a GPU and on its stand-ins. And
models that are small enough for a test and large enough for the kernels of a GPU."""

from functools import cache
from typing import Any

from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.asked import ModelAsked
from pensieve.device.model import LoadedModel, load_model
from pensieve.device.transfers.transfer import Link
from pensieve.device.worker import TorchOptions
from pensieve.plugins.caches.restore import RestoreMode, RestoringCache
from pensieve.sim.profile import Profile
from pensieve.specs import ModelSpec
from tests.exact import CheckedEngine, Paths
from tests.simulated import policy_context
from tests.soak import Episode, perform

CHUNK, GPU_BLOCKS, CPU_BLOCKS, CONTEXT, REQUESTS = 8, 36, 40, 512, 8
TURNS = 40


def restoring(model: LoadedModel, mode: RestoreMode, gpu_blocks: int, cpu_blocks: int, budget: int) -> RestoringCache:
    """A cache for which loading is twice as dear as computing. budget: positions of an iteration."""
    policy = RetentionValue(policy_context(CHUNK, gpu_blocks, cpu_blocks))
    cache = RestoringCache(
        policy=policy, chunk_tokens=CHUNK, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, restore=mode
    )
    cost = Profile(CHUNK, {128: 0.128, 256: 0.256}, 2 * CHUNK / 1000, {})
    cache.begin(cost=cost, layers=model.spec.layers, batch_tokens=budget)
    return cache


def converse(model: LoadedModel, mode: RestoreMode, options: TorchOptions, link: Link | None, turns: int) -> Paths:
    """Raises Mismatch at the first token or logit that the plain model would not have given."""
    settings = SchedulerSettings(max_batch_tokens=48, max_batch_requests=REQUESTS)
    cache = restoring(model, mode, GPU_BLOCKS, CPU_BLOCKS, settings.max_batch_tokens)
    engine = CheckedEngine(model, cache, settings, CONTEXT, link, options)
    return perform(engine, [*Episode(4, 0).operations(turns), *Episode(4, 0).returns(3)])


def check_paths(paths: Paths, mode: RestoreMode) -> None:
    assert paths.tokens > 100 and paths.gpu_hit and paths.cpu_restore and paths.recompute
    assert bool(paths.again) == (mode != "load"), paths


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
    name: str, chunk_tokens: int = 32, dtype: str = "float32", device: str = "cuda:0", fused: bool = True
) -> LoadedModel:
    """float32, so that tokens can be compared one by one."""
    spec = ModelSpec.from_architecture(name, SIZES[name], dtype)
    return load_model(ModelAsked(spec, device=device, chunk_tokens=chunk_tokens, fused=fused))
