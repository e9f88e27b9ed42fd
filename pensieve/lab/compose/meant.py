"""What typed overrides mean before Hydra composes them: `workload.path` alone, and options by their former names."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pensieve.lab.compose.folder import options

_NOISY = "eviction=noisy_hint_"
_RECORDED = "workload=trace"
_SIMULATED = ("model=llama3_8b", "cache=small", "hardware=sim_a100_80g")
"""Where recorded conversations are replayed unless something is chosen: recorded pauses take no real time there."""

_ABLATION = ("experiment=paper/ablation_eviction", "eviction=retention_value")
FORMER_COMMANDS = {
    "sim_eviction": ("experiment=paper/ablation_eviction", "baseline=pensieve,stateless"),
    "ablation_chunk": (*_ABLATION, "hardware=local", "cache.chunk_tokens=8,32,128"),
    "ablation_cpu_size": (*_ABLATION, "cache.cpu=0 tokens,768 tokens,1536 tokens,6144 tokens"),
    "ablation_gpu_cache": (*_ABLATION, "hardware=local", "baseline=pensieve,gpu_only,stateless"),
    "ablation_scheduler": (*_ABLATION, "hardware=local", "scheduler=unified,split"),
    "ablation_swap_out": (
        *(*_ABLATION, "hardware=local", "scheduler.copy_ahead=paper", "scheduler.swap_out_stop=0.5"),
        "scheduler.swap_out_start=0.0,0.15,0.25,0.45",
    ),
    "sim_llama3_8b": ("model=llama3_8b", "cache=tiny,small", "hardware=sim_a100_80g"),
    "batch_size_confound": (
        *("experiment=peers/prefix_invalidation_batch", "baseline=llama_cpp", "model=llama_25m", "hardware=cpu"),
        *("cache.gpu=4096 tokens", "scheduler.max_batch_requests=4"),
    ),
    "hotness_interval": ("experiment=users/hotness", "workload.request_interval=0.1,0.3,0.5,1.0"),
    "hotness_users": ("experiment=users/hotness", "workload.users=1,6,9"),
    "failures": ("experiment=cluster/scale", "hardware.failure_s=60"),
    "routing": ("experiment=cluster/replica_routing", "hardware.replicas=10"),
    "llm_decode": ("experiment=machine/disaggregated_decode",),
}
"""Experiments that were removed, and what asks the same now."""


def as_meant(arguments: Sequence[str], config_name: str = "config") -> tuple[list[str], list[str]]:
    """The command line with what it implies, and a line for people on each change. config_name: as of `guarded`."""
    meant: list[str] = []
    notes: list[str] = []
    for text in arguments:
        found = _moved(text)
        meant += found or [text]
        if found is not None:
            notes.append(f"{text} is now {shlex.join(found)}.")
    added: list[str] = []
    if _has(arguments, "workload.path=") and not _has(arguments, "workload=", "experiment=", "replay="):
        added.append(_RECORDED)
        if config_name == "config" and not _has(arguments, "model", "cache", "hardware"):
            added.extend(_SIMULATED)
    if added:
        notes.append(f"workload.path names recorded conversations; replayed with {' '.join(added)}.")
        path = next(place for place, text in enumerate(meant) if _has([text], "workload.path="))
        meant[path:path] = (
            added  # beside it: argparse wants all overrides in one piece, and `--cfg job` may end the line
        )
    return meant, notes


def _moved(text: str) -> list[str] | None:
    """experiment=NAME by a former name: without its folder (hotness), with the folder as a prefix (paper_eviction), or with
    _small; eviction=noisy_hint_N. None: it is no former name."""
    if text.startswith(_NOISY) and (wrong := text.removeprefix(_NOISY)).isdigit():
        return ["eviction=noisy_hint", f"eviction.error_pct={wrong}"]
    if not text.startswith("experiment="):
        return None
    known = options("experiment")
    name = text.partition("=")[2]
    if name in known:
        return None
    small = name.endswith("_small")
    name = name.removesuffix("_small")
    if (now := FORMER_COMMANDS.get(name.rpartition("/")[2])) is not None:
        return [*now, *(["scale=small"] if small else [])]
    for option in known:
        folder, _, own = option.rpartition("/")
        if name in (option, own, f"{folder}_{own}", f"{folder.removesuffix('s')}_{own}"):
            return [f"experiment={option}", *(["scale=small"] if small else [])]
    return None


def _has(arguments: Sequence[str], *beginnings: str) -> bool:
    return any(text.lstrip("+").startswith(beginnings) for text in arguments)
