"""Which model is asked for, and how it is to serve, without torch: an identity, and whoever keeps a model, ask before.

What only a start can tell (does the compiler compile, does the kernel pass the self-check) is decided in model.py.
"""

import importlib.util
import os
from typing import NamedTuple

import psutil

from pensieve.compiler import find_compiler
from pensieve.errors import ConfigError, EngineMissing
from pensieve.specs import ModelSpec

BACKENDS = ("reference", "native", "triton")
ON_CPU = ("native", "reference")  # best first
ON_CUDA = ("triton", "reference")
CAPTURED = "triton"
"""The backend whose launches may be recorded in a CUDA graph."""


class ModelAsked(NamedTuple):
    """What decides a loaded model, beside its files.

    weights: "random" (from spec.architecture under `seed`, no download), "hub" (`hub_id`), or a folder written by
    save_pretrained. device: cpu or cuda:N. threads: CPU threads, all physical cores by default. attention: a
    backend's name, or auto for the best that loads and passes the check with blocks of `chunk_tokens`. memory_bytes: what the
    weights may take, for whether they are packed too (packed.packable); None: what the machine has free. fused: use the
    fused forward where the architecture has one, else packed products, where that passes the check; or else transformers'
    modules alone.
    """

    spec: ModelSpec
    weights: str = "random"
    hub_id: str | None = None
    revision: str | None = None
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    attention: str = "auto"
    chunk_tokens: int = 32
    memory_bytes: int | None = None
    fused: bool = True


def physical_cores() -> int:
    """CPU threads where hardware.threads is null: cores this process may use, hyper-threads not counted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def candidates(choice: str, kind: str) -> tuple[str, ...]:
    """What attention_backend=`choice` means on a device of this kind (cpu, cuda): backends to try, best first.

    Raises ConfigError for an unknown name.
    """
    if choice == "auto":
        return ON_CUDA if kind == "cuda" else ON_CPU
    if choice not in BACKENDS:
        raise ConfigError(f"attention_backend={choice} is unknown; use auto, {', '.join(BACKENDS)}.")
    return (choice,)


def expected(choice: str, kind: str, chunk_tokens: int) -> str:
    """The first candidate for which nothing is known to be missing; the last one where something is for each."""
    names = candidates(choice, kind)
    for name in names:
        try:
            require(name, kind, chunk_tokens)
        except EngineMissing:
            continue
        return name
    return names[-1]


def require(name: str, kind: str, chunk_tokens: int) -> None:
    """Raises EngineMissing, in one sentence, for an attention backend that cannot run here."""
    if name == "native":
        if kind != "cpu":
            raise EngineMissing("attention_backend=native runs on a CPU only; use auto or triton on a GPU.")
        find_compiler()
    if name != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise EngineMissing(
            "attention_backend=triton needs the package triton (pip install 'pensieve-lab[triton]'); or use auto."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kind == "cpu" and not interpreted:
        raise EngineMissing(
            "attention_backend=triton needs a GPU; use auto on a CPU, or set TRITON_INTERPRET=1 to run the kernel in "
            "Triton's interpreter (slow, for tests)."
        )
    if kind == "cuda" and interpreted:
        raise EngineMissing("TRITON_INTERPRET=1 is set, which is for tests without a GPU; unset it.")
    if chunk_tokens & (chunk_tokens - 1):
        raise EngineMissing(
            f"attention_backend=triton takes blocks of a power of two of tokens, and cache.chunk_tokens={chunk_tokens}; use "
            "another size, or attention_backend=reference."
        )
