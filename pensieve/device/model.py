"""A model in memory, checked: transformers' module, the forward that serves over its weights, and what it attends with: the
first of each that passes the self-check."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any, TypeVar

import psutil
import torch

from pensieve.core.request import Sampling
from pensieve.device.asked import ON_CPU, ModelAsked, candidates, physical_cores, require
from pensieve.device.attention import Forward, TransformersForward, register
from pensieve.device.fused.decoder import build_fused
from pensieve.device.fused.packed import packable, packed_products
from pensieve.device.kernels.base import AttentionBackend
from pensieve.device.kernels.native import NativeBackend
from pensieve.device.kernels.reference import ReferenceBackend
from pensieve.device.self_check import SelfCheck, check_against_eager
from pensieve.device.sharding import RankGroup
from pensieve.device.weights import load_module, quiet_transformers
from pensieve.errors import ConfigError, EngineMissing, HardwareMissing, UnsupportedModel
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes

_log = logging.getLogger(__name__)
_REFUSED = "the faster forward was refused"
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves a model: `forward`, over the transformers module's own weights; attention: the backend it attends with.

    forward_note: why not a faster one; attention_note: why not a better backend; "" where there is nothing to say.
    fell_back: a backend or a forward was refused by its self-check, or the reference serves in place of a kernel.
    """

    forward: Forward
    forward_note: str
    attention: AttentionBackend
    attention_note: str
    fell_back: bool
    self_check: SelfCheck


