"""The fields of the configuration and their types; resolve it, check it, and bind the fields of a `_target_` as arguments of
the class or function that it names, checked against its signature.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_type_hints

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import TypedDict

from pensieve.errors import ConfigError, EngineMissing, PensieveError
from pensieve.lab.compose.conf import ended, meant
from pensieve.lab.compose.model_files import ModelConfig, completed
from pensieve.lab.workload.cache_state import CacheState
from pensieve.plugins.overlap import AskedCopyAhead

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0)]
Above = Annotated[float, Field(gt=0.0)]

AttentionChoice = Literal["auto", "reference", "native", "triton"]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
    scheduler.copy_ahead."""

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


class BaselineConfig(_Group):
    """cache: the cache manager of a baseline in the engine; below: a tier under its CPU tier. engine: an outside engine, in
    its place; simulated: what stands for that on a simulated machine."""

    name: str
    cache: dict[str, Any] | None = None
    below: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None
    simulated: dict[str, Any] | None = None
    cpu_tier: bool = False
    kv_budget: Literal["device", "total"] = "device"


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


class HardwareConfig(_Group):
    """A machine, real or simulated.

    gpus: devices that a model is divided among; on a CPU, processes. profile: a file of runners/profile.py: what retention
    value goes by on a real machine, and all times of a simulated one. Rates and times of a simulated one: see
    specs.HardwareSpec.
    """

    name: str
    simulated: bool
    source: str = ""
    gpus: Count = 1
    gpu_memory: str | None = None
    cpu_memory: str | None = None
    profile: str | None = None

    # How a real model runs. depth: plans in flight, of a simulated machine too. graphs: YAML reads a bare off as false.
    # memory_share: what cache.gpu=auto may fill, by default nine tenths of a GPU and half of a CPU machine's free memory.
    device: Annotated[str, Field(pattern=r"^(auto|cpu|sim|cuda(:\d+)?)$")] = "auto"
    threads: Count | None = None
    depth: Literal["auto", 1, 2] = "auto"
    graphs: Literal["auto", "off", False] = "auto"
    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None

    # What an iteration takes on a simulated device.
    flops: Rate = 0.0
    memory_bw: Rate = 0.0
    multiprocessors: Annotated[int, Field(ge=0)] = 0
    graph_sizes: bool = False
    terms: HardwareTerms = HardwareTerms()
    compute_efficiency: Share = 1.0
    memory_efficiency: Share = 1.0
    step_overhead_s: Rate = 0.0

    # What moving takes on a simulated machine. network_gbps: between the client and the model of a disaggregated baseline,
    # in 10^9 bit/s.
    h2d_bw: Rate = 0.0
    d2h_bw: Rate = 0.0
    disk_bw: Rate = 0.0
    link_bw: Rate = 0.0
    link_latency_s: Rate = 0.0
    network_gbps: Above | None = None
    network_latency_s: Rate = 0.0
    duplex_penalty: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    fragment_s: Rate = 0.0
    pipelined_swap_in: bool = True

    # Replicas behind a router: simulated ones by plugins.cluster, real ones by plugins.replicas.
    replicas: Count = 1
    router: Literal["single", "affinity", "least_loaded", "prefix_aware", "random"] = "single"

    @model_validator(mode="after")
    def _fields_belong_together(self) -> HardwareConfig:
        if self.router == "single" and self.replicas > 1:
            raise ValueError("hardware.replicas need a router: set hardware.router=affinity, say")
        if not self.simulated and not self.pipelined_swap_in:
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
    measure_machine: str | None = None


class SloConfig(_Group):
    ttft_ms: Above | None = None
    tpot_ms: Above | None = None


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
Node = TypeVar("Node", bound=BaseModel)


def filled(kind: type[T], node: BaseModel, **given: Any) -> T:
    """A dataclass with the fields of the node that have the same names, beside those given."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    same = {name: value for name, value in node.model_dump().items() if name in names}
    return kind(**{**same, **given})


OmegaConf.register_new_resolver("product", lambda *factors: math.prod(map(int, factors)), replace=True)
"""For overlays: ${product:4,${hardware.replicas}}."""


def _setting_of_run(name: str, otherwise: Any, *, _root_: DictConfig) -> Any:
    """For overlays: ${vllm_run:max_num_seqs,256}, a setting of the run that the workload replays."""
    from pensieve.lab.workload.vllm_run import setting  # which takes a while to import, and few ask

    value = setting(name, _root_.workload.get("run"), _root_.workload.get("path"))
    return otherwise if value is None else f"{value} tokens" if name == "num_kv_tokens" else value


OmegaConf.register_new_resolver("vllm_run", _setting_of_run, replace=True)


def resolved(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as plain values, every interpolation resolved, without Hydra's own node, and with what only a model's
    own files say. Raises ConfigError, and what model_files.completed and vllm_run.setting raise."""
    plain = cfg
    if isinstance(cfg, DictConfig):
        try:
            unset = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("hydra."))
            plain = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            said: BaseException | None = error
            while isinstance(said, OmegaConfBaseException):
                said = said.__context__
            if isinstance(said, PensieveError):  # of a resolver
                raise said from None
            raise ConfigError(f"The configuration cannot be resolved: {str(error).splitlines()[0]}.") from error
        if unset:
            raise ConfigError(f"{unset[0]} has no value; set it, or choose an option of its group other than base.")
    kept = {str(key): value for key, value in plain.items() if key not in ("hydra", "experiment")}
    if isinstance(kept.get("model"), Mapping):
        kept["model"] = completed(kept["model"])
    return kept


