"""Build what a planned trial needs: tokenizer, worker, system, workload. Check before what would fail minutes later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pensieve.core.cache.base import NO_LOWER_TIER, CacheManager, LowerTier
from pensieve.core.engine import MemoryLimits
from pensieve.core.machine import Clock, CostModel, Worker
from pensieve.core.request import tokens_of
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device import shelf
from pensieve.device.asked import ModelAsked, physical_cores, require
from pensieve.errors import CapacityError, ConfigError, HardwareMissing
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.model_files import build_tokenizer, check_weights, loadable, model_identity
from pensieve.lab.compose.plan import (
    LEAST_GPU_BLOCKS,
    Device,
    TrialPlan,
    free_device_bytes,
    memory_limit_bytes,
    memory_share,
    plans_in_flight,
)
from pensieve.lab.compose.settings import HardwareConfig, TrialConfig, factory, filled
from pensieve.lab.workload.base import Workload, WorkloadContext, WorkloadPlan
from pensieve.lab.workload.cache_state import in_state
from pensieve.plugins.engines.base import EngineSetup, OutsideEngine, OutsideSystem
from pensieve.serve.systems.base import AnsweringSystem, System, WallClock
from pensieve.serve.tokenizer import ByteTokenizer, ChatTemplate, Tokenizer
from pensieve.sim.machine_profile import read_profile
from pensieve.sim.worker import SimulatedCost, VirtualClock, simulated_cost
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes

if TYPE_CHECKING:
    from pensieve.device.worker import TorchOptions
    from pensieve.plugins.cluster.cluster_system import ClusterSystem
    from pensieve.plugins.tiers.disk_transfer import DiskOptions
    from pensieve.serve.systems.inline_system import InlineSystem
    from pensieve.serve.systems.threaded_system import ThreadedSystem


Lengths = Sequence[tuple[int, int]]
"""(tokens of the whole prompt, history included; tokens of the reply) of each request."""


def cache_of(
    config: TrialConfig, model: ModelSpec | None = None, longest_tokens: int | None = None
) -> Callable[..., CacheManager] | None:
    """The cache manager of a baseline in the engine, with its fields bound.

    model: as planned, whose KV may slide out of its windows. longest_tokens: of the workload's longest conversation, for a
    cache that asks for it by a field of that name. Raises as `settings.factory` does.
    """
    node = config.baseline.cache
    changed: dict[str, Any] = {}
    if node is not None and node.get("longest_tokens", 0) is None:
        changed["longest_tokens"] = longest_tokens
    if model is not None and model.slides:
        changed |= {
            "_target_": "pensieve.plugins.caches.windowed.WindowedCache",
            "window_tokens": model.sliding_window,
            "beside": model.blocks_beside(config.cache.chunk_tokens),
            "states": model.states is not None,
        }
    return _of_baseline(config, node and {**node, **changed}, "policy", "chunk_tokens", "gpu_blocks", "cpu_blocks")


def _of_baseline(config: TrialConfig, node: Mapping[str, Any] | None, *given: str) -> Callable[..., Any] | None:
    """A part of the baseline, with its fields bound; None where it has no such part. given: what its caller passes."""
    return None if node is None else factory("baseline", {**node, "name": config.baseline.name}, given)


def _scheduler(config: TrialConfig) -> SchedulerSettings:
    composition = factory("scheduler", {**config.scheduler.composition, "name": config.scheduler.name})
    return filled(SchedulerSettings, config.scheduler, composition=composition)


def _check_parts(config: TrialConfig) -> None:
    """Raises EngineMissing where a target of the configuration is not there, ConfigError for a field that it refuses."""
    cache_of(config)
    _scheduler(config)
    for node in (config.baseline.engine, config.baseline.simulated, config.baseline.below):
        _of_baseline(config, node)
    factory("eviction", config.eviction)
    factory("workload", config.workload)


def build_system(
    plan: TrialPlan,
    tokenizer: Tokenizer | None = None,
    described: WorkloadPlan | None = None,
    keeps_disk: bool = False,
) -> AnsweringSystem:
    """The system of an in-engine baseline, not started yet; a real one has its model loaded.

    described: the workload's description, for a cache that needs the length of the longest conversation. keeps_disk: what
    cache.disk holds is there when the same model is started again; if not, the file ends with the system.

    Raises EngineMissing, WeightsMissing, HardwareMissing, UnsupportedModel.
    """
    config = plan.config
    if config.hardware.router != "single":
        raise ConfigError("A cluster of simulated replicas runs trials only; use hardware.router=single.")
    tokenizer = tokenizer or build_tokenizer(config.model, plan.model.vocab, plan.device.simulated)
    return _engine_system(plan, tokenizer, described, keeps_disk)


def build_cluster(plan: TrialPlan, tokenizer: Tokenizer, described: WorkloadPlan | None = None) -> ClusterSystem:
    """Simulated replicas of an in-engine baseline behind hardware.router, not started yet."""
    from pensieve.plugins.cluster.cluster_system import ClusterSystem
    from pensieve.plugins.cluster.routing import ROUTERS
    from pensieve.serve.systems.inline_system import InlineSystem

    hardware = plan.config.hardware

    def make() -> InlineSystem:
        system = _engine_system(plan, tokenizer, described)
        assert isinstance(system, InlineSystem)
        return system

    return ClusterSystem(make, hardware.replicas, ROUTERS[hardware.router], seed=plan.config.seed)


def _engine_system(
    plan: TrialPlan, tokenizer: Tokenizer, described: WorkloadPlan | None, keeps_disk: bool = False
) -> InlineSystem | ThreadedSystem:
    from pensieve.serve.systems.inline_system import InlineSystem
    from pensieve.serve.systems.threaded_system import ThreadedSystem

    config = plan.config
    cache = cache_of(config, plan.model, longest_conversation(described) if described else None)
    assert cache is not None, f"baseline={config.baseline.name} is an outside engine: build_outside"
    below = _tier_below(plan, keeps_disk)
    clock, worker, gpu_blocks = clock_and_worker(plan, below)
    kind: type[InlineSystem | ThreadedSystem] = InlineSystem if clock.virtual else ThreadedSystem
    return kind(
        model=plan.model,
        hardware=plan.hardware,
        worker=worker,
        clock=clock,
        cache=cache,
        policy=factory("eviction", config.eviction),
        scheduler=_scheduler(config),
        gpu_blocks=gpu_blocks,
        cpu_blocks=plan.cpu_blocks,
        below=below,
        chunk_tokens=plan.chunk_tokens,
        tokenizer=tokenizer,
        seed=config.seed,
        limits=MemoryLimits(config.cache.session_ttl_s, config.cache.max_remembered_tokens),
        costs=_measured_before(plan),
        labels={"weights": plan.weights, "baseline": config.baseline.name, "tokenizer": tokenizer.name},
    )


def _measured_before(plan: TrialPlan) -> CostModel | None:
    """What a real machine's profile says of chunks; a simulated worker knows by itself."""
    path = plan.config.hardware.profile
    return None if path is None or plan.device.simulated else read_profile(path).costs


