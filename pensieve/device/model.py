"""A model in memory, checked: transformers' module, the forward that serves over its weights, and what it attends with."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import psutil
import torch

from pensieve.core.request import Sampling
from pensieve.device.asked import ModelAsked, physical_cores
from pensieve.device.attention import REFERENCE, Forward, register
from pensieve.device.choice import choose
from pensieve.device.kernels.backends import candidates, load_backend
from pensieve.device.kernels.base import AttentionBackend
from pensieve.device.self_check import SelfCheck
from pensieve.device.weights import Ranks, load_module, quiet_transformers
from pensieve.errors import ConfigError, HardwareMissing
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, checked. spec: as it runs, so size caches by this one. ranks: the processes that have it together,
    None where this one has all of it; spec then has the heads of this process.

    weights: "random", "hub" or the folder. revision: the commit that was loaded, where the hub gave one. module: the
    transformers model, the reference in tests; forward: what serves, over the same weights; forward_note: why it is not
    the fused one, "" where it is. attention: the backend it attends with, over which it was checked; attention_asked: the
    one that was asked for; attention_note: why no better one, where auto chose. fell_back: see Choice. reused: an earlier
    trial of this process has loaded it, in load_s.
    """

    module: Any
    forward: Forward
    forward_note: str
    spec: ModelSpec
    config: Any
    device: torch.device
    dtype: torch.dtype
    load_s: float
    weights: str
    revision: str | None
    threads: int
    self_check: SelfCheck
    attention: AttentionBackend = REFERENCE
    attention_asked: str = "auto"
    attention_note: str = ""
    fell_back: bool = False
    reused: bool = False
    ranks: Ranks | None = None

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


def load_model(asked: ModelAsked, ranks: Ranks | None = None) -> LoadedModel:
    """Load through transformers (safetensors only, never remote code) and check against eager attention.

    ranks: load this process's part, by transformers' plan for the model and in transformers' modules; all of them load at
    once, and all compute in every forward.
    Raises WeightsMissing, HardwareMissing, UnsupportedModel, EngineMissing for a backend that cannot run here.
    """
    spec, where = asked.spec, resolve_device(asked.device)
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
    return LoadedModel(
        module=module,
        forward=chosen.forward,
        forward_note=chosen.forward_note if ranks is None else "sharded by transformers' plan for the architecture",
        spec=part.spec,
        config=module.config,
        device=where,
        dtype=dtype,
        load_s=perf_counter() - started,
        weights=asked.weights,
        revision=getattr(module.config, "_commit_hash", None),
        threads=threads,
        self_check=chosen.check,
        attention=chosen.attention,
        attention_asked=asked.attention,
        attention_note=chosen.attention_note,
        fell_back=chosen.fell_back,
        ranks=ranks,
    )


def resolve_device(device: str) -> torch.device:
    """auto is the first GPU if there is one. Raises HardwareMissing for a GPU that is not there."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise HardwareMissing(
                f"hardware.device={device}, but this machine has no usable GPU; use hardware=cpu, or a simulated one such "
                "as hardware=sim_a100_80g."
            )
        index = torch.device(device).index or 0
        if index >= torch.cuda.device_count():
            raise HardwareMissing(f"hardware.device={device}, but this machine has {torch.cuda.device_count()} GPU(s).")
        return torch.device("cuda", index)
    if device != "cpu":
        raise HardwareMissing(f"hardware.device={device} is not supported; use auto, cpu, cuda or cuda:N.")
    return torch.device("cpu")


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
