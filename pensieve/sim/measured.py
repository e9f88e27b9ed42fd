"""Seconds from kernel times that were measured on real cards: the cost model of simulated hardware that has been measured.

An iteration is the sum of its terms: projections (linear layers, norms, rotary, activation), attention, head (logits and
sampler), all-reduce, and what the host adds. `hardware.terms` says where each comes from. A table of another shape is scaled,
kernel by kernel, by the ratio of the two shapes' roofline times on that card; nothing is scaled from one card to another but
what the terms say.

A mixed batch. Attention was measured with one chunk of queries and n decodes over KV of one length, in one call of the kernel
(as vLLM makes it). Several chunks count as one of as many queries, over as much KV as makes equally many pairs; where that is
less than none (several short prompts), the time of as much less work is taken off. Decodes of unequal length count at their
mean; alone, `skew` of the way from there to the longest is added, where the card's profiler measured it: beside a chunk the
kernel works through all tiles at an even pace, whoever they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.core.plan import NO_DECODES, Decodes
from pensieve.errors import ConfigError
from pensieve.sim.kernel_tables import AttentionGrid, Curve, KernelTable, Shape, all_reduce, nearest
from pensieve.sim.roofline import Machine, Run, Seconds, attended_pairs
from pensieve.specs import Experts, HardwareSpec, ModelSpec

_PIECES_S = 2e-3
"""What vLLM's host adds to an iteration with a prompt, whose graphs were captured in pieces between the attentions. Fitted to
the mean TTFT of one run (RTX PRO 6000, Llama 3.1 8B); docs/results/fidelity.md holds it against two others."""
_TAIL = 512  # queries of the iteration whose attention tells what a marginal chunk costs
_SAMPLER_CARD = "rtxpro6000"


class MeasuredCost(Machine):
    """What the model and the machine say is read once. Counts how often, and how far, it was asked for more than was
    measured: `extrapolated`."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        if model.dtype_bytes != 2:
            raise ConfigError(
                f"hardware={hardware.name} was measured in 16 bits, and model.dtype={model.dtype} has "
                f"{8 * model.dtype_bytes}; set model.dtype=bfloat16, or both hardware.terms.projections and "
                "hardware.terms.attention to roofline."
            )
        if model.latent is not None or model.states is not None:
            does = "compresses its KV" if model.latent else "has layers that keep a state"
            raise ConfigError(
                f"model={model.name} {does}, and hardware={hardware.name} was not measured so; set "
                "hardware.terms.projections and hardware.terms.attention to roofline, and hardware.compute_efficiency to the "
                "share of the peak that your kernels reach."
            )
        super().__init__(model, hardware, chunk_tokens)
        self._shape = shape_of(model, hardware.gpus)
        self._iterations = 0
        self._beyond: dict[str, list[float]] = {}  # term -> iterations beyond what was measured, and the furthest ratio
        self._table = nearest(hardware.terms["projections"], self._shape)
        self._kernels = _Kernels(self._table, self._shape, hardware, model)
        source = hardware.terms["attention"]
        self._attention: MeasuredAttention | FittedAttention = (
            FittedAttention(self._shape, hardware)
            if source == "fitted"
            else MeasuredAttention(nearest(source, self._shape), self._shape, hardware)
        )
        self._windowed = model.windowed_layers
        self._reduce = _reduce_of(hardware)
        self._reduced_bytes = model.hidden * model.dtype_bytes
        self._linear_s = cache(self._kernels.layers_s)  # iterations repeat their sizes
        self._head_s = cache(self._kernels.head_s)

    def following_s(self, runs: Sequence[Run], sampled: int, decodes: Decodes, most: int) -> NDArray[np.float64] | None:
        """To the bit what `iteration_s` says of each; a grid is looked up for each by itself."""
        batch = Batch.of(runs, None, decodes)
        several = sum([stop - start > 1 for start, stop in runs])
        alike = several <= 1 and not self._windowed and 0 < batch.tokens <= self._kernels.most_tokens
        if not alike or not isinstance(self._attention, FittedAttention):
            return None
        attention: NDArray[np.float64] = self.model.layers * self._attention.of(batch.following(most), np.maximum)
        return self._sum_s(batch, attention, sampled)

    def ran(self, iterations: int) -> None:
        self._iterations += iterations

    def iteration_s(self, runs: Iterable[Run], sampled: int, decodes: Decodes = NO_DECODES) -> float:
        """See SimulatedCost. With a window the length of each decode counts: they are among the runs."""
        if self._windowed:
            assert not decodes.requests
            runs = tuple(runs)
        batch = Batch.of(runs, None, decodes)
        if not batch.tokens:
            return 0.0
        self._iterations += 1
        attention, reach = self._layers_attention_s(runs, batch)
        if reach > 1:
            self._note("attention", reach)
        if batch.tokens > self._kernels.most_tokens:
            self._note("projections", batch.tokens / self._kernels.most_tokens)
        return self._sum_s(batch, attention, sampled)

    def _sum_s(self, batch: Batch, attention: Seconds, sampled: int) -> Seconds:
        """An iteration, by what the attention of its layers takes."""
        tokens = graph_size(batch.tokens) if self.hardware.graph_sizes else batch.tokens
        pieces = _PIECES_S if batch.chunk and self.hardware.graph_sizes else 0.0
        return (
            self._linear_s(tokens)
            + attention
            + self._head_s(sampled)
            + (2 * self.model.layers + 1) * self._reduce(tokens * self._reduced_bytes)
            + self.hardware.step_overhead_s
            + pieces
        )

    def _layers_attention_s(self, runs: Iterable[Run], batch: Batch) -> tuple[float, float]:
        """Of all layers, those with a window apart. batch: of the runs, without one."""
        layers, windowed = self.model.layers, self._windowed
        if not windowed:
            attention, reach = self._attention.seconds(batch)
            return layers * attention, reach
        beside, reach = self._attention.seconds(Batch.of(runs, self.model.sliding_window))
        if windowed == layers:
            return layers * beside, reach
        attention, further = self._attention.seconds(batch)
        return (layers - windowed) * attention + windowed * beside, max(reach, further)

    def _chunk_s(self, context_tokens: int) -> float:
        most = min(2048, self._kernels.most_tokens)
        linear = (self._linear_s(most) + (2 * self.model.layers + 1) * self._reduce(most * self._reduced_bytes)) / most
        runs = ((max(0, context_tokens - _TAIL), max(context_tokens, _TAIL)),)
        attention, _ = self._layers_attention_s(runs, Batch.of(runs, None))
        return self.chunk_tokens * (linear + attention / _TAIL)

    def weights_s(self) -> float:
        return self._linear_s(1) + self._head_s(1)

    def describe(self) -> dict[str, Any]:
        """Of which table each term is, and what was scaled. All else is in the configuration of the hardware."""
        scaled_from = None if self._table.shape == self._shape else asdict(self._table.shape)
        return {
            "kind": "measured",
            "hardware": self.hardware.name,
            "load_s": self.load_s(),
            "terms": {
                "projections": {"table": self._table.name, "scaled_from": scaled_from},
                "attention": self._attention.describe(),
            },
        }

    def extrapolated(self) -> dict[str, Any]:
        """Terms that were asked for more than was measured: iterations of all, and how many times the largest size."""
        return {
            term: {"iterations": int(count), "of": self._iterations, "furthest": round(furthest, 3)}
            for term, (count, furthest) in sorted(self._beyond.items())
        }

    def _note(self, term: str, reach: float) -> None:
        noted = self._beyond.setdefault(term, [0, 1.0])
        noted[0] += 1
        noted[1] = max(noted[1], reach)


