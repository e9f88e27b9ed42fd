"""Make the tables beside this file from the published measurements: `python -m pensieve.sim.tables.derive FOLDER`.

FOLDER holds `llmservingsim/` (LLMServingSim 2.0: kernels of vLLM 0.19, layer by layer) and `vidur/` (Vidur: the linear layers
of a transformer, and all-reduces), both MIT. Of attention the grid is thinned to powers of two: the cells left out serve to
check the interpolation with.
"""

from __future__ import annotations

import csv
import gzip
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent

_LLMSERVINGSIM = {
    "source": "LLMServingSim 2.0 (github.com/casys-kaist/LLMServingSim): vLLM 0.19 profiled layer by layer, bfloat16",
    "licence": "MIT, Copyright (c) 2024, CASYS Lab at KAIST",
}
_VIDUR = {
    "source": "Vidur (github.com/microsoft/vidur): medians of profiled kernels, 16-bit",
    "licence": "MIT, Copyright (c) Microsoft Corporation",
}


def _shape(hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, int]:
    """Sizes of a whole model by its config.json; all of these have heads of 128 and a gated MLP."""
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 128,
        "intermediate": intermediate,
        "vocab": vocab,
        "gate": 2,
    }


_LLAMA3_8B = _shape(4096, 32, 8, 14336, 128256)
_QWEN3_32B = _shape(5120, 64, 8, 25600, 151936)
_LLAMA2_7B = _shape(4096, 32, 32, 11008, 32000)
_LLAMA2_70B = _shape(8192, 64, 8, 28672, 32000)

_KERNELS = (  # card, its name, folder below llmservingsim/, model, sizes, degrees of tensor parallelism
    ("rtx4090", "NVIDIA GeForce RTX 4090", "RTX4090/meta-llama/Llama-3.1-8B", "llama3_8b", _LLAMA3_8B, (1,)),
    (
        "rtxpro6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "RTXPRO6000/meta-llama/Llama-3.1-8B",
        "llama3_8b",
        _LLAMA3_8B,
        (1, 2),
    ),
    (
        "rtxpro6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "RTXPRO6000/Qwen/Qwen3-32B",
        "qwen3_32b",
        _QWEN3_32B,
        (1, 2),
    ),
)
_LINEAR = (  # card, its name, folder below vidur/, model, sizes
    ("a100", "NVIDIA A100 (SXM, 80 GB)", "a100/Llama-2-7b-hf", "llama2_7b", _LLAMA2_7B),
    ("a100", "NVIDIA A100 (SXM, 80 GB)", "a100/Llama-2-70b-hf", "llama2_70b", _LLAMA2_70B),
    ("a100", "NVIDIA A100 (SXM, 80 GB)", "a100/Meta-Llama-3-8B", "llama3_8b", _LLAMA3_8B),
    ("h100", "NVIDIA H100 (SXM)", "h100/Llama-2-7b-hf", "llama2_7b", _LLAMA2_7B),
    ("h100", "NVIDIA H100 (SXM)", "h100/Llama-2-70b-hf", "llama2_70b", _LLAMA2_70B),
)
_ALL_REDUCE = (("a100", "NVIDIA DGX A100", "network/a100_dgx"), ("h100", "NVIDIA DGX H100", "network/h100_dgx"))
_LINEAR_NAMES = {  # Vidur's operations by vLLM's names
    "emb": "embedding",
    "input_layernorm": "layernorm",
    "attn_pre_proj": "qkv_proj",
    "attn_rope": "rotary_emb",
    "attn_post_proj": "o_proj",
    "mlp_up_proj": "gate_up_proj",
    "mlp_act": "act_fn",
    "mlp_down_proj": "down_proj",
}
_LONGEST = 4096  # tokens of one iteration: what lies above is left out


def derive(folder: Path, to: Path) -> list[Path]:
    """Write every table; returns the files. The same measurements give the same bytes."""
    written = []
    for name, table in _tables(folder):
        path = to / f"{name}.json.gz"
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(table, separators=(",", ":"))
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
            packed.write(text.encode())
        written.append(path)
    return written


