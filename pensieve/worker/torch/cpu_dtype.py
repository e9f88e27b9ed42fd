"""What model.dtype=auto is on a CPU: float32, unless this CPU's units for bfloat16 were measured to be faster.

Asked before every trial, so nothing is measured twice and torch is imported only where a CPU has such units.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any

from pensieve.compiler import processor
from pensieve.specs import ModelSpec
from pensieve.user_cache import user_cache

_UNITS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # as /proc/cpuinfo calls them; the last is ARM's
_DECODE_ROWS, _PREFILL_ROWS = 4, 128
_REPEATS = 7
_LARGEST = 4096  # rows and columns of a matrix that is measured; a larger one takes as many times as long
_SMALL = 16 * 2**20  # parameters: 64 MiB in float32, which caches hold; a step is then no longer its products

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of a model's products over the rows of a decode step and of a prefill."""

    decode_float32: float
    decode_bfloat16: float
    prefill_float32: float
    prefill_bfloat16: float

    @property
    def faster(self) -> str:
        """bfloat16 only where neither kind of step is slower by it: TTFT is prefill, time per output token is decode."""
        better = self.decode_bfloat16 < self.decode_float32 and self.prefill_bfloat16 < self.prefill_float32
        return "bfloat16" if better else "float32"


def cpu_dtype(model: ModelSpec) -> str:
    """float32 or bfloat16: the faster for matrices of this model's sizes on this CPU, measured once and remembered.

    A small model is float32 on every machine: turns of `tiny` are compared token for token.
    """
    if model.parameters < _SMALL or not has_units(processor()):
        return "float32"
    shapes = products(model)
    file = _remembered(shapes)
    if file is not None:
        try:
            return Measured(**json.loads(file.read_text())).faster
        except (OSError, ValueError, TypeError):
            pass  # nobody measured yet, or what is there is not ours
    measured = measure(shapes)
    _log.warning(
        "%s on this CPU, measured once: its products take %d rows %.1f ms in float32 and %.1f in bfloat16, %d rows %.1f and "
        "%.1f. So model.dtype=auto is %s.",
        model.name, _DECODE_ROWS, measured.decode_float32, measured.decode_bfloat16, _PREFILL_ROWS,
        measured.prefill_float32, measured.prefill_bfloat16, measured.faster,
    )  # fmt: skip
    if file is not None:
        _remember(file, measured)
    return measured.faster


def has_units(said: str) -> bool:
    """Whether what a processor says of itself names a unit that multiplies bfloat16."""
    return not _UNITS.isdisjoint(said.split())


def products(model: ModelSpec) -> tuple[tuple[int, int, int], ...]:
    """(in, out, how many of them): projections, MLP and head."""
    attention = model.heads * model.head_dim
    return (
        (model.hidden, attention + 2 * model.kv_heads * model.head_dim, model.layers),
        (attention, model.hidden, model.layers),
        (model.hidden, (2 if model.gated else 1) * model.intermediate, model.layers),
        (model.intermediate, model.hidden, model.layers),
        (model.hidden, model.vocab, 1),
    )


def measure(shapes: Sequence[tuple[int, int, int]]) -> Measured:
    """The lowest of several times a product, the types in turn: what else runs on the machine slows both."""
    import torch

    from pensieve.worker.torch.fused.linear import Linear

    kinds = (torch.float32, torch.bfloat16)
    total = dict.fromkeys(product((_DECODE_ROWS, _PREFILL_ROWS), kinds), 0.0)
    with torch.inference_mode():
        for inside, outside, count in shapes:
            part = min(inside, _LARGEST), min(outside, _LARGEST)
            scale = count * inside * outside / (part[0] * part[1])
            layers = {kind: Linear([_module(*part, kind)], pack=True) for kind in kinds}
            best = dict.fromkeys(total, float("inf"))
            for _, (rows, kind) in product(range(_REPEATS), total):
                x = torch.ones(rows, part[0], dtype=kind)
                began = perf_counter()
                layers[kind](x)
                best[rows, kind] = min(best[rows, kind], perf_counter() - began)
            for key, seconds in best.items():
                total[key] += 1000 * scale * seconds
    return Measured(*total.values())


def _module(inside: int, outside: int, dtype: Any) -> Any:
    import torch

    module = torch.nn.utils.skip_init(torch.nn.Linear, inside, outside, bias=False, dtype=dtype)
    torch.nn.init.constant_(module.weight, 0.01)  # random numbers take longer to draw than to multiply
    return module


def _remembered(shapes: Sequence[tuple[int, int, int]]) -> Path | None:
    """Where this CPU's answer is kept; None for a user without a home."""
    facts = (processor(), version("torch"), os.environ.get("OMP_NUM_THREADS"), tuple(shapes))
    try:
        return user_cache() / "dtype" / f"{sha256(repr(facts).encode()).hexdigest()[:20]}.json"
    except RuntimeError:
        return None


def _remember(file: Path, measured: Measured) -> None:
    """Write the answer, whole or not at all; where the folder cannot be written to, each start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
            scratch.write(json.dumps(asdict(measured)))
        Path(scratch.name).replace(file)
    except OSError as error:
        _log.debug("The measured type is not kept: %s", error)