def outside_engine(
    plan: TrialPlan, tokenizer: Tokenizer | None = None, described: WorkloadPlan | None = None, starts: bool = False
) -> OutsideEngine:
    """The engine of an outside baseline, not started and nothing of it imported yet. starts: with the weights that it loads;
    otherwise as the configuration names them.

    Raises EngineMissing, ConfigError.
    """
    config = plan.config
    make = _of_baseline(config, config.baseline.engine)
    assert make is not None, f"baseline={config.baseline.name} is in the engine: build_system"
    longest = conversations = None
    if described is not None:  # the longest that may come, also where holding it is what the workload puts to the test
        longest = described.facts.get("longest_context_tokens") or longest_conversation(described)
        conversations = described.sessions
    eos = config.model.architecture.get("eos_token_id")
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    found: OutsideEngine = make(
        EngineSetup(
            baseline=config.baseline.name,
            model=plan.model,
            weights=loadable(config.model) if starts else config.model.weights,
            hub_id=config.model.hub_id,
            revision=config.model.revision,
            seed=config.model.seed,
            device=plan.device.name,
            threads=config.hardware.threads or physical_cores(),
            kv_tokens=plan.gpu_blocks * plan.chunk_tokens,
            host_tokens=plan.cpu_blocks * plan.chunk_tokens,
            block_tokens=plan.chunk_tokens,
            batch_tokens=config.scheduler.max_batch_tokens,
            batch_requests=config.scheduler.max_batch_requests,
            longest_tokens=longest,
            conversations=conversations,
            eos=frozenset(int(token) for token in listed),
            tokenizer=tokenizer,
            memory_bytes=memory_limit_bytes(config.hardware),
            network_gbps=config.hardware.network_gbps,
        )
    )
    return found


def build_outside(plan: TrialPlan, tokenizer: Tokenizer, described: WorkloadPlan | None = None) -> OutsideSystem:
    """The system of an outside engine, not started yet."""
    return OutsideSystem(outside_engine(plan, tokenizer, described, starts=True))


