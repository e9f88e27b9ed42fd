"""Seconds from arithmetic: the cost model of simulated hardware.

Linear layers and attention are separate kernels, each bound by the slower of its arithmetic and its memory traffic.
Work is split evenly over the GPUs of a tensor-parallel group, which adds two all-reduces a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pensieve.specs import HardwareSpec, ModelSpec

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Roofline:
    model: ModelSpec
    hardware: HardwareSpec
    chunk_tokens: int

    def iteration_s(self, runs: Iterable[Run], sampled: int) -> float:
        """One iteration over attention rows of queries [start, stop) each; logits of `sampled` positions."""
        m, tokens, attention_flops, kv_tokens = self.model, 0, 0, 0
        for start, stop in runs:
            tokens += stop - start
            attention_flops += m.attention_flops(stop - start, stop)
            kv_tokens += min(stop, m.sliding_window) if m.sliding_window else stop
        if not tokens:
            return 0.0
        linear_flops = tokens * m.linear_flops_per_token + sampled * m.head_flops
        weights = (m.layers * m.layer_parameters + (m.vocab * m.hidden if sampled else 0)) * m.dtype_bytes
        linear = self._bound(linear_flops, weights)
        attention = self._bound(attention_flops, (kv_tokens + tokens) * m.kv_bytes_per_token)
        return linear + attention + self._all_reduce_s(tokens) + self.hardware.step_overhead_s

    def transfer_s(self, blocks: int, to_gpu: bool) -> float:
        """Blocks over the link between CPU and GPU; every GPU of the group moves its own share at once."""
        size = blocks * self.chunk_tokens * self.model.kv_bytes_per_token / self.hardware.gpus
        return size / (self.hardware.h2d_bw if to_gpu else self.hardware.d2h_bw)

    def recompute_s(self, context_tokens: int) -> float:
        m, size = self.model, self.chunk_tokens
        attention = self._bound(m.attention_flops(size, max(context_tokens, size)), 0)
        return self._bound(size * m.linear_flops_per_token, 0) + attention

    def step_s(self) -> float:
        return self.hardware.step_overhead_s

    def weights_s(self) -> float:
        m = self.model
        return self._bound(0, (m.layers * m.layer_parameters + m.vocab * m.hidden) * m.dtype_bytes)

    def load_s(self) -> float:
        return self.transfer_s(1, to_gpu=True)

    def describe(self) -> dict[str, Any]:
        return {"kind": "roofline", "hardware": self.hardware.name, "load_s": self.load_s()}

    def _bound(self, flops: float, moved_bytes: float) -> float:
        h = self.hardware
        compute = flops / (h.flops * h.compute_efficiency)
        memory = moved_bytes / (h.memory_bw * h.memory_efficiency)
        return max(compute, memory) / h.gpus

    def _all_reduce_s(self, tokens: int) -> float:
        h = self.hardware
        if h.gpus == 1:
            return 0.0
        moved = 2 * self.model.layers * tokens * self.model.hidden * self.model.dtype_bytes
        return 2 * (h.gpus - 1) / h.gpus * moved / h.link_bw