def _tables(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for card, title, place, model, sizes, degrees in _KERNELS:
        for degree in degrees:
            at = folder / "llmservingsim" / place / f"tp{degree}"
            yield (
                f"{card}/{model}_tp{degree}",
                {
                    "card": title,
                    "model": model,
                    **_LLMSERVINGSIM,
                    "shape": _shard(sizes, degree),
                    "skew": _skew(at.parent / "meta.yaml", degree),
                    "dense": _by_layer(at / "dense.csv", "tokens"),
                    "per_sequence": _by_layer(at / "per_sequence.csv", "sequences"),
                    "attention": _attention(at / "attention.csv"),
                },
            )
    for card, title, place, model, sizes in _LINEAR:
        for degree, dense in _vidur_dense(folder / "vidur" / place / "mlp.csv"):
            shape = _shard(sizes, degree)
            yield (
                f"{card}/{model}_tp{degree}",
                {"card": title, "model": model, **_VIDUR, "shape": shape, "dense": dense},
            )
    for card, title, place in _ALL_REDUCE:
        reduced = _all_reduce(folder / "vidur" / place / "all_reduce.csv")
        yield f"{card}/all_reduce", {"card": title, **_VIDUR, "all_reduce": reduced}


def _skew(path: Path, degree: int) -> float | None:
    """What the profiler fitted for decodes of unequal length (alpha_default); None where it did not look."""
    fit = (yaml.safe_load(path.read_text(encoding="utf-8")).get("skew_fit") or {}).get("per_tp") or {}
    return float(fit[degree]["alpha_default"]) if degree in fit else None


def _shard(sizes: dict[str, int], degree: int) -> dict[str, int]:
    """What one device of a tensor-parallel group has."""
    split = ("heads", "kv_heads", "intermediate", "vocab")
    return {name: max(1, size // degree) if name in split else size for name, size in sizes.items()}


def _by_layer(path: Path, key: str) -> dict[str, Any]:
    times: dict[str, dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            times[row["layer"]][int(row[key])] = float(row["time_us"])
    sizes = sorted(next(iter(times.values())))
    assert all(sorted(column) == sizes for column in times.values())
    return {
        key: sizes,
        "us": {layer: [_short(column[size]) for size in sizes] for layer, column in sorted(times.items())},
    }


def _attention(path: Path) -> dict[str, Any]:
    """Axes (0 and the powers of two), and the times in the order of the axes: None where nothing was measured."""
    times: dict[tuple[int, ...], float] = {}
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            key = tuple(int(row[name]) for name in names)
            if all(size & (size - 1) == 0 for size in key):
                times[key] = float(row["time_us"])
    axes = [sorted({key[axis] for key in times}) for axis in range(len(names))]
    cells = (
        times.get((chunk, kv, n, kv_decode))
        for chunk in axes[0]
        for kv in axes[1]
        for n in axes[2]
        for kv_decode in axes[3]
    )
    return {**dict(zip(names, axes, strict=True)), "us": [None if cell is None else _short(cell) for cell in cells]}


def _vidur_dense(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    times: dict[int, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            tokens, degree = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            if tokens > _LONGEST:
                continue
            for theirs, ours in _LINEAR_NAMES.items():
                times[degree][ours][tokens].append(1000 * float(row[f"time_stats.{theirs}.median"]))
    for degree, layers in sorted(times.items()):
        sizes = sorted(next(iter(layers.values())))
        yield (
            degree,
            {
                "tokens": sizes,
                "us": {
                    layer: [_short(statistics.median(column[size])) for size in sizes]
                    for layer, column in sorted(layers.items())
                },
            },
        )


def _all_reduce(path: Path) -> dict[str, Any]:
    """Bytes and times for each number of devices of one machine: of all sizes those that double about every fourth time."""
    times: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["num_workers"] == row["devices_per_node"]:
                median = 1000 * float(row["time_stats.all_reduce.median"])
                times[int(row["num_workers"])][int(row["size"])].append(median)
    table: dict[str, Any] = {}
    for devices, column in sorted(times.items()):
        sizes: list[int] = []
        for size in sorted(column):
            if not sizes or size >= sizes[-1] * 2**0.25 or size == max(column):
                sizes.append(size)
        table[str(devices)] = {"bytes": sizes, "us": [_short(statistics.median(column[size])) for size in sizes]}
    return table


def _short(microseconds: float) -> float:
    """Four digits, more than repeated measurements agree in."""
    return float(f"{microseconds:.4g}")


if __name__ == "__main__":
    for each in derive(Path(sys.argv[1]), HERE):
        print(f"{each.relative_to(HERE)}: {each.stat().st_size:,} bytes")
