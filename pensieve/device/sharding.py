"""A model over several processes: each has a part of every projection and of the KV heads, as transformers' plan for it says.

The all-reduces and gathers of a forward are those of transformers' plan. Here are the group that they run in, what a
process has of the model, and the one thing that is decided by one process for all: which tokens were drawn.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from pensieve.errors import HardwareMissing, UnsupportedModel
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries the collectives between the devices of a kind."""

_PATIENCE = timedelta(hours=2)  # one process may wait so long for another that still loads its weights
_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections that attention's keys come from, by the names in use
_SHARDED = "colwise"  # a process computes its own heads and keeps them; other styles give every process all of them


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group as one of its processes sees it. number: of this process, from 0. A process joins one group in its life."""

    number: int
    count: int
    backend: str

    @classmethod
    def join(cls, number: int, count: int, device: torch.device, store: Path) -> RankGroup:
        """Returns when all have joined. store: a file that all of them see, not there before."""
        os.environ.update(RANK=str(number), LOCAL_RANK=str(device.index or 0), WORLD_SIZE=str(count))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = BACKENDS[device.type]
        dist.init_process_group(
            backend, init_method=store.as_uri(), rank=number, world_size=count, timeout=_PATIENCE,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        return cls(number, count, backend)

    @property
    def first(self) -> bool:
        return self.number == 0

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of rank 0 [rows], in place of what the others have there."""
        dist.broadcast(tokens, 0)
        return tokens

    def check(self, spec: ModelSpec) -> None:
        refuse_unsharded(spec, self.count)

    def part_of(self, spec: ModelSpec) -> ModelSpec:
        """The model as this process attends: with its own heads."""
        assert spec.kv_heads % self.count == 0, "refused before"
        return replace(spec, heads=spec.heads // self.count, kv_heads=spec.kv_heads // self.count)

    def options(self) -> dict[str, Any]:
        """For from_pretrained: shard by the model's own plan. transformers has two ways to say it, by its version."""
        try:
            from transformers.distributed import DistributedConfig

            if "tp_plan" in inspect.signature(DistributedConfig).parameters:
                return {"distributed_config": DistributedConfig(tp_size=self.count, tp_plan="auto")}
        except ImportError:
            pass
        return {"tp_plan": "auto"}

    def sharded(self, spec: ModelSpec, draw: Callable[[], Any]) -> Any:
        """A module of random weights, this process's part of it. draw: makes the whole one, in this machine's memory.

        Each process draws all and keeps its part, so that the weights are those of one process alone. Raises HardwareMissing.
        """
        whole, there = self.count * spec.weight_bytes, psutil.virtual_memory().total
        if whole > there:
            raise HardwareMissing(
                f"model.weights=random with hardware.gpus={self.count}: each process first draws all "
                f"{format_bytes(spec.weight_bytes)} of model {spec.name}, and this machine has {format_bytes(there)} of "
                "memory. Use a folder of weights, or a smaller model."
            )
        module = draw()
        return type(module).from_pretrained(
            None, config=module.config, state_dict=module.state_dict(), dtype=module.dtype, attn_implementation="eager",
            **self.options(),
        )  # fmt: skip


def refuse_unsharded(spec: ModelSpec, count: int) -> None:
    """Raises UnsupportedModel where transformers has no plan for the architecture, or one that leaves every process all
    KV heads."""
    plan = _plan(spec.model_type)
    advice = "use hardware.gpus=1, or a model with such a plan (llama, mistral, qwen2, qwen3, gemma2)."
    if not plan:
        raise UnsupportedModel(
            f"hardware.gpus={count}: transformers has no tensor-parallel plan for {spec.model_type}, the architecture of "
            f"model {spec.name}; {advice}"
        )
    if not any(name.rpartition(".")[2] in _KEYS and style == _SHARDED for name, style in plan.items()):
        raise UnsupportedModel(
            f"hardware.gpus={count}: transformers' tensor-parallel plan for {spec.model_type}, the architecture of model "
            f"{spec.name}, gives every process all KV heads, so that no KV would be divided; {advice}"
        )


def _plan(model_type: str) -> Mapping[str, str]:
    from transformers import CONFIG_MAPPING

    known = model_type in CONFIG_MAPPING
    return dict(getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None) or {}) if known else {}
