"""Report what this machine has, which models fit on it, and which command to run next."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

from pensieve.compiler import compiler_version, find_compiler
from pensieve.errors import EngineMissing, PensieveError, typed
from pensieve.lab.commands.gpu_run import gpu_run
from pensieve.lab.compose.build import GPU_USABLE
from pensieve.lab.compose.conf import options, outputs_folder, read_option
from pensieve.lab.compose.model_files import local_weights
from pensieve.lab.compose.plan import AUTO, cores, cpu_label, find_device, free_host_memory_bytes, host_memory_bytes
from pensieve.lab.compose.settings import CacheConfig, HardwareConfig, ModelConfig
from pensieve.lab.results.store import open_store
from pensieve.lab.trial.sweep import installed
from pensieve.lab.trial.terminal import console
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes, grid, parse_capacity

EXTRAS = {
    "triton": "Triton kernels on a GPU",
    "vllm": "baseline=vllm",
    "xllamacpp": "baseline=llama_cpp",
    "ray": "baseline=ray_*",
    "psycopg": "tracking=postgres",
}
_HEAD_DIM = 64  # of the kernel that is tried; a model's own is compiled when it is loaded
PACKAGES = (
    ("transformers", "transformers"),
    ("hydra-core", "hydra"),
    ("sqlalchemy", "sqlalchemy"),
    ("mlflow", "mlflow"),
)
"""By the names of their distributions and of their modules."""


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_bytes: of the device that would hold weights and GPU tier."""

    torch: str
    gpu: str
    kind: str
    label: str
    memory_bytes: int
    host_bytes: int

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "cpu" else "bfloat16"


def doctor(argv: Sequence[str] | None, description: str | None) -> int:
    """The report, or the tests and benchmarks of a GPU. Raises PensieveError."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="ten minutes on a GPU: tests and benchmarks, in one file (docs/first_gpu_run.md)",
    )
    parser.add_argument(
        "--cache", default="small", help="the cache option that fitting is judged with (default: small)"
    )
    asked = parser.parse_args(argv)
    return gpu_run(Path(__file__).resolve().parents[3]) if asked.gpu else report(asked.cache)


def report(cache_name: str = "small") -> int:
    """Print the report; 0 where trials can run, 1 where something has to be repaired first. Raises ConfigError."""
    cache = CacheConfig.model_validate(read_option("cache", cache_name))
    machine = inspect_machine()
    database, database_sound = _database()
    fitting, models = _models(machine, cache)
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in _facts(machine, database):
        facts.add_row(name, value)
    out = console()
    out.print(facts, models, sep="\n")
    lines = ["Weights that are not at hand come from the hub; model.weights=random needs none."]
    lines += [] if database_sound else [f"Mend this first: {database}"]
    for line in [*lines, "Next:", *(f"  {command}" for command in _next(machine, fitting))]:
        out.print(line, soft_wrap=True, highlight=False)
    return 0 if database_sound else 1


def inspect_machine() -> Machine:
    import torch

    host = host_memory_bytes()
    device = find_device(HardwareConfig(name="local", simulated=False))
    if device.kind == "cuda":
        gpu = f"{device.label}, {format_bytes(device.gpu_bytes)} (CUDA {torch.version.cuda})"
        return Machine(torch.__version__, gpu, "cuda", device.label, int(device.gpu_bytes * GPU_USABLE), host)
    return Machine(torch.__version__, "none that torch can use", "cpu", device.label, host, host)


def _facts(machine: Machine, database: str) -> Iterator[tuple[str, str]]:
    outputs = outputs_folder()
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "torch", machine.torch
    yield (
        "packages",
        ", ".join(f"{name} {version(name) if installed(module) else 'missing'}" for name, module in PACKAGES),
    )
    there = {name: "installed" if installed(name) else "not installed" for name in EXTRAS}
    yield "extras", ", ".join(f"{name} {there[name]} ({use})" for name, use in EXTRAS.items())
    yield "GPU", machine.gpu
    yield "CPU", f"{cpu_label()}, {cores()} cores"
    yield "compiler", _compiler()
    yield "attention", _attention(machine)
    yield "memory", f"{format_bytes(free_host_memory_bytes())} free of {format_bytes(machine.host_bytes)}"
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
        latest = store.newest_sweep()
    except PensieveError as error:
        return str(error), False
    last = f"last sweep {latest.id} ({latest.status})" if latest else "no sweep yet"
    return f"{store.database.shown}, {last}", True


def _models(machine: Machine, cache: CacheConfig) -> tuple[list[str], Table]:
    """The names of the models that fit, and the table of all models."""
    fits_in, at_hand = f"fits in\n{machine.dtype}", "weights\nat hand"
    lines, fitting = [], []
    for name in options("model"):
        model = ModelConfig.model_validate(read_option("model", name))
        if not model.architecture:
            continue  # model=hf is any model
        spec = ModelSpec.from_architecture(name, model.architecture, machine.dtype)
        need = _need(spec, cache, machine)
        if need <= machine.memory_bytes:
            fitting.append(name)
        size = spec.parameters
        lines.append(
            {
                "model": name,
                "parameters": f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.0f} M",
                "weights": format_bytes(spec.weight_bytes),
                "KV a token": format_bytes(spec.kv_bytes_per_token),
                fits_in: "yes" if name in fitting else f"no, needs {format_bytes(need)}",
                at_hand: "random" if model.weights == "random" else "yes" if local_weights(model) else "no",
            }
        )
    title = f"Models on {machine.label} with cache={cache.name} ({cache.gpu} / {cache.cpu})"
    return fitting, grid(lines, title, left=(fits_in, at_hand))


def _need(spec: ModelSpec, cache: CacheConfig, machine: Machine) -> int:
    """Bytes of weights and KV on the device; on a CPU both tiers are in the same memory."""
    tiers = (cache.gpu, cache.cpu) if machine.kind == "cpu" else (cache.gpu,)
    sizes = [tier for tier in tiers if tier != AUTO]  # auto takes what is left
    tokens = sum(parse_capacity(tier).in_tokens(spec.kv_bytes_per_token) for tier in sizes)
    return spec.weight_bytes + tokens * spec.kv_bytes_per_token


def _next(machine: Machine, fitting: list[str]) -> Iterator[str]:
    yield f"{typed('run')} -m                                   the tiny model, every baseline"
    larger = [name for name in ("llama3_8b", "opt_125m", "gpt2") if name in fitting]
    if larger:
        yield f"{typed('run')} model={larger[0]} cache=small -m"
    if machine.kind == "cpu":
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


def _attention(machine: Machine) -> str:
    """Which attention backend auto chooses here, and why no faster one."""
    import torch

    from pensieve.device.model import attention_here

    dtype, chunk = getattr(torch, machine.dtype), CacheConfig.model_fields["chunk_tokens"].default
    name, why, fell_back = attention_here("auto", torch.device(machine.kind), dtype, _HEAD_DIM, chunk)
    loud = "WARNING: no kernel runs here, which is slower. " if fell_back else ""
    said = f"{name} serves attention_backend=auto in {machine.dtype}. {loud}{why}".rstrip()
    return f"{said} A model that fails its self-check with it gets the next one, and its trial is flagged fell_back."