def shape_of(model: ModelSpec, devices: int) -> Shape:
    """What each device of the group holds of a layer."""
    return Shape(
        hidden=model.hidden,
        heads=max(1, model.heads // devices),
        kv_heads=max(1, model.kv_heads // devices),
        head_dim=model.head_dim,
        intermediate=max(1, model.intermediate // devices),
        vocab=max(1, model.vocab // devices),
        gate=2 if model.gated else 1,
    )


def graph_size(tokens: int) -> int:
    """The captured size that a batch is padded to: as vLLM captures them (1, 2, 4, every 8 to 256, every 16 to 512); a larger
    batch runs as it is."""
    if tokens <= 2:
        return tokens
    if tokens <= 4:
        return 4
    step = 8 if tokens <= 256 else 16
    return tokens if tokens > 512 else -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class Batch:
    """An iteration as attention sees it. chunk: queries of all rows that have more than one; pairs: of a query and a position
    it attends to, of these; longest: the KV of their longest row. decodes: rows of one query; decodes_kv, decode_longest: the
    KV before all of them, and the most before one."""

    tokens: int
    chunk: int
    pairs: float
    longest: int
    decodes: int
    decodes_kv: int
    decode_longest: int

    @property
    def decode_kv(self) -> float:
        """The mean KV before a decode."""
        return self.decodes_kv / self.decodes if self.decodes else 0.0

    @staticmethod
    def of(runs: Iterable[Run], window: int | None, others: Decodes = NO_DECODES) -> Batch:
        """As layers with that window see it; None: those that attend to everything. others: decodes beside these rows."""
        chunk, pairs, longest = 0, 0.0, 0
        decodes, decode_kv, decode_longest = others
        for start, stop in runs:
            queries = stop - start
            before = start if window is None else min(start, window - 1)
            if queries == 1:
                decodes += 1
                decode_kv += before
                if before > decode_longest:
                    decode_longest = before
            else:
                chunk += queries
                pairs += attended_pairs(start, stop, window)
                longest = max(longest, before + queries)
        return Batch(chunk + decodes, chunk, pairs, longest, decodes, decode_kv, decode_longest)

    def following(self, most: int) -> Batch:
        """So many following iterations, in columns: each row goes on by as many positions as it has. At most one has
        several."""
        steps: Any = np.arange(1, most + 1)
        return replace(
            self,
            pairs=self.pairs + steps * self.chunk * self.chunk,
            longest=self.longest + steps * self.chunk,
            decodes_kv=self.decodes_kv + steps * self.decodes,
            decode_longest=self.decode_longest + steps if self.decodes else 0,
        )


class _Kernels:
    """Linear layers and the head by one table, from whose shape times are scaled to another one on the same card."""

    def __init__(self, table: KernelTable, shape: Shape, hardware: HardwareSpec, model: ModelSpec) -> None:
        self._table, self._shape, self._hardware, self._layers = table, shape, hardware, model.layers
        self._experts = model.experts
        self.most_tokens = next(iter(table.layers.values())).last
        absent = set() if model.rotary else {"rotary_emb"}
        absent |= set() if model.model_type in ("qwen3", "qwen3_moe") else {"qk_norm"}
        once = {"embedding", "final_layernorm"}
        self._each_layer = [
            (name, curve, 2 if name == "layernorm" else 1)
            for name, curve in table.layers.items()
            if name not in once | absent
        ]
        self._once = [(name, curve) for name, curve in table.layers.items() if name in once]
        self._sampler = nearest(_SAMPLER_CARD, shape)

    def layers_s(self, tokens: int) -> float:
        each = {name: times * self._scaled(name, curve, tokens) for name, curve, times in self._each_layer}
        layer, once = sum(each.values()), sum(self._scaled(name, curve, tokens) for name, curve in self._once)
        if (e := self._experts) is None:
            return self._layers * layer + once
        dense = sum(each[name] for name in _MLP)
        return self._layers * layer + e.layers * (self._routed_s(tokens, e) - dense) + once

    def _routed_s(self, tokens: int, e: Experts) -> float:
        """The experts of one layer, and what every token passes beside them. A grouped product is taken to be as near to its
        roofline as the measured one of as many rows as an expert has."""
        wanted = self._shape
        touched, sent = e.touched(tokens), tokens * e.active
        curves, rows = self._table.layers, max(1, round(sent / touched))
        router = max(_LAUNCH_S, self._product_s((wanted.hidden, e.count), tokens))
        seconds, gpus = router, self._hardware.gpus
        for kernel in ("gate_up_proj", "down_proj"):
            inner, outer = _MATRICES[kernel](replace(wanted, intermediate=max(1, e.intermediate // gpus)))
            near = curves[kernel].at(rows) / self._product_s(_MATRICES[kernel](self._table.shape), rows)
            seconds += max(near * self._product_s((inner, outer), sent, touched), _LAUNCH_S)
            if e.shared:
                shared = _MATRICES[kernel](replace(wanted, intermediate=max(1, e.shared // gpus)))
                near = curves[kernel].at(tokens) / self._product_s(_MATRICES[kernel](self._table.shape), tokens)
                seconds += max(near * self._product_s(shared, tokens), _LAUNCH_S)
        width, measured = wanted.gate * (e.active * e.intermediate + e.shared) // gpus, self._table.shape
        least, activation = curves["act_fn"].at(1), curves["act_fn"].at(tokens)
        return seconds + least + (activation - least) * width / _WIDTHS["act_fn"](measured)

    def head_s(self, sampled: int) -> float:
        if not sampled:
            return 0.0
        if self._table.heads:
            return sum(self._scaled(name, curve, sampled) for name, curve in self._table.heads.items())
        logits = self._scaled("gate_up_proj", self._table.layers["gate_up_proj"], sampled, to="lm_head")
        return logits + self._sampler.heads["sampler"].at(sampled)

    def _scaled(self, kernel: str, curve: Curve, rows: int, to: str | None = None) -> float:
        """A matrix product by the ratio of the rooflines; another kernel by its width, beyond what one row takes anyway."""
        seconds, measured, wanted = curve.at(rows), self._table.shape, self._shape
        if kernel in _MATRICES:
            ratio = self._product_s(_MATRICES[to or kernel](wanted), rows) / self._product_s(
                _MATRICES[kernel](measured), rows
            )
            return seconds if ratio == 1 else max(seconds * ratio, min(seconds, _LAUNCH_S))
        least = curve.at(1)
        return least + (seconds - least) * _WIDTHS[kernel](wanted) / _WIDTHS[kernel](measured)

    def _product_s(self, sizes: tuple[int, int], rows: int, matrices: float = 1) -> float:
        """The roofline of so many rows, each through one of so many matrices."""
        inner, outer = sizes
        moved = 2 * (matrices * inner * outer + rows * (inner + outer))
        return max(2 * rows * inner * outer / self._hardware.flops, moved / self._hardware.memory_bw)


_LAUNCH_S = 2e-6  # no kernel of the tables takes less

_MLP = ("gate_up_proj", "down_proj", "act_fn")

_MATRICES: Mapping[str, Callable[[Shape], tuple[int, int]]] = {
    "qkv_proj": lambda s: (s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim),
    "o_proj": lambda s: (s.heads * s.head_dim, s.hidden),
    "gate_up_proj": lambda s: (s.hidden, s.gate * s.intermediate),
    "down_proj": lambda s: (s.intermediate, s.hidden),
    "lm_head": lambda s: (s.hidden, s.vocab),
}
_WIDTHS: Mapping[str, Callable[[Shape], int]] = {
    "embedding": lambda s: s.hidden,
    "layernorm": lambda s: s.hidden,
    "final_layernorm": lambda s: s.hidden,
    "rotary_emb": lambda s: (s.heads + s.kv_heads) * s.head_dim,
    "qk_norm": lambda s: (s.heads + s.kv_heads) * s.head_dim,
    "act_fn": lambda s: s.gate * s.intermediate,
    "sampler": lambda s: s.vocab,
}


class MeasuredAttention:
    """From a card's grid. The second value that `seconds` returns is how far the batch lies beyond the grid, 1 within it."""

    def __init__(self, table: KernelTable, shape: Shape, hardware: HardwareSpec) -> None:
        assert table.attention is not None
        self._grid: AttentionGrid = table.attention
        self._table, self._shape, self._hardware = table, shape, hardware
        self._skew = table.skew or 0.0

    def seconds(self, batch: Batch) -> tuple[float, float]:
        decodes, chunk = batch.decodes, batch.chunk
        kv = batch.pairs / chunk - (chunk + 1) / 2 if chunk else 0.0
        seconds, reach = self._at(chunk, max(0.0, kv), decodes, batch.decode_kv)
        if not chunk and batch.decode_longest > batch.decode_kv:
            longest, further = self._at(chunk, max(0.0, kv), decodes, batch.decode_longest)
            seconds += self._skew * (longest - seconds)
            reach = max(reach, further) if further > reach else reach
        if kv < 0:  # several prompts: less work than one of as many queries
            alone, _ = self._at(chunk, 0.0, 0, 0.0)
            less, _ = self._at(max(1.0, math.sqrt(2 * batch.pairs)), 0.0, 0, 0.0)
            seconds -= alone - less
        return seconds, reach

    def describe(self) -> dict[str, Any]:
        shape = self._table.shape
        scaled_from = None if _same_attention(shape, self._shape) else asdict(shape)
        return {"table": self._table.name, "scaled_from": scaled_from}

    def _at(self, chunk: float, kv: float, decodes: int, decode_kv: float) -> tuple[float, float]:
        if decodes:
            decode_kv = max(decode_kv, 1.0)
        asked = (chunk, kv, decodes, decode_kv)
        grid, within = self._grid, self._grid.clamped(*asked)
        seconds = grid.at(*within)
        reach = 1.0
        if within != asked:
            work, known = self._work(self._shape, *asked), self._work(self._shape, *within)
            seconds *= work / known
            reach = work / known
        elif not grid.covers(*asked):
            reach = 2.0
        if not _same_attention(self._table.shape, self._shape):
            seconds *= self._work(self._shape, *asked) / self._work(self._table.shape, *asked)
        return seconds, reach

    def _work(self, shape: Shape, chunk: float, kv: float, decodes: float, decode_kv: float) -> float:
        """Roofline seconds."""
        pairs, row = chunk * (kv + (chunk + 1) / 2), 4 * shape.kv_heads * shape.head_dim
        compute = 4 * shape.heads * shape.head_dim * pairs / self._hardware.flops
        return (
            max(compute, row * (chunk + kv) / self._hardware.memory_bw)
            + row * decodes * (decode_kv + 1) / self._hardware.memory_bw
        )


def _same_attention(one: Shape, two: Shape) -> bool:
    return (one.heads, one.kv_heads, one.head_dim) == (two.heads, two.kv_heads, two.head_dim)


class AttentionFit(NamedTuple):
    """A roofline of the attention kernel, fitted to measured cards (FIT).

    In a batch with a chunk, rows of queries are computed in tiles of TILE, a decode's one as well, each tile by one
    multiprocessor: the work of all tiles at `compute` of the peak, or the longest one at `serial` of its processor's share.
    Decodes alone read their KV at `memory` of the bandwidth, and a chunk beside them spares none of it: where queries share
    little KV (no cards' tables have such a model), reading is what takes longest. *_floor_s: what a call takes anyway.
    """

    floor_s: float
    decode_floor_s: float
    compute: float
    serial: float
    memory: float


TILE = 64
FIT = AttentionFit(floor_s=1.401e-5, decode_floor_s=1.341e-5, compute=0.4797, serial=0.6618, memory=0.8775)
"""The least mean of logarithmic errors over the cells of an RTX 4090 and an RTX PRO 6000, each card weighing the same
(LLMServingSim 2.0, MIT; scipy's Nelder-Mead). Off by 25 and 14 % in the median, 6.5 and 6.2 % of decodes alone; fitted to one
card and held against the other, by 39 and 28 %, 7.4 and 12 %."""


class FittedAttention:
    """By AttentionFit, of which nothing lies beyond."""

    def __init__(self, shape: Shape, hardware: HardwareSpec, fit: AttentionFit = FIT) -> None:
        if not hardware.multiprocessors:
            raise ConfigError("hardware.terms.attention=fitted needs hardware.multiprocessors; set it.")
        self._shape, self._hardware, self._fit = shape, hardware, fit

    def seconds(self, batch: Batch) -> tuple[float, float]:
        return self.of(batch, max), 1.0

    def of(self, batch: Batch, larger: Callable[..., Any]) -> Any:
        """larger: of two numbers, or of two columns of numbers (Batch.following)."""
        fit, shape, h = self._fit, self._shape, self._hardware
        decodes_kv = batch.decodes * (batch.decode_kv + 1)  # over each one's own token and those before it
        reading = fit.decode_floor_s + decodes_kv * 4 * shape.kv_heads * shape.head_dim / (fit.memory * h.memory_bw)
        if not batch.chunk:
            return reading
        pair = 4 * shape.head_dim
        padded = batch.pairs + batch.chunk * (TILE - 1) / 2  # a tile computes the whole square at its end
        if batch.chunk < TILE:
            padded = larger(padded, TILE * batch.longest)
        work = pair * shape.heads * (padded + TILE * batch.decodes * (batch.decode_kv + 1))
        longest = pair * TILE * larger(batch.longest, batch.decode_longest + 1 if batch.decodes else 0)
        serial_s = longest * h.multiprocessors / (fit.serial * h.flops)
        computing = fit.floor_s + larger(work / (fit.compute * h.flops), serial_s)
        return larger(computing, reading) if batch.decodes else computing

    def describe(self) -> dict[str, Any]:
        return {"roofline": self._fit._asdict(), "fitted_to": "attention.csv of RTX 4090 and RTX PRO 6000"}


def _reduce_of(hardware: HardwareSpec) -> Callable[[int], float]:
    """Seconds of one all-reduce over so many bytes."""
    h = hardware
    if h.gpus == 1:
        return lambda size: 0.0
    if (card := h.terms["all_reduce"]) != "link":
        return all_reduce(card, h.gpus).at
    share = 2 * (h.gpus - 1) / h.gpus  # of a ring
    return lambda size: h.link_latency_s + share * size / h.link_bw
