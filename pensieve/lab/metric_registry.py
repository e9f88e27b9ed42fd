"""What each metric is: its unit, which way is better, the values that it can take, and whether conversations are paired.

Recording, comparison, claims, size maps, tables and figures ask here. A new metric is one entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Better = Literal["higher", "lower", "none"]
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
SUMMARIES = ("mean", *PERCENTILES)
"""Suffixes of a series: one value a turn, a token or a gap, summarised over a trial."""


@dataclass(frozen=True, slots=True)
class Support:
    """The values that a quantity can take: low <= value <= high. It decides how an interval is made (statistics)."""

    low: float
    high: float


REAL = Support(-math.inf, math.inf)
NONNEGATIVE = Support(0.0, math.inf)
SHARE = Support(0.0, 1.0)
PERCENT = Support(0.0, 100.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as in table `metric`, or of a column of table `turn`. better: "none" where neither way is.
    per_conversation: two trials are compared by the mean of each conversation, not by one value a trial."""

    name: str
    unit: str
    better: Better
    support: Support = NONNEGATIVE
    per_conversation: bool = False


def _series(name: str, unit: str = "ms", per_conversation: bool = False) -> Iterator[Metric]:
    """A time by itself and its summaries. Percentiles of two trials are compared by trial."""
    whole = Metric(name, unit, "lower", NONNEGATIVE, per_conversation)
    yield whole
    for suffix in SUMMARIES:
        yield replace(whole, name=f"{name}_{suffix}", per_conversation=per_conversation and suffix == "mean")


def _metrics(unit: str, better: Better, *names: str, support: Support = NONNEGATIVE) -> Iterator[Metric]:
    return (Metric(name, unit, better, support) for name in names)


_ABOVE_MINUS_ALL = Support(-100.0, math.inf)
_BYTES = ("h2d_bytes", "d2h_bytes", "sent_bytes", "received_bytes")
_ALL = (
    # Times of turns
    *_series("ttft_ms", per_conversation=True),
    *_series("latency_ms", per_conversation=True),
    *_series("normalized_latency_ms", "ms/token", per_conversation=True),
    *_series("queue_ms", per_conversation=True),
    *_series("tpot_ms"),
    *_series("itl_ms"),
    *_series("warmup_ms"),
    *_series("total_ms"),
    *_series("per_token_ms", "ms/token"),
    *_metrics("ms", "lower", "send_lag_ms_p99"),
    *_metrics("ms", "lower", "stream_overhead_ms", support=REAL),
    *_metrics("%", "lower", "ttft_degradation_pct", support=_ABOVE_MINUS_ALL),
    # Rates of work
    *_metrics("requests/s", "higher", "throughput_req_s", "goodput_req_s"),
    *_metrics("tokens/s", "higher", "throughput_output_tok_s", "throughput_total_tok_s", "makespan_output_tok_s"),
    *_metrics("share", "higher", "slo_attainment", support=SHARE),
    # Where history was found
    *_metrics("share", "higher", "gpu_hit_rate", "cpu_hit_rate", "disk_hit_rate", "prompt_hit_rate", support=SHARE),
    *_metrics("share", "higher", "bound_hit_rate", "bound_prompt_hit_rate", support=SHARE),
    *_metrics("share", "lower", "miss_rate", support=SHARE),
    # Work of the cache and of the scheduler; the configuration decides how many replicas fail
    *_metrics("s", "lower", "bound_recomputed_s", "recomputed_s", "prefill_s"),
    *_metrics("s", "higher", "saved_s"),
    *_metrics("tokens", "lower", "recomputed_tokens"),
    *_metrics("bytes", "lower", "swapped_in_bytes", "swapped_out_bytes", "plan_bytes_mean", *_BYTES),
    *_metrics("bytes/token", "lower", "wire_bytes_per_token", *(f"{name}_per_token" for name in _BYTES)),
    *_metrics("chunks", "lower", "evicted_chunks", "dropped_chunks"),
    *_metrics("requests", "lower", "suspended_requests", "deferred_requests", "restarted_requests"),
    *_metrics("turns", "none", "moved_turns", "migrated_turns"),
    *_metrics("failures", "none", "replica_failures"),
    *_metrics("ms", "lower", "schedule_ms_mean", "plan_ms_mean"),
    *_metrics("GiB s", "lower", "held_gib_s", "held_idle_gib_s"),
    # Turns
    *_metrics("turns", "none", "turns"),  # by status
    *_metrics("turns", "lower", "oom_turns"),
    # Start
    *_metrics("s", "lower", "load_s"),
    *_metrics("ms", "lower", "engine_warmup_ms", "process_load_ms_mean", "process_start_ms_mean"),
    # The device
    *_metrics("%", "none", "gpu_util_pct", "gpu_mem_util_pct", "cpu_util_pct", support=PERCENT),
    *_metrics("W", "lower", "power_w"),
    *_metrics("J/token", "lower", "energy_j_per_token"),
    *_metrics("bytes", "lower", "device_peak_bytes", "allocator_peak_bytes", "processes_peak_bytes"),
    *_metrics("GB/s", "none", "memory_bw_gbps"),
    # How far a simulation is from what it simulates
    *_metrics("%", "none", "cost_model_error_pct", support=_ABOVE_MINUS_ALL),
    *_metrics("%", "none", "fidelity_error_pct", support=_ABOVE_MINUS_ALL),
    *_metrics("ms", "none", "real_ms", "simulated_ms"),
    *_metrics("tokens/s", "none", "real_tok_s", "simulated_tok_s"),
    *_metrics("%", "none", "fidelity_limit_pct"),
    *_metrics("requests", "lower", "fidelity_left_out"),
    # Benchmarks; ttft_ms_p50_turn_ stands before the turn's number, bound is 1 where the count of agents is no bound
    *_metrics("ms", "lower", "time_ms", "step_ms", "prefill_ms", "restore_ms", "attention_ms", "host_ms"),
    *_metrics("ms", "lower", "transfer_ms", "compute_ms", "ttft_ms_p50_turn_"),
    *_metrics("GB/s", "higher", "swap_in_gb_s"),
    *_metrics("tok/s", "higher", "throughput_output_tok_s_at_equal_p90"),
    *_metrics("agents", "higher", "agents_carried", "refused_at"),
    *_metrics("", "none", "bound"),
    *_metrics("x", "higher", "speedup", "times_stateless"),
    *_metrics("x", "lower", "several_over_one", "ratio_of_best", "q1", "q3"),
    *_metrics("x", "none", "roofline_ratio", "recompute_over_profile"),
    *_metrics("chunks", "none", "recomputed_chunks"),
    *_metrics("%", "higher", "overlap_pct", "saving_pct", support=REAL),
    *_metrics("%", "none", "predicted_saving_pct", support=REAL),
    *_metrics("%", "lower", "slower_pct", support=REAL),
    *_metrics("%", "lower", "gpu_idle_pct", support=PERCENT),
    *_metrics("%", "higher", "matrix_rate_pct"),
)

METRICS = {metric.name: metric for metric in _ALL}
assert len(METRICS) == len(_ALL), "a metric is stated twice"


def is_known(name: str) -> bool:
    return name in METRICS or name.rstrip("0123456789") in METRICS


def metric_of(name: str) -> Metric:
    """The entry of a metric. Of a name that only an older database has nothing is known: no unit, no direction."""
    return METRICS.get(name) or METRICS.get(name.rstrip("0123456789")) or Metric(name, "", "none", REAL)
