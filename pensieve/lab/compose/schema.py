"""The fields of the configuration and their types. Fields of a `_target_` are checked against its signature (target.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from pensieve.lab.workload.cache_state import CacheState
from pensieve.plugins.overlap import AskedCopyAhead

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0)]

AttentionChoice = Literal[
    "auto", "reference", "native", "triton", "triton_pointers"
]  # fmt: skip


class _Group(BaseModel):
    """parts: fields of which each holds a group whose fields people write side by side with the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    parts: ClassVar[tuple[str, ...]] = ()


def own_fields(group: Any) -> dict[str, FieldInfo]:
    """The fields that people write in a group, those of its parts among them."""
    found: dict[str, FieldInfo] = dict(group.model_fields)
    for name in getattr(group, "parts", ()):
        found |= own_fields(found.pop(name).annotation)
    return found


class ModelConfig(_Group):
    """weights: hub, random, gguf, or a folder written by save_pretrained. gguf_file: its path, or package:file for one that
    an installed package brings. tokenizer: bytes, hub (the model's own), a folder, or another hub id."""

    name: str
    hub_id: str | None = None
    weights: str = "hub"
    revision: str | None = None
    gguf_file: str | None = None
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tokenizer: str = "hub"
    architecture: dict[str, Any] = Field(default_factory=dict)


class CacheConfig(_Group):
    """gpu, cpu: sizes a device, "4GiB", "8192 tokens", or 4 for 4 GB; gpu may be auto: what fits. disk: of the machine; 0:
    no disk tier. windows: whole, or slide: what has left the window of a layer is not kept (simulated machines).
    session_ttl_s, max_remembered_tokens: see MemoryLimits."""

    name: str
    gpu: str | int | float
    cpu: str | int | float
    disk: str | int | float = 0
    chunk_tokens: Count = 32
    windows: Literal["whole", "slide"] = "whole"
    session_ttl_s: Rate | None = None
    max_remembered_tokens: Count | None = None


class SchedulerConfig(_Group):
    """composition: the function that makes a batch, by its `_target_`. The shares are of the GPU blocks. copy_ahead: see
    scheduler.copy_ahead. cost_error, cost_error_context: see cost.mistaken."""

    name: str
    composition: dict[str, Any]
    max_batch_tokens: Count
    max_batch_requests: Count
    swap_out_start: Share
    swap_out_stop: Share
    admission_reserve: Share
    copy_ahead: AskedCopyAhead
    load_apart: bool
    admit_beyond_budget: bool = True
    cost_error: Annotated[float, Field(gt=0.0)] = 1.0
    cost_error_context: Rate = 1.0


class BaselineConfig(_Group):
    """cache: the cache manager of a baseline in the engine; below: a tier under its CPU tier. engine: an outside engine, in
    its place; simulated: what stands for that on a simulated machine. missing: one that is not supported yet."""

    name: str
    cache: dict[str, Any] | None = None
    below: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None
    simulated: dict[str, Any] | None = None
    cpu_tier: bool = False
    kv_budget: Literal["device", "total"] = "device"
    missing: str | None = None


class HardwareTerms(_Group):
    """Where a simulated machine's times come from. projections: tables of a card, or roofline (for everything). attention:
    tables of a card, or fitted (a roofline whose efficiencies were fitted to measured cards). all_reduce: tables, or link."""

    projections: Literal["roofline", "rtx4090", "rtxpro6000", "a100", "h100"] = "roofline"
    attention: Literal["roofline", "fitted", "rtx4090", "rtxpro6000"] = "roofline"
    all_reduce: Literal["link", "a100", "h100"] = "link"

    @model_validator(mode="after")
    def _one_roofline(self) -> HardwareTerms:
        if (self.projections == "roofline") != (self.attention == "roofline"):
            raise ValueError("terms.projections and terms.attention are roofline both, or neither")
        return self


class TorchDevice(_Group):
    """How a real model runs. depth: plans in flight, of a simulated machine too; auto: see plan.plans_in_flight. graphs:
    replay decode iterations (YAML reads a bare off as false). memory_share: what cache.gpu=auto may fill, by default nine
    tenths of a GPU and half of a CPU machine's free memory."""

    device: str = "auto"
    threads: Count | None = None
    depth: Literal["auto", 1, 2] = "auto"
    graphs: Literal["auto", "off", False] = "auto"
    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


class SimulatedCompute(_Group):
    """What an iteration takes on a simulated device: see specs.HardwareSpec."""

    flops: Rate = 0.0
    memory_bw: Rate = 0.0
    multiprocessors: Annotated[int, Field(ge=0)] = 0
    graph_sizes: bool = False
    terms: HardwareTerms = HardwareTerms()
    compute_efficiency: Share = 1.0
    memory_efficiency: Share = 1.0
    step_overhead_s: Rate = 0.0


class SimulatedLinks(_Group):
    """What moving takes on a simulated machine: see specs.HardwareSpec. network_gbps: between the client and the model of a
    disaggregated baseline, or of each simulated replica, in 10^9 bit/s."""

    h2d_bw: Rate = 0.0
    d2h_bw: Rate = 0.0
    disk_bw: Rate = 0.0
    link_bw: Rate = 0.0
    link_latency_s: Rate = 0.0
    network_gbps: Annotated[float, Field(gt=0.0)] | None = None
    network_latency_s: Rate = 0.0
    duplex_penalty: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    fragment_s: Rate = 0.0
    pipelined_swap_in: bool = True


