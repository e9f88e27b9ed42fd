"""Make the tables beside this file from the published measurements: `python -m pensieve.sim.tables.derive FOLDER`.

FOLDER holds `llmservingsim/` (LLMServingSim 2.0: kernels of vLLM 0.19, layer by layer) and `vidur/` (Vidur: the linear layers
of a transformer, and all-reduces), both MIT. Of attention the grid is thinned to powers of two: the cells left out serve to
check the interpolation with.
"""

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
_MODELS = {  # by their folder: hidden, heads, KV heads, intermediate, vocabulary; all have heads of 128 and a gated MLP
    "Llama-3.1-8B": ("llama3_8b", 4096, 32, 8, 14336, 128256),
    "Meta-Llama-3-8B": ("llama3_8b", 4096, 32, 8, 14336, 128256),
    "Qwen3-32B": ("qwen3_32b", 5120, 64, 8, 25600, 151936),
    "Llama-2-7b-hf": ("llama2_7b", 4096, 32, 32, 11008, 32000),
    "Llama-2-70b-hf": ("llama2_70b", 8192, 64, 8, 28672, 32000),
}
_AXES = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
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
    for name, table in (*_vllm(folder / "llmservingsim"), *_linear(folder / "vidur"), *_all_reduce(folder / "vidur")):
        path = to / f"{name}.json.gz"
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(table, separators=(",", ":"))
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
            packed.write(text.encode())
        written.append(path)
    return written


def _vllm(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for at in sorted(folder.glob("*/*/*/tp*")):
        degree = int(at.name.removeprefix("tp"))
        name, shape = _shard(at.parents[2].name.lower(), at.parent.name, degree)
        fitted = yaml.safe_load((at.parent / "meta.yaml").read_text(encoding="utf-8")).get("skew_fit") or {}
        table = {
            "shape": shape,
            "skew": fitted.get("per_tp", {}).get(degree, {}).get("alpha_default"),  # of decodes of unequal length
            "dense": _by_layer(pd.read_csv(at / "dense.csv"), "tokens"),
            "per_sequence": _by_layer(pd.read_csv(at / "per_sequence.csv"), "sequences"),
            "attention": _attention(pd.read_csv(at / "attention.csv")),
        }
        yield name, {**_LLMSERVINGSIM, **table}


def _linear(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    columns = {f"time_stats.{theirs}.median": ours for theirs, ours in _LINEAR_NAMES.items()}
    for file in sorted(folder.glob("*/*/mlp.csv")):
        rows = pd.read_csv(file).query("num_tokens <= @_LONGEST")
        for degree, own in rows.groupby("num_tensor_parallel_workers"):
            name, shape = _shard(file.parents[1].name, file.parent.name, int(str(degree)))
            named = own[["num_tokens", *columns]].rename(columns={"num_tokens": "tokens", **columns})
            each = named.melt("tokens", var_name="layer", value_name="time_us")
            each["time_us"] *= 1000
            yield name, {**_VIDUR, "shape": shape, "dense": _by_layer(each, "tokens")}


def _all_reduce(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bytes and times for each number of devices of one machine: of all sizes those that double about every fourth time."""
    for file in sorted(folder.glob("network/*_dgx/all_reduce.csv")):
        table: dict[str, Any] = {}
        for devices, own in pd.read_csv(file).query("num_workers == devices_per_node").groupby("num_workers"):
            us = 1000 * own.groupby("size")["time_stats.all_reduce.median"].median()
            sizes: list[int] = []
            for size in us.index.tolist():
                if not sizes or size >= sizes[-1] * 2**0.25 or size == us.index[-1]:
                    sizes.append(size)
            table[str(devices)] = {"bytes": sizes, "us": [_short(us[size]) for size in sizes]}
        yield f"{file.parent.name.removesuffix('_dgx')}/all_reduce", {**_VIDUR, "all_reduce": table}


def _shard(card: str, folder: str, degree: int) -> tuple[str, dict[str, int]]:
    """The name of a table, and what one device of a tensor-parallel group has."""
    model, hidden, *sizes = _MODELS[folder]
    heads, kv_heads, intermediate, vocab = (max(1, size // degree) for size in sizes)
    shape = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": 128, "intermediate": intermediate}
    return f"{card}/{model}_tp{degree}", {**shape, "vocab": vocab, "gate": 2}


def _by_layer(rows: pd.DataFrame, key: str) -> dict[str, Any]:
    """rows: `layer`, the size `key` and time_us, of which the median counts."""
    times = rows.pivot_table(index=key, columns="layer", values="time_us", aggfunc="median")
    assert not times.isna().any(axis=None), "a layer lacks a size"
    us = {str(layer): [_short(each) for each in column] for layer, column in times.items()}
    return {key: times.index.tolist(), "us": us}


def _attention(rows: pd.DataFrame) -> dict[str, Any]:
    """Axes (0 and the powers of two), and the times in the order of the axes: None where nothing was measured."""
    cells = zip(rows[_AXES].itertuples(index=False, name=None), rows["time_us"], strict=True)
    known = {cell: us for cell, us in cells if all(size & (size - 1) == 0 for size in cell)}
    axes = [sorted(set(sizes)) for sizes in zip(*known, strict=True)]
    us = [_short(known[cell]) if cell in known else None for cell in product(*axes)]
    return {**dict(zip(_AXES, axes, strict=True)), "us": us}


def _short(microseconds: float) -> float:
    """Four digits, more than repeated measurements agree in."""
    return float(f"{microseconds:.4g}")


if __name__ == "__main__":
    for each in derive(Path(sys.argv[1]), HERE):
        print(f"{each.relative_to(HERE)}: {each.stat().st_size:,} bytes")