@dataclass(frozen=True, slots=True)
class LoadedModel(Choice):
    """A model in memory, checked. spec: as it runs, so size caches by this one. ranks: the processes that have it together,
    None where this one has all of it; spec then has the heads of this process.

    weights: "random", "hub" or the folder. revision: the commit that was loaded, where the hub gave one. module: the
    transformers model, the reference in tests. attention_asked: the backend that was asked for. reused: an earlier trial of
    this process has loaded it, in load_s.
    """

    module: Any
    spec: ModelSpec
    config: Any
    device: torch.device
    dtype: torch.dtype
    load_s: float
    weights: str
    revision: str | None
    threads: int
    attention_asked: str = "auto"
    reused: bool = False
    ranks: RankGroup | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn; empty where the model names none."""
        generation = getattr(self.module, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        if ids is None:
            return frozenset()
        return frozenset(ids) if isinstance(ids, list | tuple) else frozenset((int(ids),))

    @property
    def sampling(self) -> Sampling:
        """The temperature and top_p of the model's generation_config.json, where that samples; else greedy. Raises
        ConfigError for values that nothing can be drawn with."""
        generation = getattr(self.module, "generation_config", None)
        if not getattr(generation, "do_sample", None):
            return Sampling()
        said = {name: getattr(generation, name, None) for name in ("temperature", "top_p")}
        try:
            return Sampling(
                **{"temperature": 1.0, **{name: value for name, value in said.items() if value is not None}}
            )
        except ConfigError as error:
            raise ConfigError(f"The generation_config.json of {self.spec.name} cannot be used: {error}") from error

    def served(self) -> dict[str, Any]:
        """Which forward and attention serve, why no better ones, and how their self-check came out."""
        return {
            "forward": self.forward.name,
            "forward_note": self.forward_note,
            "attention_asked": self.attention_asked,
            "attention_backend": self.attention.name,
            "attention_version": self.attention.version,
            "attention_note": self.attention_note,
            "fell_back": self.fell_back,
            "self_check_difference": self.self_check.difference,
            "self_check_limit": self.self_check.limit,
            "self_check_against": self.self_check.against,
        }


def load_model(asked: ModelAsked, ranks: RankGroup | None = None) -> LoadedModel:
    """Load through transformers (safetensors only, never remote code) and check against eager attention.

    ranks: load this process's part, by transformers' plan for the model and in transformers' modules; all of them load at
    once, and all compute in every forward.
    Raises WeightsMissing, HardwareMissing, UnsupportedModel, EngineMissing for a backend that cannot run here.
    """
    spec, where = asked.spec, torch.device(asked.device)
    _check_memory(spec, where, 1 if ranks is None else ranks.count)
    if ranks is not None:
        ranks.check(spec)
    dtype = getattr(torch, spec.dtype)
    names = candidates(asked.attention, where.type)
    if asked.attention != "auto":  # said before minutes are spent on the weights
        load_backend(asked.attention, where, dtype, spec.head_dim, asked.chunk_tokens)
    threads = asked.threads or physical_cores()
    torch.set_num_threads(threads)
    register()  # imports transformers: seconds that belong to no model, so the clock starts after it
    started = perf_counter()
    with quiet_transformers():
        try:
            module = load_module(asked, where, ranks)
            part = asked if ranks is None else asked._replace(spec=ranks.part_of(spec), fused=False)
            chosen = choose(module, part, where, names)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise HardwareMissing(
                f"Model {spec.name} needs {format_bytes(spec.weight_bytes)} for its weights, more than {where} has left; "
                "choose a smaller model."
            ) from error
    if ranks is not None:
        chosen = replace(chosen, forward_note="sharded by transformers' plan for the architecture")
    return LoadedModel(
        **{field.name: getattr(chosen, field.name) for field in fields(chosen)},
        module=module,
        spec=part.spec,
        config=module.config,
        device=where,
        dtype=dtype,
        load_s=perf_counter() - started,
        weights=asked.weights,
        revision=getattr(module.config, "_commit_hash", None),
        threads=threads,
        attention_asked=asked.attention,
        ranks=ranks,
    )


def choose(module: Any, asked: ModelAsked, device: torch.device, backends: Sequence[str]) -> Choice:
    """Try the attention backends in order, and warn of a fall-back. Raises what the last one raises: EngineMissing,
    UnsupportedModel."""
    spec, dtype = asked.spec, getattr(torch, asked.spec.dtype)

    def attempt(name: str) -> tuple[AttentionBackend, Forward, str, SelfCheck]:
        backend = load_backend(name, device, dtype, spec.head_dim, asked.chunk_tokens)
        return backend, *_forward(module, asked, device, backend)

    (backend, forward, forward_note, check), name, notes, refused = _first(backends, attempt)
    fell_back = refused or forward_note.startswith(_REFUSED) or name == ReferenceBackend.name != backends[0]
    if fell_back:
        _log.warning(
            "%s is served by attention_backend=%s and the %s forward, since something better was refused or is missing. %s",
            spec.name, name, forward.name, f"{notes} {forward_note}".strip(),
        )  # fmt: skip
    return Choice(forward, forward_note, backend, notes, fell_back, check)


def attention_here(
    asked: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> tuple[str, str, bool]:
    """What serves a model that passes its self-check: the backend's name, why no better one, and whether the reference
    serves in place of a kernel. Raises EngineMissing where what was asked for cannot run, ConfigError for an unknown name.
    """
    names = candidates(asked, device.type)
    _, name, notes, _ = _first(names, lambda name: load_backend(name, device, dtype, head_dim, chunk_tokens))
    return name, notes, name == ReferenceBackend.name != names[0]


def _first(names: Sequence[str], attempt: Callable[[str], _Found]) -> tuple[_Found, str, str, bool]:
    """What is found under the first of these backends that is neither missing nor refused, its name, why not those before,
    and whether one was refused. Raises what the last one raises."""
    notes, refused = list[str](), False
    for name in names[:-1]:
        try:
            return attempt(name), name, " ".join(notes), refused
        except (EngineMissing, UnsupportedModel) as error:
            refused = refused or isinstance(error, UnsupportedModel)
            notes.append(f"Not {name}: {error}")
    return attempt(names[-1]), names[-1], " ".join(notes), refused


def _forward(
    module: Any, asked: ModelAsked, device: torch.device, backend: AttentionBackend
) -> tuple[Forward, str, SelfCheck]:
    """The forward that serves, why it is not the fused one, and its check. Raises UnsupportedModel if none passes."""
    # Those of a CPU take blocks of any size: small ones check more in less time.
    chunk = 4 if backend.name in ON_CPU else asked.chunk_tokens

    def check(forward: Forward) -> SelfCheck:
        return check_against_eager(module, forward, asked.spec, device, backend, chunk)

    plain = TransformersForward(module)
    if not asked.fused:
        return plain, "asked for", check(plain)
    pack, note = packable(module, asked.memory_bytes), ""
    built: Forward | str = build_fused(module, pack)
    if isinstance(built, str):
        note = f"no fused forward: {built}"
        built = TransformersForward(module, packed_products(module) if pack else ())
    try:
        return built, note, check(built)
    except UnsupportedModel as error:
        return plain, f"{_REFUSED}: {error}", check(plain)


def load_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_tokens: int
) -> AttentionBackend:
    """Raises EngineMissing, in one sentence, where it cannot run here."""
    require(name, device.type, chunk_tokens)
    if name == "reference":
        return ReferenceBackend()
    if name == "native":
        return NativeBackend(head_dim, dtype)
    from pensieve.device.kernels.triton_backend import TritonBackend

    return TritonBackend()


def _check_memory(spec: ModelSpec, device: torch.device, parts: int) -> None:
    """Before anything is allocated: a CPU machine grants more memory than it has, and kills the process later. parts: of the
    model, on as many devices where they are GPUs."""
    on_gpu = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] * parts if on_gpu else psutil.virtual_memory().total
    if spec.weight_bytes > total:
        raise HardwareMissing(
            f"Model {spec.name} needs {format_bytes(spec.weight_bytes)} for its weights in {spec.dtype}, and {device} has "
            f"{format_bytes(total)}; choose a smaller model, or a simulated machine such as hardware=sim_a100_80g."
        )
