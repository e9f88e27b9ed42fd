"""Build what a planned trial needs: tokenizer, worker, system, workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pensieve.baselines.base import AnsweringSystem
from pensieve.cache.base import CacheManager
from pensieve.clock import Clock, VirtualClock, WallClock
from pensieve.compose.machine import free_host_memory_bytes
from pensieve.compose.plan import TrialPlan, memory_share
from pensieve.compose.schema import ModelConfig, TrialConfig
from pensieve.compose.target import factory
from pensieve.compose.weights import weights_kind
from pensieve.errors import CapacityError, ConfigError
from pensieve.eviction.base import EvictionPolicy, PolicyContext
from pensieve.idle_sessions import MemoryLimits
from pensieve.request import tokens_of
from pensieve.scheduler.composition import Composition
from pensieve.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from pensieve.worker.base import Worker
from pensieve.workload.base import Workload, WorkloadContext, WorkloadPlan


@dataclass(frozen=True, slots=True)
class Parts:
    """The factories that the configuration names by dotted paths, with their checked fields bound."""

    cache: Callable[..., CacheManager]
    policy: Callable[[PolicyContext], EvictionPolicy]
    composition: Composition
    workload: Callable[[WorkloadContext], Workload]


_CACHE_ARGUMENTS = ("policy", "chunk_tokens", "gpu_blocks", "cpu_blocks")


def build_tokenizer(model: ModelConfig, vocab: int, simulated: bool) -> Tokenizer:
    """The byte tokenizer, or the model's own. A simulation, or random weights, download none."""
    if model.tokenizer == "bytes":
        if vocab < ByteTokenizer.vocab_size:
            raise ConfigError(
                f"model.tokenizer=bytes needs a vocabulary of {ByteTokenizer.vocab_size}, and {model.name} has {vocab}."
            )
        return ByteTokenizer()
    sources = [model.tokenizer] if model.tokenizer != "hub" else []
    kind = weights_kind(model)
    if not sources and kind == "path":
        sources.append(model.weights)
    if not sources and model.hub_id:
        sources.append(model.hub_id)
    meaningless = simulated or kind == "random"
    eos = model.architecture.get("eos_token_id")
    eos_id = int(eos[0] if isinstance(eos, list) else eos) if eos is not None else None
    return load_tokenizer(sources, model.revision, eos_id, vocab, meaningless, download=not meaningless)


def find_parts(config: TrialConfig, longest_tokens: int | None = None) -> Parts:
    """longest_tokens: of the workload's longest conversation, for a cache that asks for it by a field of that name.

    Raises EngineMissing where a target is not there, ConfigError for a field that it does not take.
    """
    assert config.baseline.cache is not None
    cache = dict(config.baseline.cache)
    if "longest_tokens" in cache and cache["longest_tokens"] is None:
        cache["longest_tokens"] = longest_tokens
    return Parts(
        cache=factory("baseline", {**cache, "name": config.baseline.name}, given=_CACHE_ARGUMENTS),
        policy=factory("eviction", config.eviction),
        composition=factory("scheduler", {**config.scheduler.composition, "name": config.scheduler.name}),
        workload=factory("workload", config.workload),
    )


def build_system(
    plan: TrialPlan,
    tokenizer: Tokenizer | None = None,
    trace: Path | None = None,
    described: WorkloadPlan | None = None,
) -> AnsweringSystem:
    """The system of an in-engine baseline, not started yet; a real one has its model loaded.

    trace: the file of a torch profile of the worker's steps (real only). described: the workload's description, for a cache
    that needs the length of the longest conversation.

    Raises EngineMissing, WeightsMissing, HardwareMissing, UnsupportedModel.
    """
    from pensieve.baselines.inline_system import InlineSystem
    from pensieve.baselines.threaded_system import ThreadedSystem
    from pensieve.scheduler.composition import SchedulerSettings

    config = plan.config
    parts = find_parts(config, longest_conversation(described) if described else None)
    s = config.scheduler
    scheduler = SchedulerSettings(
        composition=parts.composition,
        max_batch_tokens=s.max_batch_tokens,
        max_batch_requests=s.max_batch_requests,
        swap_out_start=s.swap_out_start,
        swap_out_stop=s.swap_out_stop,
        admission_reserve=s.admission_reserve,
    )
    tokenizer = tokenizer or build_tokenizer(config.model, plan.model.vocab, plan.device.simulated)
    clock, worker, gpu_blocks = _clock_and_worker(plan, trace)
    kind: type[InlineSystem | ThreadedSystem] = InlineSystem if clock.virtual else ThreadedSystem
    return kind(
        model=plan.model,
        hardware=plan.hardware,
        worker=worker,
        clock=clock,
        cache=parts.cache,
        policy=parts.policy,
        scheduler=scheduler,
        gpu_blocks=gpu_blocks,
        cpu_blocks=plan.cpu_blocks,
        chunk_tokens=plan.chunk_tokens,
        tokenizer=tokenizer,
        seed=config.seed,
        limits=MemoryLimits(config.cache.session_ttl_s, config.cache.max_remembered_tokens),
        labels={"weights": plan.weights, "baseline": config.baseline.name, "tokenizer": tokenizer.name},
    )