class Cluster(_Group):
    """Replicas behind a router: simulated ones by plugins.cluster, real ones by plugins.replicas. failure_s, restart_s and
    migration are of simulated ones."""

    replicas: Count = 1
    router: Literal["single", "affinity", "affinity_bounded", "least_loaded", "prefix_aware", "random"] = "single"
    failure_s: Annotated[float, Field(gt=0.0)] | None = None
    restart_s: Rate = 30.0
    migration: Literal["never", "cheaper", "always"] = "never"


class HardwareConfig(_Group):
    """A machine, in parts by what is built of them. People write the fields of all parts side by side (hardware.threads,
    hardware.flops), and so they are read and dumped.

    gpus: devices that a model is divided among; on a CPU, processes. profile: a file of runners/profile.py: what retention
    value goes by on a real machine, and all times of a simulated one.
    """

    parts: ClassVar[tuple[str, ...]] = ("torch", "compute", "links", "cluster")

    name: str
    simulated: bool
    source: str = ""
    gpus: Count = 1
    gpu_memory: str | None = None
    cpu_memory: str | None = None
    profile: str | None = None
    torch: TorchDevice = TorchDevice()
    compute: SimulatedCompute = SimulatedCompute()
    links: SimulatedLinks = SimulatedLinks()
    cluster: Cluster = Cluster()

    @model_validator(mode="before")
    @classmethod
    def _in_parts(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kinds = {name: cls.model_fields[name].annotation for name in cls.parts}
        made = {name: {key: given[key] for key in given if key in own_fields(kind)} for name, kind in kinds.items()}
        of_parts = {key for part in made.values() for key in part}
        rest = {key: value for key, value in given.items() if key not in of_parts}
        if named := sorted(rest.keys() & made.keys()):
            raise ValueError(f"hardware.{named[0]} is unknown: its fields are fields of hardware")
        return {**rest, **made}

    @model_serializer(mode="wrap")
    def _side_by_side(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        for name in self.parts:
            found |= found.pop(name)
        return found

    @model_validator(mode="after")
    def _replicas_are_routed(self) -> HardwareConfig:
        if self.cluster.router == "single" and (self.cluster.replicas > 1 or self.cluster.failure_s is not None):
            raise ValueError(
                "hardware.replicas and hardware.failure_s need a router: set hardware.router=affinity, say"
            )
        if self.cluster.failure_s is not None and not self.simulated:
            raise ValueError("hardware.failure_s is for simulated machines; use hardware=sim_h100, say")
        return self

    @model_validator(mode="after")
    def _kv_moves_between_replicas(self) -> HardwareConfig:
        if self.cluster.migration == "never":
            return self
        if self.cluster.router == "single" or not self.simulated:
            raise ValueError(
                "hardware.migration is between simulated replicas: use hardware=sim_h100 hardware.router=affinity, say"
            )
        if self.links.network_gbps is None:
            raise ValueError("hardware.migration needs a network between the replicas: set hardware.network_gbps")
        return self

    @model_validator(mode="after")
    def _real_copies_are_as_they_are(self) -> HardwareConfig:
        if not self.simulated and not self.links.pipelined_swap_in:
            raise ValueError("hardware.pipelined_swap_in=false is for simulated machines; use hardware=sim_h100, say")
        return self


class TrackingConfig(_Group):
    """The names of environment variables, never URLs: the configuration is saved."""

    name: str
    url_env: str | None = None
    mlflow: bool = True


class TrialOptions(_Group):
    exclusive: bool = True
    isolate: Literal["auto"] | bool = "auto"
    retries: Annotated[int, Field(ge=0)] = 0
    timeout_s: Rate | None = None
    fail_fast: bool = False
    measure_machine: str | None = None


class SloConfig(_Group):
    ttft_ms: Annotated[float, Field(gt=0.0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0.0)] | None = None


class TrialConfig(_Group):
    """One trial. eviction and workload carry a `_target_` of their own. cache_state: see workload.cache_state."""

    experiment_name: str = Field(default="pensieve", min_length=1)
    seed: int = 0
    repeat: Annotated[int, Field(ge=0)] = 0
    force: bool = False
    resume: Literal["fingerprint", "config"] = "fingerprint"
    attention_backend: AttentionChoice = "auto"
    cache_state: CacheState = "cold"
    trial: TrialOptions = TrialOptions()
    slo: SloConfig = SloConfig()
    model: ModelConfig
    cache: CacheConfig
    eviction: dict[str, Any]
    scheduler: SchedulerConfig
    baseline: BaselineConfig
    workload: dict[str, Any]
    hardware: HardwareConfig
    tracking: TrackingConfig


T = TypeVar("T")


def filled(kind: type[T], node: BaseModel, **given: Any) -> T:
    """A dataclass with the fields of the node that have the same names, beside those given."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    same = {name: value for name, value in node.model_dump().items() if name in names}
    return kind(**{**same, **given})
