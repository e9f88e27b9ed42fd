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
    Metric("ttft_degradation_pct", "%", "lower", Support(-100.0, math.inf)),
    Metric("stream_overhead_ms", "ms", "lower", REAL),
    Metric("send_lag_ms_p99", "ms", "lower"),
    # Rates of work
    Metric("throughput_req_s", "requests/s", "higher"),
    Metric("throughput_output_tok_s", "tokens/s", "higher"),
    Metric("throughput_total_tok_s", "tokens/s", "higher"),
    Metric("makespan_output_tok_s", "tokens/s", "higher"),
    Metric("goodput_req_s", "requests/s", "higher"),
    Metric("slo_attainment", "share", "higher", SHARE),
    # Where history was found
    Metric("gpu_hit_rate", "share", "higher", SHARE),
    Metric("cpu_hit_rate", "share", "higher", SHARE),
    Metric("disk_hit_rate", "share", "higher", SHARE),
    Metric("prompt_hit_rate", "share", "higher", SHARE),
    Metric("miss_rate", "share", "lower", SHARE),
    Metric("bound_hit_rate", "share", "higher", SHARE),
    Metric("bound_prompt_hit_rate", "share", "higher", SHARE),
    Metric("bound_recomputed_s", "s", "lower"),
    # Work of the cache and of the scheduler
    Metric("recomputed_tokens", "tokens", "lower"),
    Metric("recomputed_s", "s", "lower"),
    Metric("swapped_in_bytes", "bytes", "lower"),
    Metric("swapped_out_bytes", "bytes", "lower"),
    Metric("evicted_chunks", "chunks", "lower"),
    Metric("dropped_chunks", "chunks", "lower"),
    Metric("suspended_requests", "requests", "lower"),
    Metric("deferred_requests", "requests", "lower"),
    Metric("restarted_requests", "requests", "lower"),
    Metric("moved_turns", "turns", "none"),
    Metric("migrated_turns", "turns", "none"),
    Metric("replica_failures", "failures", "none"),  # the configuration decides how many
    *(
        metric
        for name in ("h2d_bytes", "d2h_bytes", "sent_bytes", "received_bytes")
        for metric in (Metric(name, "bytes", "lower"), Metric(f"{name}_per_token", "bytes/token", "lower"))
    ),
    Metric("wire_bytes_per_token", "bytes/token", "lower"),
    Metric("schedule_ms_mean", "ms", "lower"),
    Metric("plan_bytes_mean", "bytes", "lower"),
    Metric("plan_ms_mean", "ms", "lower"),
    Metric("held_gib_s", "GiB s", "lower"),
    Metric("held_idle_gib_s", "GiB s", "lower"),
    Metric("saved_s", "s", "higher"),
    Metric("prefill_s", "s", "lower"),
    # Turns
    Metric("turns", "turns", "none"),  # by status
    Metric("oom_turns", "turns", "lower"),
    # Start
    Metric("load_s", "s", "lower"),
    Metric("engine_warmup_ms", "ms", "lower"),
    Metric("process_load_ms_mean", "ms", "lower"),
    Metric("process_start_ms_mean", "ms", "lower"),
    # The device
    Metric("gpu_util_pct", "%", "none", PERCENT),
    Metric("gpu_mem_util_pct", "%", "none", PERCENT),
    Metric("cpu_util_pct", "%", "none", PERCENT),
    Metric("power_w", "W", "lower"),
    Metric("energy_j_per_token", "J/token", "lower"),
    Metric("device_peak_bytes", "bytes", "lower"),
    Metric("allocator_peak_bytes", "bytes", "lower"),
    Metric("processes_peak_bytes", "bytes", "lower"),
    Metric("memory_bw_gbps", "GB/s", "none"),
    Metric("sampling_cost_pct", "%", "lower"),
    # How far a simulation is from what it simulates
    Metric("cost_model_error_pct", "%", "none", Support(-100.0, math.inf)),
    Metric("real_ms", "ms", "none"),
    Metric("simulated_ms", "ms", "none"),
    Metric("real_tok_s", "tokens/s", "none"),
    Metric("simulated_tok_s", "tokens/s", "none"),
    Metric("fidelity_error_pct", "%", "none", Support(-100.0, math.inf)),
    Metric("fidelity_at_once_error_pct", "%", "none", Support(-100.0, math.inf)),
    Metric("fidelity_limit_pct", "%", "none"),
    Metric("fidelity_left_out", "requests", "lower"),
    Metric("fidelity_waiting_pct", "%", "none", PERCENT),
    # Benchmarks
    Metric("time_ms", "ms", "lower"),
    Metric("step_ms", "ms", "lower"),
    Metric("prefill_ms", "ms", "lower"),
    Metric("restore_ms", "ms", "lower"),
    Metric("attention_ms", "ms", "lower"),
    Metric("host_ms", "ms", "lower"),
    Metric("transfer_ms", "ms", "lower"),
    Metric("compute_ms", "ms", "lower"),
    Metric("ttft_ms_p50_turn_", "ms", "lower"),  # with the turn's number
    Metric("swap_in_gb_s", "GB/s", "higher"),
    Metric("throughput_output_tok_s_at_equal_p90", "tok/s", "higher"),
    Metric("agents_carried", "agents", "higher"),
    Metric("refused_at", "agents", "higher"),
    Metric("bound", "", "none"),  # 1 where the count of agents is no bound
    Metric("speedup", "x", "higher"),
    Metric("times_stateless", "x", "higher"),
    Metric("several_over_one", "x", "lower"),
    Metric("ratio_of_best", "x", "lower"),
    Metric("q1", "x", "lower"),
    Metric("q3", "x", "lower"),
    Metric("roofline_ratio", "x", "none"),
    Metric("recompute_over_profile", "x", "none"),
    Metric("recomputed_chunks", "chunks", "none"),
    Metric("overlap_pct", "%", "higher", REAL),
    Metric("saving_pct", "%", "higher", REAL),
    Metric("predicted_saving_pct", "%", "none", REAL),
    Metric("slower_pct", "%", "lower", REAL),
    Metric("gpu_idle_pct", "%", "lower", PERCENT),
    Metric("matrix_rate_pct", "%", "higher"),
)

METRICS = {metric.name: metric for metric in _ALL}
assert len(METRICS) == len(_ALL), "a metric is stated twice"


def is_known(name: str) -> bool:
    return name in METRICS or name.rstrip("0123456789") in METRICS


def metric_of(name: str) -> Metric:
    """The entry of a metric. Of a name that only an older database has nothing is known: no unit, no direction."""
    return METRICS.get(name) or METRICS.get(name.rstrip("0123456789")) or Metric(name, "", "none", REAL)
