"""Make the tables beside this file from the published measurements: `python -m pensieve.sim.tables.derive FOLDER`.

FOLDER holds `llmservingsim/` (LLMServingSim 2.0: kernels of vLLM 0.19, layer by layer) and `vidur/` (Vidur: the linear layers
of a transformer, and all-reduces), both MIT. Of attention the grid is thinned to powers of two: the cells left out serve to
check the interpolation with.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
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
_CARDS = {
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtxpro6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "a100": "NVIDIA A100 (SXM, 80 GB)",
    "h100": "NVIDIA H100 (SXM)",
}
_SHAPES = {  # hidden, heads, KV heads, intermediate, vocabulary, by config.json; all have heads of 128 and a gated MLP
    "llama3_8b": (4096, 32, 8, 14336, 128256),
    "qwen3_32b": (5120, 64, 8, 25600, 151936),
    "llama2_7b": (4096, 32, 32, 11008, 32000),
    "llama2_70b": (8192, 64, 8, 28672, 32000),
}
_KERNELS = (  # card, model, folder below llmservingsim/, degrees of tensor parallelism
    ("rtx4090", "llama3_8b", "RTX4090/meta-llama/Llama-3.1-8B", (1,)),
    ("rtxpro6000", "llama3_8b", "RTXPRO6000/meta-llama/Llama-3.1-8B", (1, 2)),
    ("rtxpro6000", "qwen3_32b", "RTXPRO6000/Qwen/Qwen3-32B", (1, 2)),
)
_LINEAR = (  # card, model, folder below vidur/
    ("a100", "llama2_7b", "a100/Llama-2-7b-hf"),
    ("a100", "llama2_70b", "a100/Llama-2-70b-hf"),
    ("a100", "llama3_8b", "a100/Meta-Llama-3-8B"),
    ("h100", "llama2_7b", "h100/Llama-2-7b-hf"),
    ("h100", "llama2_70b", "h100/Llama-2-70b-hf"),
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
    for card, model, place, degrees in _KERNELS:
        for degree in degrees:
            at = folder / "llmservingsim" / place / f"tp{degree}"
            yield (
                f"{card}/{model}_tp{degree}",
                {
                    "card": _CARDS[card],
                    "model": model,
                    **_LLMSERVINGSIM,
                    "shape": _shard(model, degree),
                    "skew": _skew(at.parent / "meta.yaml", degree),
                    "dense": _by_layer(pd.read_csv(at / "dense.csv"), "tokens"),
                    "per_sequence": _by_layer(pd.read_csv(at / "per_sequence.csv"), "sequences"),
                    "attention": _attention(at / "attention.csv"),
                },
            )
    for card, model, place in _LINEAR:
        for degree, dense in _vidur_dense(folder / "vidur" / place / "mlp.csv"):
            head = {"card": _CARDS[card], "model": model, **_VIDUR, "shape": _shard(model, degree)}
            yield f"{card}/{model}_tp{degree}", {**head, "dense": dense}
    for card, title, place in _ALL_REDUCE:
        reduced = _all_reduce(folder / "vidur" / place / "all_reduce.csv")
        yield f"{card}/all_reduce", {"card": title, **_VIDUR, "all_reduce": reduced}


def _skew(path: Path, degree: int) -> float | None:
    """What the profiler fitted for decodes of unequal length (alpha_default); None where it did not look."""
    fit = (yaml.safe_load(path.read_text(encoding="utf-8")).get("skew_fit") or {}).get("per_tp") or {}
    return float(fit[degree]["alpha_default"]) if degree in fit else None


def _shard(model: str, degree: int) -> dict[str, int]:
    """What one device of a tensor-parallel group has."""
    hidden, *sizes = _SHAPES[model]
    heads, kv_heads, intermediate, vocab = (max(1, size // degree) for size in sizes)
    shape = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": 128, "intermediate": intermediate}
    return {**shape, "vocab": vocab, "gate": 2}


def _by_layer(rows: pd.DataFrame, key: str) -> dict[str, Any]:
    """rows: `layer`, the size `key` and time_us, of which the median counts."""
    times = rows.pivot_table(index=key, columns="layer", values="time_us", aggfunc="median")
    assert not times.isna().any(axis=None), "a layer lacks a size"
    us = {str(layer): [_short(each) for each in column] for layer, column in times.items()}
    return {key: times.index.tolist(), "us": us}


def _attention(path: Path) -> dict[str, Any]:
    """Axes (0 and the powers of two), and the times in the order of the axes: None where nothing was measured."""
    names = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    times = pd.read_csv(path).set_index(names)["time_us"]
    times = times[[all(size & (size - 1) == 0 for size in key) for key in times.index]]
    axes = [sorted(set(times.index.get_level_values(name).tolist())) for name in names]
    known = times.to_dict()
    us = [_short(known[cell]) if cell in known else None for cell in product(*axes)]
    return {**dict(zip(names, axes, strict=True)), "us": us}


def _vidur_dense(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = pd.read_csv(path).query("num_tokens <= @_LONGEST")
    columns = {f"time_stats.{theirs}.median": ours for theirs, ours in _LINEAR_NAMES.items()}
    keys = {"num_tokens": "tokens", "num_tensor_parallel_workers": "degree"}
    named = rows[[*keys, *columns]].rename(columns=keys | columns)
    each = named.melt(["tokens", "degree"], var_name="layer", value_name="time_us")
    each["time_us"] *= 1000
    for degree, own in each.groupby("degree"):
        yield int(str(degree)), _by_layer(own, "tokens")


def _all_reduce(path: Path) -> dict[str, Any]:
    """Bytes and times for each number of devices of one machine: of all sizes those that double about every fourth time."""
    rows = pd.read_csv(path).query("num_workers == devices_per_node")
    table: dict[str, Any] = {}
    for devices, own in rows.groupby("num_workers"):
        us = 1000 * own.groupby("size")["time_stats.all_reduce.median"].median()
        sizes: list[int] = []
        for size in us.index.tolist():
            if not sizes or size >= sizes[-1] * 2**0.25 or size == us.index[-1]:
                sizes.append(size)
        table[str(devices)] = {"bytes": sizes, "us": [_short(us[size]) for size in sizes]}
    return table


def _short(microseconds: float) -> float:
    """Four digits, more than repeated measurements agree in."""
    return float(f"{microseconds:.4g}")


if __name__ == "__main__":
    for each in derive(Path(sys.argv[1]), HERE):
        print(f"{each.relative_to(HERE)}: {each.stat().st_size:,} bytes")