def check(cfg: DictConfig | Mapping[str, Any]) -> TrialConfig:
    """The configuration as typed fields. Raises ConfigError with one sentence about the first thing that is wrong."""
    return _validated(TrialConfig, resolved(cfg))


def check_node(model: type[Node], config: Mapping[str, Any], name: str) -> Node:
    """The node of a command, such as `serve`, as typed fields. Raises ConfigError, as check does."""
    return _validated(model, config[name], name)


def _validated(model: type[Node], plain: Mapping[str, Any], *group: str) -> Node:
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(explain_invalid(error, plain, *group)) from None


def explain_invalid(error: ValidationError, given: Mapping[str, Any], *group: str) -> str:
    """One sentence about the first thing that is wrong, an unknown field before all others. given: what was validated;
    group: where it is in the configuration."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    path, value = list(group), given
    for part in first["loc"]:
        if not isinstance(value, Mapping):
            break  # what follows is a place in a list, or a member of a union
        path.append(str(part))
        value = value.get(str(part))  # type: ignore[assignment]
    field, said = ".".join(path), first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "extra_forbidden":
        return ended(f"The field {field} is unknown{meant(field)}")
    if first["type"] == "missing":
        return f"The field {field} has no value; set it."
    if isinstance(value, Mapping):  # what is wrong is said of fields together, and names them
        return f"{field}: {said}."
    return f"{field}={value!r} cannot be used: {said}."


_NOT_ARGUMENTS = {"_target_", "_partial_", "_convert_", "_recursive_", "name", "inspect"}


def locate(dotted: str, option: str) -> Any:
    """The object behind a dotted path. Raises EngineMissing where no such module or attribute exists."""
    module_name, _, attribute = dotted.rpartition(".")
    if not module_name:
        raise ConfigError(f"{option} names {dotted!r}; write a dotted path such as my_module.MyClass.")
    missing = dotted
    try:
        module = importlib.import_module(module_name)
        if hasattr(module, attribute):
            return getattr(module, attribute)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            missing = error.name  # which the module imports
    if missing.startswith("pensieve."):
        why = "this version does not have it: CHANGELOG.md says what moved where"
    else:
        why = "it cannot be found from the current folder" if missing == dotted else "it is not installed"
    raise EngineMissing(f"{option} needs {missing}, and {why}; choose another option.")


def factory(group: str, node: Mapping[str, Any], given: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The target with the fields of `node` bound; `given` names the keyword arguments that the caller passes itself.

    Raises EngineMissing where the target is not there, ConfigError for a field that it does not take or whose type it
    refuses, each naming the field.
    """
    option = f"{group}={node.get('name', '?')}"
    if "_target_" not in node:
        raise ConfigError(f"{option} has no _target_; give the dotted path of its class.")
    target = locate(str(node["_target_"]), option)
    fields = {key: _instantiated(value) for key, value in node.items() if key not in _NOT_ARGUMENTS}
    return functools.partial(target, **_bind(group, target, fields, given))


def _bind(group: str, target: Any, fields: Mapping[str, Any], given: tuple[str, ...]) -> dict[str, Any]:
    """The fields, checked against the signature and converted to its types: a float from an int, a tuple from a list.

    Pydantic's validate_call would do so at the call only, which is too late for a preflight. A positional parameter without
    a default (a context, a policy) is the caller's to pass.
    """
    parameters = inspect.signature(target).parameters
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # names imported for type checking only: the field names are checked all the same
    accepted: dict[str, Any] = {}
    for name, p in parameters.items():
        optional = p.default is not p.empty
        if name not in given and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and optional)):
            hint = _checkable(hints.get(name, Any))
            accepted[name] = NotRequired[hint] if optional else hint
    arguments = TypedDict("arguments", accepted)  # type: ignore[misc]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments.__pydantic_config__ = ConfigDict(extra="allow" if open_ended else "forbid")  # type: ignore[attr-defined]
    try:
        return dict(TypeAdapter(arguments).validate_python(fields))
    except ValidationError as error:
        raise ConfigError(explain_invalid(error, fields, group)) from error


def _instantiated(value: Any) -> Any:
    """A field that describes an object. Only such go through Hydra, which would turn a tuple into a list."""
    return instantiate(value, _convert_="all") if isinstance(value, dict) and "_target_" in value else value


def _checkable(hint: Any) -> Any:
    """Any where pydantic cannot check the type, such as a class of the user's."""
    try:
        TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return Any
    return hint
