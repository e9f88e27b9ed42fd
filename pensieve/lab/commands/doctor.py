"""Report what this machine has, which models fit on it, and which command to run next."""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pensieve.compiler import compiler_version, find_compiler
from pensieve.device.model import attention_here
from pensieve.errors import EngineMissing, PensieveError, typed
from pensieve.lab.compose.build import GPU_USABLE
from pensieve.lab.compose.conf import options, outputs_folder, read_option
from pensieve.lab.compose.model_files import ModelConfig, local_weights
from pensieve.lab.compose.plan import AUTO, Device, find_device, free_host_memory_bytes
from pensieve.lab.compose.settings import CacheConfig, HardwareConfig
from pensieve.lab.results.environment import cores, cpu_model
from pensieve.lab.results.store import open_store
from pensieve.lab.trial.sweep import installed
from pensieve.lab.trial.terminal import console
from pensieve.specs import ModelSpec
from pensieve.units import Table, format_bytes, grid, parse_capacity

EXTRAS = {
    "triton": "Triton kernels on a GPU",
    "vllm": "baseline=vllm",
    "xllamacpp": "baseline=llama_cpp",
    "ray": "baseline=ray_*",
    "psycopg": "tracking=postgres",
}
_HEAD_DIM = 64  # of the kernel that is tried; a model's own is compiled when it is loaded
CACHE = "small"
"""The option of conf/cache whose tiers a model has to have room for."""


def doctor(argv: Sequence[str] | None, description: str | None) -> int:
    """Print the report; 0 where trials can run, 1 where something has to be repaired first. Raises PensieveError."""
    argparse.ArgumentParser(description=description).parse_args(argv)
    device = find_device(HardwareConfig(name="local", simulated=False))
    database, database_sound = _database()
    models = _models(device)
    facts = [{"": name, "here": value} for name, value in _facts(device, database)]
    out = console()
    out.print(grid(facts, left=("here",), heads=False, fold=True))
    title = f"Models on {device.label} with cache={CACHE}"
    out.print(grid(models, title, left=("fits", "weights here")))
    lines = ["Weights that are not at hand come from the hub; model.weights=random needs none."]
    lines += [] if database_sound else [f"Mend this first: {database}"]
    for line in [*lines, "Next:", *(f"  {command}" for command in _next(device, models))]:
        out.print(line, soft_wrap=True, highlight=False)
    return 0 if database_sound else 1


def _dtype(device: Device) -> str:
    return "float32" if device.kind == "cpu" else "bfloat16"


def _facts(device: Device, database: str) -> Iterator[tuple[str, str]]:
    outputs = outputs_folder()
    yield "Python", f"{platform.python_version()} ({sys.executable}), torch {torch.__version__}"
    there = {name: "installed" if installed(name) else "not installed" for name in EXTRAS}
    yield "extras", ", ".join(f"{name} {there[name]} ({use})" for name, use in EXTRAS.items())
    on_gpu = f"{device.label}, {format_bytes(device.gpu_bytes)} (CUDA {torch.version.cuda})"
    yield "GPU", on_gpu if device.kind == "cuda" else "none that torch can use"
    yield "CPU", f"{cpu_model()}, {cores()} cores"
    yield "compiler", _compiler()
    yield "attention", attention(device.kind, _dtype(device))
    yield "memory", f"{format_bytes(free_host_memory_bytes())} free"
    yield "disk", f"{format_bytes(shutil.disk_usage(_existing(outputs)).free)} free for {outputs}"
    yield "database", database


def _database() -> tuple[str, bool]:
    """The database's state in words, and whether trials can be recorded in it."""
    outputs = outputs_folder()
    if not (outputs / "results.db").is_file():
        if not os.access(_existing(outputs), os.W_OK):
            return f"{outputs} cannot be written; set PENSIEVE_OUTPUTS to a folder that can", False
        return f"none yet; the first trial makes {outputs / 'results.db'}", True
    try:
        store = open_store(outputs, create=False)
        latest = store.latest_sweep()
    except PensieveError as error:
        return str(error), False
    last = f"last sweep {latest.id} ({latest.status})" if latest else "no sweep yet"
    return f"{store.database.shown}, {last}", True


def _models(device: Device) -> Table:
    """A line each, but for model=hf, which is any model."""
    cache = CacheConfig.model_validate(read_option("cache", CACHE))
    shared = device.kind == "cpu"  # both tiers and the weights are in one memory
    room = device.cpu_bytes if shared else int(device.gpu_bytes * GPU_USABLE)
    sizes = [tier for tier in (cache.gpu, cache.cpu if shared else AUTO) if tier != AUTO]  # auto takes what is left
    lines = []
    for name in options("model"):
        model = ModelConfig.model_validate(read_option("model", name))
        if not model.architecture:
            continue
        spec = ModelSpec.from_architecture(name, model.architecture, _dtype(device))
        a_token = spec.kv_bytes_per_token
        need = spec.weight_bytes + sum(parse_capacity(tier).in_tokens(a_token) for tier in sizes) * a_token
        lines.append(
            {
                "model": name,
                "parameters": f"{spec.parameters / 1e6:,.0f} M",
                f"weights in {_dtype(device)}": format_bytes(spec.weight_bytes),
                "KV a token": format_bytes(a_token),
                "fits": "yes" if need <= room else f"no, needs {format_bytes(need)}",
                "weights here": "random" if model.weights == "random" else "yes" if local_weights(model) else "no",
            }
        )
    return lines


def _next(device: Device, models: Table) -> Iterator[str]:
    fitting = [line["model"] for line in models if line["fits"] == "yes"]
    yield f"{typed('run')} -m                                   the tiny model, every baseline"
    yield from [
        f"{typed('run')} model={name} cache=small -m" for name in ("llama3_8b", "opt_125m", "gpt2") if name in fitting
    ][:1]
    if device.kind == "cpu":
        yield f"{typed('run')} model=llama3_8b cache=small hardware=sim_a100_80g workload=chat_steady -m     simulated"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def _compiler() -> str:
    """The C compiler, for the kernel of decode attention on a CPU."""
    try:
        return compiler_version(find_compiler())
    except EngineMissing:
        return "none for C, so that decode attention on a CPU is torch's, and slower: install gcc or clang"


def attention(kind: str, dtype: str) -> str:
    """Which attention backend auto chooses on such a device, and why no faster one."""
    chunk = CacheConfig.model_fields["chunk_tokens"].default
    name, why, fell_back = attention_here("auto", torch.device(kind), getattr(torch, dtype), _HEAD_DIM, chunk)
    loud = "WARNING: no kernel runs here, which is slower. " if fell_back else ""
    said = f"{name} serves attention_backend=auto in {dtype}. {loud}{why}".rstrip()
    return f"{said} A model that fails its self-check with it gets the next one, and its trial is flagged fell_back."
