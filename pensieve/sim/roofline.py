"""Seconds from arithmetic: the cost model of simulated hardware.

Linear layers and attention are separate kernels, each bound by the slower of its arithmetic and its memory traffic. Layers
that attend to a window only are counted apart from those that attend to all. Work is split evenly over the GPUs of a
tensor-parallel group, which adds two all-reduces a layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pensieve.core.plan import NO_DECODES, Decodes
from pensieve.specs import HardwareSpec, ModelSpec

Run = tuple[int, int]
Seconds = TypeVar("Seconds", float, NDArray[np.float64])
_Counts = tuple[int, int, int]
"""Query positions, pairs of a query and a position it attends to, and positions that are read."""


class Machine(ABC):
    """What every model of a machine's arithmetic has: its links, and what an iteration costs anyway."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        self.model, self.hardware, self.chunk_tokens = model, hardware, chunk_tokens
        self._block_bytes = chunk_tokens * model.kept_bytes_per_token
        self.recompute_s = cache(self._chunk_s)  # policies and ledgers ask again and again

    @abstractmethod
    def _chunk_s(self, context_tokens: int) -> float:
        """One chunk that ends there, as part of a longer prefill."""

    def transfer_s(self, blocks: int, to_gpu: bool, runs: int = 1) -> float:
        """See SimulatedCost. Copy engines take pieces one by one: a run has one a layer. Every GPU of a group moves its own
        share of each at once."""
        h = self.hardware
        rate = h.h2d_bw if to_gpu else h.d2h_bw
        return blocks * self._block_bytes / h.gpus / rate + runs * self.model.layers * h.fragment_s

    def step_s(self) -> float:
        return self.hardware.step_overhead_s

    def load_s(self) -> float:
        return self.transfer_s(1, to_gpu=True)