def build_simulated(plan: TrialPlan) -> System:
    """What stands for an engine of others on a simulated machine, not started yet."""
    make = _of_baseline(plan.config, plan.config.baseline.simulated)
    assert make is not None, f"baseline={plan.config.baseline.name} has nothing to simulate it: plan_trial refuses that"
    system: System = make(plan.model, plan.hardware, plan.chunk_tokens)
    return system


def clock_and_worker(
    plan: TrialPlan, below: LowerTier = NO_LOWER_TIER
) -> tuple[Clock, Worker, int | Callable[[], int]]:
    """Clock, worker, and the number of GPU blocks or the function that measures how many fit."""
    hardware, scheduler = plan.config.hardware, plan.config.scheduler
    depth = plans_in_flight(plan.device, hardware.depth)
    if plan.device.simulated:
        from pensieve.sim.worker import SimulatedWorker

        virtual = VirtualClock()
        simulated = SimulatedWorker(plan.model, plan.hardware, virtual, plan.chunk_tokens, depth, below.bandwidth)
        return virtual, simulated, plan.gpu_blocks
    clock, asked = WallClock(), _asked_model(plan)
    options = torch_options(hardware, plan.device, scheduler.max_batch_tokens, scheduler.max_batch_requests)
    if plan.device.divided:  # a process each; the type, the sizes and the seed are decided here, once for all of them
        from pensieve.plugins.engines.tensor_parallel import Setup, TensorParallelWorker

        threads = hardware.threads or physical_cores()
        asked = asked._replace(threads=max(1, threads // plan.device.count), memory_bytes=None)
        options = replace(options, graphs=False)  # a graph would have the collectives of its forward in it
        divided = TensorParallelWorker(Setup(asked, plan.device.names, options), clock)
        return clock, divided, divided.room if plan.gpu_measured else plan.gpu_blocks
    from pensieve.device.worker import TorchWorker

    if below.transfer is not None:
        options = replace(options, transfer=below.transfer)
    worker = TorchWorker(shelf.take_model(asked), plan.chunk_tokens, clock, options=options)
    return clock, worker, worker.room if plan.gpu_measured else plan.gpu_blocks


def _asked_model(plan: TrialPlan) -> ModelAsked:
    config, m = plan.config, plan.config.model
    limit = memory_limit_bytes(config.hardware)
    if limit is not None:  # what full tiers in host memory leave for weights
        limit -= plan.cpu_bytes + plan.gpu_bytes * plan.device.shared
    return ModelAsked(
        spec=plan.model,
        weights=loadable(m),
        hub_id=m.hub_id,
        revision=m.revision,
        seed=m.seed,
        device=plan.device.name,
        threads=config.hardware.threads,
        attention=config.attention_backend,
        chunk_tokens=plan.chunk_tokens,
        memory_bytes=limit,
    )


def _tier_below(plan: TrialPlan, keeps_disk: bool) -> LowerTier:
    """A tier under the CPU's. Raises HardwareMissing where it is for simulated machines only."""
    make = _of_baseline(plan.config, plan.config.baseline.below)
    below: LowerTier = NO_LOWER_TIER if make is None else make()
    if plan.disk_blocks:
        from pensieve.plugins.tiers.disk import DiskTier

        transfer = None if plan.device.simulated else _disk_options(plan, keeps_disk)
        below = DiskTier(plan.disk_blocks, plan.config.hardware.disk_bw, transfer)
    if below.blocks and below.transfer is None and not plan.device.simulated:
        raise HardwareMissing(f"The tier {below.name!r} is for simulated machines only; use hardware=sim_h100, say.")
    return below


def _disk_options(plan: TrialPlan, keeps: bool) -> DiskOptions:
    """Name the file store of this model and layout of its KV."""
    from pensieve.plugins.tiers.disk_transfer import DiskOptions

    model, size = model_identity(plan.config.model, simulated=False), plan.model.kv_bytes_per_token
    identity = hashlib.sha256(f"{model} {plan.model.dtype} {plan.chunk_tokens} {size}".encode()).digest()
    folder = outputs_folder()
    return DiskOptions(
        folder / "kv" / f"{identity.hex()[:16]}.kv" if keeps else None, folder, identity, plan.disk_blocks
    )


def torch_options(
    hardware: HardwareConfig, device: Device, max_batch_tokens: int, max_batch_requests: int
) -> TorchOptions:
    """How a torch worker runs on this hardware, in trials and in benchmarks alike."""
    from pensieve.device.worker import TorchOptions

    return TorchOptions(
        depth=plans_in_flight(device, hardware.depth),
        graphs=hardware.graphs == "auto",
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
        memory_share=memory_share(device, hardware.memory_share),
    )


def make_workload(plan: TrialPlan, tokenizer: Tokenizer) -> Workload:
    """The workload, without asking whether it fits this baseline."""
    make = factory("workload", plan.config.workload)
    return in_state(plan.config.cache_state, make, workload_context(plan, tokenizer))


def workload_context(plan: TrialPlan, tokenizer: Tokenizer) -> WorkloadContext:
    """What a workload may know of the planned system."""
    return WorkloadContext(
        seed=plan.config.seed,
        gpu_tokens=plan.budget_gpu_blocks * plan.chunk_tokens,
        cpu_tokens=plan.budget_cpu_blocks * plan.chunk_tokens,
        max_context=plan.model.max_context,
        vocab=plan.model.vocab,
        encode=lambda text: tokens_of(tokenizer.encode(text), plan.model.vocab),
        force_lengths=plan.device.simulated or plan.weights == "random",
        chat=ChatTemplate(tokenizer),
        takes_replies=plan.config.baseline.engine is None,
        byte_tokens=tokenizer.name == ByteTokenizer.name,
        stateless_capacity=_capacity(plan) if plan.device.simulated else None,
    )


def _capacity(plan: TrialPlan) -> Callable[[Lengths], float]:
    """Return a function from lengths to the requests a second that stateless serving finishes on the simulated machine,
    whatever this trial's baseline is."""
    s = plan.config.scheduler
    kv_tokens = int((1 - s.admission_reserve) * plan.budget_gpu_blocks) * plan.chunk_tokens
    cost = simulated_cost(plan.model, plan.hardware, plan.chunk_tokens)
    return lambda lengths: stateless_capacity(cost, lengths, kv_tokens, s.max_batch_requests, s.max_batch_tokens)


def build_workload(plan: TrialPlan, tokenizer: Tokenizer) -> tuple[Workload, WorkloadPlan]:
    """The workload and its description. Every baseline of a sweep gets the same context, and so the same requests.

    Raises CapacityError where its longest conversation can never be served.
    """
    workload = make_workload(plan, tokenizer)
    described = workload.describe()
    longest = longest_conversation(described)
    slots = int((plan.config.baseline.cache or {}).get("n_slots") or 1)
    room = (plan.gpu_blocks // slots - 1) * plan.chunk_tokens
    # What an outside engine has room for it says itself: it refuses a request, and the turn counts as refused.
    if longest is not None and longest > room and plan.config.baseline.engine is None:
        raise CapacityError(
            f"The longest conversation of workload={plan.config.workload.get('name')} needs {longest:,} tokens of KV, and "
            f"baseline={plan.config.baseline.name} has room for {room:,} on its device. "
            f'Use a larger cache.gpu (at least "{slots * (longest + 2 * plan.chunk_tokens)} tokens") or a smaller '
            "workload.max_turns."
        )
    return workload, described


def longest_conversation(described: WorkloadPlan) -> int | None:
    """Tokens of the longest conversation; None where the workload does not know them in advance."""
    longest = described.facts.get("longest_conversation_tokens")
    return None if longest is None else int(longest)


GPU_USABLE = 0.95
"""Share of a GPU's memory that torch can use; the rest is CUDA's context and fragmentation."""


def preflight(plan: TrialPlan) -> tuple[Workload, WorkloadPlan]:
    """Check parts, then memory, then weights: a machine too small for a model needs no advice on downloading it. Returns the
    workload and its description.

    Raises EngineMissing, ConfigError, HardwareMissing, WeightsMissing, UnsupportedModel, CapacityError.
    """
    _check_parts(plan.config)
    if plan.config.baseline.engine is not None and not plan.device.simulated:
        tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
        outside_engine(plan, tokenizer=tokenizer).check()
    size, backend = plan.chunk_tokens, plan.config.attention_backend
    if backend != "auto" and not plan.device.simulated and plan.config.baseline.engine is None:
        require(backend, plan.device.kind, size)
    if plan.gpu_blocks < LEAST_GPU_BLOCKS:
        raise CapacityError(
            f"cache.gpu={plan.config.cache.gpu!r} holds {plan.gpu_blocks * size} tokens of {plan.model.name}, and an engine "
            f'needs {LEAST_GPU_BLOCKS} blocks of {size}; use cache.gpu="{LEAST_GPU_BLOCKS * size} tokens" or more.'
        )
    check_memory(plan)
    if not plan.device.simulated:
        check_weights(plan.config.model)
        if plan.config.trial.measure_machine is not None:
            check_measurable(plan)
    if plan.device.divided:
        from pensieve.device.sharding import refuse_unsharded  # brings torch

        refuse_unsharded(plan.model, plan.device.count)
    return build_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated))


def check_measurable(plan: TrialPlan) -> None:
    """Raises ConfigError for a machine of which there can be no profile."""
    config = plan.config
    several = plan.device.divided or config.hardware.router != "single"
    if plan.device.simulated or config.baseline.engine is not None or several or not plan.cpu_blocks:
        raise ConfigError(
            f"A profile is of one real device, our engine, and copies between two tiers. Here are "
            f"hardware={config.hardware.name} hardware.gpus={plan.device.count} "
            f"hardware.router={config.hardware.router} baseline={config.baseline.name} "
            f"cache.cpu={config.cache.cpu}; use hardware=local baseline=pensieve, one device and a cache.cpu."
        )


def check_memory(plan: TrialPlan, free_bytes: int | None = None) -> None:
    """Weights, KV and activations against what the machine has, or against `free_bytes` of its device.

    Raises HardwareMissing with one sentence: what it needs, what is there, what to use instead.
    """
    device, model = plan.device, plan.model
    # What is free decides how large a measured tier becomes; it must only be worth starting.
    kv_bytes = LEAST_GPU_BLOCKS * plan.block_bytes if plan.gpu_measured and free_bytes is not None else plan.gpu_bytes
    cpu_bytes = plan.cpu_bytes * device.shared
    need = model.weight_bytes + kv_bytes + cpu_bytes + plan.activation_bytes
    there, verb = device.gpu_bytes, "are there"
    if free_bytes is not None:
        there, verb = free_bytes, "are free"
    elif device.kind == "cuda":
        there = int(there * GPU_USABLE)
    if need > there:
        raise HardwareMissing(
            f"model={model.name} with cache={plan.config.cache.name} needs {format_bytes(need)} on {device.label} (weights "
            f"{format_bytes(model.weight_bytes)} in {model.dtype}, KV {format_bytes(kv_bytes)}, the CPU tier "
            f"{format_bytes(cpu_bytes)}, activations {format_bytes(plan.activation_bytes)}) and {format_bytes(there)} "
            f"{verb}; use a smaller cache or model, more devices (hardware.gpus), or a simulated machine, such as "
            "hardware=sim_h200."
        )
    if not device.shared and plan.cpu_bytes > device.cpu_bytes:
        raise HardwareMissing(
            f"cache.cpu={plan.config.cache.cpu!r} needs {format_bytes(plan.cpu_bytes)} of host memory and "
            f"{format_bytes(device.cpu_bytes)} are there; use a smaller cache.cpu."
        )


def check_free_memory(plan: TrialPlan) -> None:
    """Check the memory that is free, once the trial holds the device. Raises HardwareMissing."""
    if not plan.device.simulated:
        check_memory(plan, free_device_bytes(plan.device))


def stateless_capacity(cost: SimulatedCost, lengths: Lengths, kv_tokens: int, requests: int, positions: int) -> float:
    """Requests a second that stateless serving finishes when it never lacks work. kv_tokens: of the pool that requests may
    fill; requests, positions: of one iteration, at most.

    Mean values of its steady state: as many requests run as the KV pool holds (or an iteration takes); each iteration
    decodes a token for all of them and prefills the prompts of as many as finish. Queueing, suspension, the spread of lengths
    and prompts that come whole rather than in even shares are left out: saturation lies near it, on either side (a simulated
    A100: OPT-13B at 1.07 times, Llama 2-13B with 10 KV heads beyond 1.3 times). It is a unit of load, not a result.
    """
    assert lengths, "no request to take the mean of"
    prompts = sum(prompt for prompt, _ in lengths)
    replies = sum(reply for _, reply in lengths)
    # A request holds its prompt and the reply so far, for as many iterations as its reply has tokens.
    held = sum(reply * (prompt + reply / 2) for prompt, reply in lengths) / replies
    prefilled = prompts / replies  # positions, for each one that is decoded
    running = min(requests, kv_tokens / held, positions / (1 + prefilled))
    decodes = max(1, round(running))
    chunk = round(decodes * prefilled)
    middle = sum(prompt * prompt for prompt, _ in lengths) / prompts / 2  # the mean position of a prompt's tokens
    start = max(0, round(middle - chunk / 2))
    rows = [(round(held), round(held) + 1)] * decodes + ([(start, start + chunk)] if chunk else [])
    return decodes * len(lengths) / replies / cost.iteration_s(rows, decodes)