def _clock_and_worker(plan: TrialPlan, trace: Path | None) -> tuple[Clock, Worker, int | Callable[[], int]]:
    """Clock, worker, and the number of GPU blocks or the function that measures how many fit."""
    hardware, scheduler = plan.config.hardware, plan.config.scheduler
    if plan.device.simulated:
        from pensieve.worker.simulated import SimulatedWorker

        virtual = VirtualClock()
        simulated = SimulatedWorker(plan.model, plan.hardware, virtual, plan.chunk_tokens, hardware.depth)
        return virtual, simulated, plan.gpu_blocks
    from pensieve.worker.torch.options import TorchOptions
    from pensieve.worker.torch.shelf import take_model
    from pensieve.worker.torch.worker import TorchWorker

    m, clock = plan.config.model, WallClock()
    threads = plan.config.hardware.threads
    attention = plan.config.attention_backend
    model = take_model(
        plan.model, m.weights, m.hub_id, m.revision, m.seed, plan.device.name, threads, attention, plan.chunk_tokens
    )
    options = TorchOptions(
        depth=hardware.depth,
        graphs=hardware.graphs == "auto",
        copies=hardware.copies,
        max_batch_tokens=scheduler.max_batch_tokens,
        max_batch_requests=scheduler.max_batch_requests,
        memory_share=memory_share(plan.device, hardware.memory_share),
    )
    worker = TorchWorker(model, plan.chunk_tokens, clock, options=options)
    gpu_blocks = worker.room if plan.gpu_measured else plan.gpu_blocks
    if trace is None:
        return clock, worker, gpu_blocks
    from pensieve.worker.torch.profiled import ProfiledWorker

    return clock, ProfiledWorker(worker, trace), gpu_blocks


def make_workload(plan: TrialPlan, tokenizer: Tokenizer) -> Workload:
    """The workload, without asking whether it fits this baseline."""
    context = WorkloadContext(
        seed=plan.config.seed,
        gpu_tokens=plan.budget_gpu_blocks * plan.chunk_tokens,
        cpu_tokens=plan.budget_cpu_blocks * plan.chunk_tokens,
        max_context=plan.model.max_context,
        vocab=plan.model.vocab,
        encode=lambda text: tokens_of(tokenizer.encode(text), plan.model.vocab),
        force_lengths=plan.device.simulated or plan.weights == "random",
        memory_bytes=free_host_memory_bytes(),
    )
    workload: Workload = find_parts(plan.config).workload(context)
    return workload


def build_workload(plan: TrialPlan, tokenizer: Tokenizer) -> tuple[Workload, WorkloadPlan]:
    """The workload and its description. Every baseline of a sweep gets the same context, and so the same requests.

    Raises CapacityError where its longest conversation can never be served.
    """
    workload = make_workload(plan, tokenizer)
    described = workload.describe()
    longest = longest_conversation(described)
    slots = int((plan.config.baseline.cache or {}).get("n_slots") or 1)
    room = (plan.gpu_blocks // slots - 1) * plan.chunk_tokens
    if longest is not None and longest > room:
        raise CapacityError(
            f"The longest conversation of workload={plan.config.workload.get('name')} needs {longest:,} tokens of KV and "
            f"baseline={plan.config.baseline.name} has room for {room:,} on its device; "
            f'use a larger cache.gpu (at least "{slots * (longest + 2 * plan.chunk_tokens)} tokens") or a smaller '
            "workload.max_turns."
        )
    return workload, described


def longest_conversation(described: WorkloadPlan) -> int | None:
    """Its tokens; None where the workload does not know them in advance."""
    longest = described.facts.get("longest_conversation_tokens")
    return None if longest is None else int(longest)