class Roofline(Machine):
    """What the model and the machine say is read once: an iteration costs a few products."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        super().__init__(model, hardware, chunk_tokens)
        self._linear_flops = 2 * int(model.layers_parameters(0))
        self._head_flops = model.head_flops
        self._pair_flops = model.attention_flops_per_pair
        self._active_flops = model.linear_flops_per_token
        self._least_bytes = model.read_parameters(1) * model.dtype_bytes
        self._experts = model.experts
        dense = model.layers_parameters(0)
        self._expert_parameters = model.layers_parameters(1) - dense  # one expert of each layer that has any
        self._layers_bytes = dense * model.dtype_bytes
        self._head_bytes = model.vocab * model.hidden * model.dtype_bytes
        self._kv_bytes = model.kv_bytes_per_token
        self._reduces = 2 * model.layers if hardware.gpus > 1 else 0
        self._reduced_bytes = self._reduces * model.hidden * model.dtype_bytes
        self._windowed = model.windowed_layers / model.layers
        self._state_flops = model.states.flops if model.states else 0
        self._state_bytes = 2 * model.state_bytes  # read and written
        self._flops_s = hardware.flops * hardware.compute_efficiency
        self._bytes_s = hardware.memory_bw * hardware.memory_efficiency

    def iteration_s(self, runs: Iterable[Run], sampled: int, decodes: Decodes = NO_DECODES) -> float:
        """See SimulatedCost. With a window the length of each decode counts: they are among the runs."""
        runs, share = tuple(runs), self._windowed
        assert not (share and decodes.requests)
        counts = self._counts(runs, None, decodes)
        if not counts[0]:
            return 0.0
        attention = self._attention_s(*counts)
        if share:
            attention = (1 - share) * attention + share * self._attention_s(
                *self._counts(runs, self.model.sliding_window)
            )
        return self._sum_s(counts[0], attention, len(runs) + decodes.requests, sampled)

    def following_s(self, runs: Sequence[Run], sampled: int, decodes: Decodes, most: int) -> NDArray[np.float64] | None:
        """Without a window both counts of an iteration grow by a constant."""
        if self._windowed:
            return None
        tokens, pairs, kv_tokens = self._counts(runs, None, decodes)
        more = decodes.requests + sum([(stop - start) ** 2 for start, stop in runs])
        steps = np.arange(1, most + 1)
        flops, moved = (pairs + steps * more) * self._pair_flops, (kv_tokens + (steps + 1) * tokens) * self._kv_bytes
        attention = np.maximum(flops / self._flops_s, moved / self._bytes_s) / self.hardware.gpus
        return self._sum_s(tokens, attention, len(runs) + decodes.requests, sampled)

    def ran(self, iterations: int) -> None:
        """Do nothing: nothing was measured."""

    def _counts(self, runs: Iterable[Run], window: int | None, decodes: Decodes = NO_DECODES) -> _Counts:
        tokens = decodes.requests
        pairs = kv_tokens = decodes.before + tokens
        for start, stop in runs:
            tokens += stop - start
            pairs += attended_pairs(start, stop, window)
            kv_tokens += stop if window is None else min(stop, stop - start + window - 1)
        return tokens, pairs, kv_tokens

    def _sum_s(self, tokens: int, attention: Seconds, rows: int, sampled: int) -> Seconds:
        """Layers with states read and write the state of each row, whatever its length."""
        seconds = (
            self._linear_s(tokens, sampled) + attention + self._all_reduce_s(tokens) + self.hardware.step_overhead_s
        )
        if self._state_bytes:
            seconds += self._bound(tokens * self._state_flops, rows * self._state_bytes)
        return seconds

    def _attention_s(self, tokens: int, pairs: int, kv_tokens: int) -> float:
        """If all layers were of this kind."""
        return self._bound(pairs * self._pair_flops, (kv_tokens + tokens) * self._kv_bytes)

    def _linear_s(self, tokens: int, sampled: int) -> float:
        weights = self._layers_bytes + (self._head_bytes if sampled else 0)
        routed = self._routed_s(tokens) if self._experts else 0.0
        return routed + self._bound(tokens * self._linear_flops + sampled * self._head_flops, weights)

    def _routed_s(self, tokens: int) -> float:
        """The experts' products are kernels of their own: the others may be bound by arithmetic while these read weights."""
        assert self._experts is not None
        flops = 2 * tokens * self._experts.active * self._expert_parameters
        return self._bound(flops, self._experts.touched(tokens) * self._expert_parameters * self.model.dtype_bytes)

    def _chunk_s(self, context_tokens: int) -> float:
        size, share = self.chunk_tokens, self._windowed
        stop = max(context_tokens, size)
        pairs: float = attended_pairs(stop - size, stop, None)
        if share:
            pairs += share * (attended_pairs(stop - size, stop, self.model.sliding_window) - pairs)
        linear = self._bound(size * self._active_flops, 0) + self._bound(size * self._state_flops, 0)
        return linear + self._bound(pairs * self._pair_flops, 0)

    def weights_s(self) -> float:
        return self._bound(0, self._least_bytes + self._head_bytes)

    def describe(self) -> dict[str, Any]:
        return {"kind": "roofline", "hardware": self.hardware.name, "load_s": self.load_s()}

    def extrapolated(self) -> dict[str, Any]:
        return {}  # nothing was measured

    def _bound(self, flops: float, moved_bytes: float) -> float:
        return max(flops / self._flops_s, moved_bytes / self._bytes_s) / self.hardware.gpus

    def _all_reduce_s(self, tokens: int) -> float:
        if not self._reduces:
            return 0.0
        h = self.hardware
        moving = 2 * (h.gpus - 1) / h.gpus * (tokens * self._reduced_bytes) / h.link_bw
        return moving + self._reduces * h.link_latency_s


def attended_pairs(start: int, stop: int, window: int | None = None) -> int:
    """Pairs of the queries [start, stop) and what each attends to: all up to itself, or a window's last positions of it."""
    if window is None or stop <= window:
        return (start + stop + 1) * (stop - start) // 2
    filled = max(start, window)  # from here on each has a whole window
    return (start + filled + 1) * (filled - start) // 2 + (stop - filled) * window
