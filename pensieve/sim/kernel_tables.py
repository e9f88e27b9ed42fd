"""Kernel times as they were measured, between the sizes that were measured. No torch, no numpy: a simulation starts at once.

Tables are the files below `tables/` (see derive.py there for their sources). Sizes and times are interpolated in log space:
over tokens for linear layers, over (chunk, KV before it) x (decodes, KV before them) for attention.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from pensieve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """What one device of a tensor-parallel group holds of a layer, in elements. gate: matrices beside `down` in the MLP."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gate: int

    def distance(self, other: Shape) -> float:
        """0 for the same shape; sums the logarithms of the ratios of what time depends on most."""
        pairs = (
            (self.hidden, other.hidden),
            (self.heads * self.head_dim, other.heads * other.head_dim),
            (self.kv_heads * self.head_dim, other.kv_heads * other.head_dim),
            (self.gate * self.intermediate, other.gate * other.intermediate),
        )
        return sum(abs(math.log(one / two)) for one, two in pairs)


class Curve:
    """Seconds over one size, log-log between the measured ones; beyond the last, in proportion to the size."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(sizes) == len(seconds) and all(a < b for a, b in pairwise(sizes))
        self.first, self.last = sizes[0], sizes[-1]
        self._sizes, self._seconds = list(sizes), list(seconds)

    def at(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if size <= self.first:
            return seconds[0]
        if size >= self.last:
            return seconds[-1] * size / self.last
        after = bisect_right(sizes, size)
        low, high = sizes[after - 1], sizes[after]
        weight = math.log(size / low) / math.log(high / low)
        return math.exp((1 - weight) * math.log(seconds[after - 1]) + weight * math.log(seconds[after]))


class AttentionGrid:
    """Seconds of attention in one layer: a chunk of queries over the KV before it, and n decodes over the KV before each, in
    one call of the kernel, as vLLM makes it.

    Beside a chunk, the most decodes of the axis were not measured. Such a cell continues the two before it in a straight
    line over decodes: each further decode takes what one of the last measured ones took. `covers` is false there.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._axes = [list(table[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")]
        times = iter(table["us"])
        self._logs: dict[tuple[int, int, int, int], float] = {}
        chunks, kvs, decodes, decode_kvs = (range(len(axis)) for axis in self._axes)
        for key in ((c, k, n, d) for c in chunks for k in kvs for n in decodes for d in decode_kvs):
            us = next(times)
            if us is not None:
                self._logs[key] = math.log(us * 1e-6)
        self._filled: set[tuple[int, int, int, int]] = set()

    def at(self, chunk: float, kv: float, decodes: float, decode_kv: float) -> float:
        """Sizes are clamped to the grid: who asks for more scales what this returns (`reach` says to where)."""
        total = 0.0
        for c, c_share in self._corners(0, chunk):
            for k, k_share in self._corners(1, kv) if chunk else ((0, 1.0),):
                for n, n_share in self._corners(2, decodes):
                    for d, d_share in self._corners(3, decode_kv) if decodes else ((0, 1.0),):
                        total += c_share * k_share * n_share * d_share * self._log((c, k, n, d))
        return math.exp(total)

    def clamped(self, chunk: float, kv: float, decodes: float, decode_kv: float) -> tuple[float, float, float, float]:
        """The sizes as far as the grid goes."""
        ends = [axis[-1] for axis in self._axes]
        return min(chunk, ends[0]), min(kv, ends[1]), min(decodes, ends[2]), min(decode_kv, ends[3])

    def covers(self, chunk: float, kv: float, decodes: float, decode_kv: float) -> bool:
        """Every cell around these sizes was measured."""
        if (chunk, kv, decodes, decode_kv) != self.clamped(chunk, kv, decodes, decode_kv):
            return False
        highest = (
            self._corners(0, chunk)[-1][0],
            self._corners(1, kv)[-1][0] if chunk else 0,
            self._corners(2, decodes)[-1][0],
            self._corners(3, decode_kv)[-1][0] if decodes else 0,
        )
        self._log(highest)
        return highest not in self._filled

    def _corners(self, axis: int, size: float) -> tuple[tuple[int, float], ...]:
        """Indices around a size and their shares. 0 stands for what is absent; of what is there the first size is the least,
        save KV before a chunk, of which there may be less."""
        sizes = self._axes[axis]
        if not size:
            return ((0, 1.0),)
        if size <= sizes[1]:
            share = size / sizes[1]
            return ((0, 1 - share), (1, share)) if axis == 1 and share < 1 else ((1, 1.0),)
        if size >= sizes[-1]:
            return ((len(sizes) - 1, 1.0),)
        after = bisect_right(sizes, size)
        share = math.log(size / sizes[after - 1]) / math.log(sizes[after] / sizes[after - 1])
        return ((after - 1, 1 - share), (after, share)) if share else ((after - 1, 1.0),)

    def _log(self, key: tuple[int, int, int, int]) -> float:
        known = self._logs.get(key)
        if known is None:
            c, k, n, d = key
            assert n > 2, "a grid holds its smaller batches"
            fewest, fewer, decodes = self._axes[2][n - 2 : n + 1]
            less, least = math.exp(self._log((c, k, n - 1, d))), math.exp(self._log((c, k, n - 2, d)))
            grown = max(0.0, less - least) * (decodes - fewer) / (fewer - fewest)
            known = self._logs[key] = math.log(less + grown)
            self._filled.add(key)
        return known


@dataclass(frozen=True, eq=False)
class KernelTable:
    """One card, one model, one degree of tensor parallelism: its file below tables/, which names source and licence.

    layers: seconds over tokens; heads: over sequences. skew: of decodes of unequal length, the share of the way from the time
    at their mean KV to that at the longest one's; None where nobody measured it.
    """

    name: str
    shape: Shape
    layers: Mapping[str, Curve]
    heads: Mapping[str, Curve]
    attention: AttentionGrid | None
    skew: float | None


@lru_cache(maxsize=8)
def tables_of(card: str) -> tuple[KernelTable, ...]:
    """All of a card. Raises ConfigError where there are none."""
    folder = files("pensieve.sim.tables") / card
    if not folder.is_dir():
        raise ConfigError(f"There are no kernel tables of {card!r}; pensieve/sim/tables has a folder for each card.")
    names = sorted(each.name for each in folder.iterdir() if each.name != "all_reduce.json.gz")
    return tuple(_table(f"{card}/{name.removesuffix('.json.gz')}", read(f"{card}/{name}")) for name in names)


def nearest(card: str, shape: Shape) -> KernelTable:
    """The table of the most similar shape; the first by name of two that are."""
    return min(tables_of(card), key=lambda table: (table.shape.distance(shape), table.name))


@lru_cache(maxsize=8)
def all_reduce(card: str, devices: int) -> Curve:
    """Seconds over bytes. Raises ConfigError where it was not measured with so many devices."""
    table = read(f"{card}/all_reduce.json.gz")["all_reduce"]
    column = table.get(str(devices))
    if column is None:
        raise ConfigError(
            f"The all-reduce of {card} was measured with {', '.join(table)} devices, not with {devices}; "
            "set hardware.gpus to one of these, or hardware.terms.all_reduce=link."
        )
    return Curve(column["bytes"], [us * 1e-6 for us in column["us"]])


def read(name: str) -> dict[str, Any]:
    """The content of a file below tables/."""
    content: dict[str, Any] = json.loads(gzip.decompress((files("pensieve.sim.tables") / name).read_bytes()))
    return content


def _table(name: str, content: Mapping[str, Any]) -> KernelTable:
    return KernelTable(
        name=name,
        shape=Shape(**content["shape"]),
        layers=_curves(content["dense"], "tokens"),
        heads=_curves(content["per_sequence"], "sequences") if "per_sequence" in content else {},
        attention=AttentionGrid(content["attention"]) if "attention" in content else None,
        skew=content.get("skew"),
    )


def _curves(content: Mapping[str, Any], key: str) -> dict[str, Curve]:
    return {layer: Curve(content[key], [us * 1e-6 for us in column]) for layer, column in content["us"].items()}
