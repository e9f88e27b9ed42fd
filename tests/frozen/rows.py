"""What is frozen of a scenario: rows by kind, each kind with the columns that are named here and no others.

A column that is added to a table changes nothing here; to take one out of these lists is a decision, and needs a new freeze.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

TURN = (
    "session", "turn", "iteration", "label", "phase", "stream", "status", "finish_reason", "prompt_tokens", "output_tokens",
    "history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens", "recomputed_tokens", "shared_hit_tokens",
    "new_tokens", "resumed_swapped_tokens", "resumed_recomputed_tokens", "cpu_recomputed_tokens", "h2d_bytes", "d2h_bytes",
    "sent_bytes", "received_bytes",
)  # fmt: skip
TIMES = (
    "session", "turn", "intended_s", "sent_s", "arrived_s", "admitted_s", "first_token_s", "finished_s", "queue_ms",
    "ttft_ms", "latency_ms", "compute_ms", "transfer_ms",
)  # fmt: skip
MISS = ("session", "turn", "cause", "evicted_by", "tokens", "ms")
HOLDING = ("session", "tier", "gib_s", "saved_s", "idle_gib_s")
COUNTERS = (
    "evicted_chunks", "dropped_chunks", "swapped_in_bytes", "swapped_out_bytes", "suspended_requests", "deferred_requests",
    "steps", "failed_steps", "forgotten_sessions", "batched_tokens", "predicted_ms", "predictable_ms", "compute_ms",
    "stall_ms", "h2d_bytes", "d2h_bytes",
)  # fmt: skip
METRICS = (
    "recomputed_tokens", "recomputed_s", "swapped_in_bytes", "swapped_out_bytes", "evicted_chunks", "dropped_chunks",
    "suspended_requests", "deferred_requests", "h2d_bytes", "d2h_bytes", "moved_turns", "restarted_requests",
    "replica_failures", "bound_hit_rate", "bound_recomputed_s",
)  # fmt: skip
"""Of a trial, whose system nobody but the trial sees: its counts, as table `metric` has them."""

KINDS = ("turns", "times", "tokens", "counters", "misses", "holdings", "other")


@dataclass(slots=True)
class Rows:
    """cancelled: requests by the phase they were cancelled in. drawn: [key, position, token, margin], by torch."""

    turns: list[list[Any]]
    times: list[list[Any]]
    tokens: list[list[Any]]
    counters: list[list[Any]]
    misses: list[list[Any]]
    holdings: list[list[Any]]
    other: list[list[Any]] = field(default_factory=list)
    cancelled: dict[str, int] = field(default_factory=dict)
    drawn: list[list[Any]] = field(default_factory=list)

    def frozen(self, tie: float | None = None) -> dict[str, Any]:
        """A digest a kind, and totals for people. tie: margins below it are ties, whose token another processor may draw
        otherwise; None: where none is near."""
        if tie is None:
            tie = self._apart()
        found = [dict(zip(TURN, turn, strict=True)) for turn in self.turns]
        totals: dict[str, Any] = dict(sorted(Counter(turn["status"] for turn in found).items()))
        for kind in ("output", "gpu_hit", "cpu_hit", "disk_hit", "shared_hit", "recomputed"):
            totals[f"{kind}_tokens"] = sum(turn[f"{kind}_tokens"] or 0 for turn in found)
        totals["misses"] = len(self.misses)
        totals["suspended_requests"] = dict(self.counters).get("suspended_requests")
        if self.cancelled:
            totals["cancelled in"] = self.cancelled
        return {
            "totals": {k: v for k, v in totals.items() if v},
            **{kind: _digest(getattr(self, kind)) for kind in KINDS},
            **({"tie": tie, "drawn": self._drawn(tie)} if tie else {}),
        }

    def _apart(self) -> float | None:
        """The middle of the widest gap between margins of about a thousandth: processors differ by a hundredth of that."""
        margins = sorted({1e-4, 2e-3, *(row[3] for row in self.drawn if 1e-4 < row[3] < 2e-3)})
        low, high = max(pairwise(margins), key=lambda pair: pair[1] - pair[0])
        return (low + high) / 2 if self.drawn else None

    def _drawn(self, tie: float) -> str:
        return _digest([[*row[:2], row[2] if row[3] > tie else None] for row in self.drawn])


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
