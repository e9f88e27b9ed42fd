"""Random conversations on a checked engine whose tiers are too small for them: the same on a GPU and on its stand-ins."""

from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.model import LoadedModel
from pensieve.device.transfers.transfer import Link
from pensieve.device.worker import TorchOptions
from pensieve.plugins.caches.restore import RestoreMode, RestoringCache
from pensieve.sim.profile import Profile
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
