"""Each metric: what it is (recording, comparison, claims, size maps, tables and figures ask), and how it is made of records.

Which turns count: latencies and rates are over all measured turns (request.is_measured), so that each baseline answers for
the same turns; throughputs are over those that finished in the measurement window. Latencies are of completed turns; the
others are counted by status in `turns`, never dropped silently. Intervals count conversations. A number that these
records cannot give is a metric without a value, not a guess.

What counts cover: recomputed_tokens, h2d_bytes, sent_bytes and received_bytes are what was done for measured turns, summed
over them; so is recomputed_s, by the cost model, without what preempted requests computed a second time. d2h_bytes,
swapped_*_bytes, evicted_chunks, dropped_chunks, suspended_requests, deferred_requests, schedule_ms_mean, plan_*_mean and
cost_model_error_pct are of work that may be for no turn or for several, so they are the system's counts over the stretches
of the replay that window.MeasuredStretches defines: all but those in which only turns that prepare others are served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import Any, Literal

import numpy as np

from pensieve.core.plan import StartReport
from pensieve.errors import CapacityError, MemoryRanOut
from pensieve.lab.statistics import (
    NONNEGATIVE,
    PERCENT,
    REAL,
    SHARE,
    Estimate,
    Support,
    enough_for,
    estimate_mean,
    estimate_percentiles,
    estimate_rate,
    flat,
    nearest_rank,
    numbered,
    paired_ratio,
    rank,
    sums_of,
)
from pensieve.lab.turns import HITS, Floats, Mask, Places, Turns

Better = Literal["higher", "lower", "none"]
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
SUMMARIES = ("mean", *PERCENTILES)
"""Suffixes of a series: one value a turn, a token or a gap, summarised over a trial."""


# What each metric is. A new one is one entry, and the lines of summarise() that make it of the records.


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as in table `metric`, or of a column of table `turn`. better: "none" where neither way is.
    per_conversation: two trials are compared by the mean of each conversation, not by one value a trial."""

    name: str
    unit: str
    better: Better
    support: Support = NONNEGATIVE
    per_conversation: bool = False


def _summarised(name: str, unit: str = "ms", per_conversation: bool = False) -> Iterator[Metric]:
    """A time by itself and its summaries. Percentiles of two trials are compared by trial."""
    whole = Metric(name, unit, "lower", NONNEGATIVE, per_conversation)
    yield whole
    for suffix in SUMMARIES:
        yield replace(whole, name=f"{name}_{suffix}", per_conversation=per_conversation and suffix == "mean")


def _of_unit(unit: str, better: Better, *names: str, support: Support = NONNEGATIVE) -> Iterator[Metric]:
    return (Metric(name, unit, better, support) for name in names)


_ABOVE_MINUS_ALL = Support(-100.0, math.inf)
BYTES = ("h2d_bytes", "d2h_bytes", "sent_bytes", "received_bytes")
_ALL = (
    # Times of turns
    *_summarised("ttft_ms", per_conversation=True),
    *_summarised("latency_ms", per_conversation=True),
    *_summarised("normalized_latency_ms", "ms/token", per_conversation=True),
    *_summarised("queue_ms", per_conversation=True),
    *_summarised("tpot_ms"),
    *_summarised("itl_ms"),
    *_summarised("warmup_ms"),
    *_summarised("total_ms"),
    *_summarised("per_token_ms", "ms/token"),
    *_of_unit("ms", "lower", "send_lag_ms_p99"),
    *_of_unit("ms", "lower", "stream_overhead_ms", support=REAL),
    *_of_unit("%", "lower", "ttft_degradation_pct", support=_ABOVE_MINUS_ALL),
    # Rates of work
    *_of_unit("requests/s", "higher", "throughput_req_s", "goodput_req_s"),
    *_of_unit("tokens/s", "higher", "throughput_output_tok_s", "throughput_total_tok_s", "makespan_output_tok_s"),
    *_of_unit("share", "higher", "slo_attainment", support=SHARE),
    # Where history was found
    *_of_unit("share", "higher", "gpu_hit_rate", "cpu_hit_rate", "disk_hit_rate", "prompt_hit_rate", support=SHARE),
    *_of_unit("share", "higher", "bound_hit_rate", "bound_prompt_hit_rate", support=SHARE),
    *_of_unit("share", "lower", "miss_rate", support=SHARE),
    # Work of the cache and of the scheduler; the configuration decides how many replicas fail
    *_of_unit("s", "lower", "bound_recomputed_s", "recomputed_s", "prefill_s"),
    *_of_unit("s", "higher", "saved_s"),
    *_of_unit("tokens", "lower", "recomputed_tokens"),
    *_of_unit("bytes", "lower", "swapped_in_bytes", "swapped_out_bytes", *BYTES),
    *_of_unit("bytes/token", "lower", "wire_bytes_per_token", *(f"{name}_per_token" for name in BYTES)),
    *_of_unit("chunks", "lower", "evicted_chunks", "dropped_chunks"),
    *_of_unit("requests", "lower", "suspended_requests", "deferred_requests", "restarted_requests"),
    *_of_unit("turns", "none", "moved_turns"),
    *_of_unit("failures", "none", "replica_failures"),
    *_of_unit("ms", "lower", "schedule_ms_mean"),
    *_of_unit("GiB s", "lower", "held_gib_s", "held_idle_gib_s"),
    # Turns
    *_of_unit("turns", "none", "turns"),  # by status
    *_of_unit("turns", "lower", "oom_turns"),
    # Start
    *_of_unit("s", "lower", "load_s"),
    *_of_unit("ms", "lower", "engine_warmup_ms", "process_load_ms_mean", "process_start_ms_mean"),
    # The device
    *_of_unit("%", "none", "gpu_util_pct", "gpu_mem_util_pct", "cpu_util_pct", support=PERCENT),
    *_of_unit("W", "lower", "power_w"),
    *_of_unit("J/token", "lower", "energy_j_per_token"),
    *_of_unit("bytes", "lower", "device_peak_bytes", "allocator_peak_bytes", "processes_peak_bytes"),
    *_of_unit("GB/s", "none", "memory_bw_gbps"),
    # How far a simulation is from what it simulates
    *_of_unit("%", "none", "cost_model_error_pct", support=_ABOVE_MINUS_ALL),
    *_of_unit("%", "none", "fidelity_error_pct", support=_ABOVE_MINUS_ALL),
    *_of_unit("ms", "none", "real_ms", "simulated_ms"),
    *_of_unit("tokens/s", "none", "real_tok_s", "simulated_tok_s"),
    *_of_unit("%", "none", "fidelity_limit_pct"),
    *_of_unit("requests", "lower", "fidelity_left_out"),
    # Benchmarks; ttft_ms_p50_turn_ stands before the turn's number, bound is 1 where the count of agents is no bound
    *_of_unit("ms", "lower", "time_ms", "step_ms", "prefill_ms", "restore_ms", "attention_ms", "host_ms"),
    *_of_unit("ms", "lower", "transfer_ms", "compute_ms", "ttft_ms_p50_turn_"),
    *_of_unit("GB/s", "higher", "swap_in_gb_s"),
    *_of_unit("agents", "higher", "agents_carried", "refused_at"),
    *_of_unit("", "none", "bound"),
    *_of_unit("x", "higher", "speedup", "times_stateless"),
    *_of_unit("x", "lower", "several_over_one", "ratio_of_best", "q1", "q3"),
    *_of_unit("x", "none", "roofline_ratio", "recompute_over_profile"),
    *_of_unit("chunks", "none", "recomputed_chunks"),
    *_of_unit("%", "higher", "overlap_pct", "saving_pct", support=REAL),
    *_of_unit("%", "none", "predicted_saving_pct", support=REAL),
    *_of_unit("%", "lower", "slower_pct", support=REAL),
    *_of_unit("%", "lower", "gpu_idle_pct", support=PERCENT),
    *_of_unit("%", "higher", "matrix_rate_pct"),
)

METRICS = {metric.name: metric for metric in _ALL}
assert len(METRICS) == len(_ALL), "a metric is stated twice"


def is_known(name: str) -> bool:
    return name in METRICS or name.rstrip("0123456789") in METRICS


def metric_of(name: str) -> Metric:
    """The entry of a metric. Of a name that only an older database has nothing is known: no unit, no direction."""
    return METRICS.get(name) or METRICS.get(name.rstrip("0123456789")) or Metric(name, "", "none", REAL)


# Made of the records of a trial

STATUSES = ("completed", "timeout", "cancelled", "refused", "failed")
COUNTS = (
    "recomputed_tokens",
    "swapped_in_bytes",
    "swapped_out_bytes",
    "evicted_chunks",
    "dropped_chunks",
    "suspended_requests",
    "deferred_requests",
    "moved_turns",
    "restarted_requests",
    "replica_failures",
)
MOST_IN_MEMORY = 5_000_000
"""Values of one series, such as the times between tokens, of which an interval is made: that takes some 400 MB."""
FOR_NO_TURN = ("d2h_bytes",)  # also copied ahead of time: only the system's counter has all of it


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A row of table `metric`.

    value None: not measurable here. n counts n_unit; ci_*: 95 % interval, None where none is due.
    """

    name: str
    value: float | None
    label: str = ""
    n: int | None = None
    n_unit: str | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    limit_value: float | None = None

    @property
    def unit(self) -> str:
        return metric_of(self.name).unit

    @property
    def thin(self) -> bool:
        """A percentile of too few values to be taken at its word: n below 10 / (1 - p)."""
        p = PERCENTILES.get(self.name.rpartition("_")[2])
        return p is not None and self.n is not None and self.n < enough_for(p)


@dataclass(frozen=True, slots=True)
class Slo:
    """A service-level objective: the most that a turn's TTFT and TPOT may be, in milliseconds; None: not asked."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Slo:
        """From the `slo` of a configuration."""
        given = {name: float(value) for name, value in asked.items() if str(value).lower() not in ("none", "null")}
        return cls(given.get("ttft_ms"), given.get("tpot_ms"))

    @classmethod
    def of_sweep(cls, overrides: Mapping[str, Any]) -> Slo:
        """That its command set, key to text."""
        typed = {key.lstrip("+"): str(text) for key, text in overrides.items()}
        return cls.of({key.removeprefix("slo."): text for key, text in typed.items() if key.startswith("slo.")})


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a replay observed. Times are seconds since it began.

    turns: all of them, warm-up too, in any order. [measure_start_s, measure_end_s]: the window of the throughputs.
    measured_from_s: the first measured arrival. ended_s: the end of the last measured turn. counters: the system's own
    counts over the measured stretches; a name that is absent was not counted. send_lag_s: intended arrival to submission, of
    each request in order of submission; where the turn before had not ended, from its end.
    """

    turns: Turns
    measure_start_s: float
    measure_end_s: float
    measured_from_s: float
    ended_s: float
    counters: Mapping[str, float] = field(default_factory=dict)
    send_lag_s: Sequence[float] = ()


def summarise(measurement: Measurement, started: StartReport | None = None) -> list[MetricValue]:
    """Every metric that a replay's records can give. Names with labels occur once a label.

    A trial's throughputs are one value each and get no interval here: across seeds they do.
    """
    measured = measurement.turns.measured
    warmup = measurement.turns.where(measurement.turns.that("phase", "warmup".__eq__))
    metrics = [
        *_series(measured, "ttft_ms", "tpot_ms"),
        *_gaps(measured),
        *_series(measured, "latency_ms", "normalized_latency_ms", "queue_ms"),
        *_series(warmup, "warmup_ms"),
        *_throughputs(measurement, measured),
        *_rates(measured),
        *_counts(measurement, measured),
        *_of_the_system(measurement, measured, started),
        *_phases(measured),
        *(_count("turns", measured.that("status", one.__eq__), label=one) for one in STATUSES),
        *_by_turn(measured),
    ]
    for label, of_label in _by_label(measured):
        metrics += [*_series(of_label, "ttft_ms", "latency_ms", label=label), *_rates(of_label, label)]
    for label, of_label in _by_label(warmup):
        metrics += _series(of_label, "warmup_ms", label=label)
    return metrics


_NONE = np.empty(0)


def _by_label(turns: Turns) -> Iterator[tuple[str, Turns]]:
    codes, words = turns.codes("label"), turns.words("label")
    for label, code in sorted((words[code] or "", code) for code in np.unique(codes)):
        if label:
            yield label, turns.where(codes == code)


def thin_percentiles(metrics: Iterable[MetricValue]) -> list[str]:
    """Names (with labels) of the percentiles that have too few values behind them, for the trial's flags."""
    return [f"{metric.name}[{metric.label}]" if metric.label else metric.name for metric in metrics if metric.thin]


def tpot_ms(turns: Turns) -> Floats:
    """(last token - first token) / (output tokens - 1) of each; NaN below two tokens."""
    more = turns["output_tokens"] - 1
    return (turns["last_token_s"] - turns["first_token_s"]) * 1e3 / np.where(more > 0, more, np.nan)


def _normalized_latency_ms(turns: Turns) -> Floats:
    outputs = turns["output_tokens"]
    return turns["latency_ms"] / np.where(outputs > 0, outputs, np.nan)


_SERIES: Mapping[str, Callable[[Turns], Floats]] = {
    "ttft_ms": lambda turns: turns["ttft_ms"],
    "tpot_ms": tpot_ms,
    "latency_ms": lambda turns: turns["latency_ms"],
    "normalized_latency_ms": _normalized_latency_ms,
    "queue_ms": lambda turns: turns["queue_ms"],
    "warmup_ms": lambda turns: turns["latency_ms"],
    "total_ms": lambda turns: turns["latency_ms"],
    "per_token_ms": _normalized_latency_ms,
}
"""A value of each turn; only completed ones count."""


def _series(turns: Turns, *names: str, label: str = "") -> list[MetricValue]:
    """Mean and percentiles of these values, by conversation."""
    completed = turns.completed
    sessions = completed.codes("session")
    return [one for name in names for one in _summary(name, _SERIES[name](completed), sessions, label)]


def _by_turn(measured: Turns) -> list[MetricValue]:
    """Median time to first token of the first turns, of the second ones, and so on."""
    numbers, completed = measured["turn"], measured.completed
    found, values, sessions = completed["turn"], completed["ttft_ms"], completed.codes("session")
    order = np.argsort(found, kind="stable")
    metrics: list[MetricValue] = []
    for number in np.unique(numbers):
        own = order[slice(*(np.searchsorted(found, number, side, sorter=order) for side in ("left", "right")))]
        metrics += _summary("ttft_ms", values[own], sessions[own], f"turn={number:.0f}", wanted=("p50",))
    return metrics


def _gaps(measured: Turns) -> list[MetricValue]:
    """Times between tokens, of which there is one for nearly each token: over MOST_IN_MEMORY they are ranked in a file, and
    have no interval."""
    completed = measured.completed
    n = int(np.maximum(completed["emitted"] - 1, 0).sum())
    if n <= MOST_IN_MEMORY:
        gaps_s, counts = (np.concatenate(parts) for parts in zip((_NONE, _NONE), *completed.gaps_s(), strict=True))
        sessions = np.repeat(completed.codes("session"), counts.astype(np.int64))
        return _summary("itl_ms", gaps_s * 1e3, sessions, n_unit="tokens")
    with TemporaryFile() as file:
        every, end = np.memmap(file, np.float64, "w+", shape=(n,)), 0
        for gaps_s, _ in completed.gaps_s():
            every[end : end + len(gaps_s)] = gaps_s * 1e3
            end += len(gaps_s)
        mean, places = every.mean(), [rank(p, n) - 1 for p in PERCENTILES.values()]
        every.partition(places)
        values = zip(SUMMARIES, (mean, *every[places]), strict=True)
        return [MetricValue(f"itl_ms_{suffix}", float(value), n=n, n_unit="tokens") for suffix, value in values]


def _summary(
    name: str, values: Floats, sessions: Places, label: str = "", n_unit: str = "turns",
    wanted: Sequence[str] = SUMMARIES,
) -> list[MetricValue]:  # fmt: skip
    """Summarise the values that are known, by conversation: the wanted ones of mean and percentiles."""
    known = ~np.isnan(values)
    values, groups = values[known], numbered(sessions[known])
    if not len(values):
        return [MetricValue(f"{name}_{suffix}", None, label, n=0, n_unit=n_unit) for suffix in wanted]
    suffixes = [suffix for suffix in wanted if suffix != "mean"]
    means = [estimate_mean(values, groups, metric_of(name).support)] if "mean" in wanted else []
    estimates = [*means, *estimate_percentiles(values, groups, [PERCENTILES[suffix] for suffix in suffixes])]
    return [_metric(f"{name}_{one}", found, label, n_unit) for one, found in zip(wanted, estimates, strict=True)]


def _metric(name: str, estimate: Estimate, label: str, n_unit: str) -> MetricValue:
    return MetricValue(name, estimate.value, label, estimate.n, n_unit, estimate.ci_low, estimate.ci_high)


def _count(name: str, counted: Mask, label: str = "") -> MetricValue:
    return MetricValue(name, float(counted.sum()), label, n=len(counted), n_unit="turns")


def _throughputs(measurement: Measurement, measured: Turns) -> list[MetricValue]:
    inside, seconds = _in_window(measured, measurement.measure_start_s, measurement.measure_end_s)
    outputs = float(inside["output_tokens"].sum())
    total = float(inside["prompt_tokens"].sum()) + outputs
    everything = float(measured.completed["output_tokens"].sum())
    whole_s = measurement.ended_s - measurement.measured_from_s
    return [
        _per_second("throughput_req_s", len(inside), seconds, len(inside)),
        _per_second("throughput_output_tok_s", outputs, seconds, len(inside)),
        _per_second("throughput_total_tok_s", total, seconds, len(inside)),
        _per_second("makespan_output_tok_s", everything, whole_s, len(measured)),
    ]


def _in_window(measured: Turns, start: float, end: float) -> tuple[Turns, float]:
    """The turns that completed in the window, and its seconds; none where all completed outside of it: then it says nothing
    of how fast they were served."""
    completed = measured.completed
    finished = completed["finished_s"]
    inside = completed.where((start <= finished) & (finished <= end))
    return inside, 0.0 if not np.isnan(finished).all() and not len(inside) else end - start


def _per_second(name: str, count: float, seconds: float, turns: int, label: str = "") -> MetricValue:
    """count NaN: not known of some turn."""
    known = seconds > 0 and not math.isnan(count)
    return MetricValue(name, float(count) / seconds if known else None, label, turns, "turns")


# An engine that only reports cached tokens has no CPU tier of ours: null there means "none seen", not unknown.
_RATES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "gpu_hit_rate": (("gpu_hit_tokens",), "history_tokens"),
    "cpu_hit_rate": (("cpu_hit_tokens",), "history_tokens"),
    "disk_hit_rate": (("disk_hit_tokens",), "history_tokens"),
    "miss_rate": (("recomputed_tokens",), "history_tokens"),
    "prompt_hit_rate": (HITS, "prompt_tokens"),
}
"""Tokens that were found, or not, and of how many they are a share. Of several, the first has to be known."""


def _rates(turns: Turns, label: str = "") -> list[MetricValue]:
    """Shares of history and of prompt tokens, sums over sums; turns that were never admitted have no counts."""
    turns = turns.where(~np.isnan(turns["history_tokens"] + turns["prompt_tokens"]))
    sessions = numbered_by_name(turns)
    return [
        _rate(
            name,
            sums_of(turns[first] + sum(np.nan_to_num(turns[other]) for other in others), sessions),
            sums_of(turns[whole], sessions),
            label,
        )
        for name, ((first, *others), whole) in _RATES.items()
    ]


def numbered_by_name(turns: Turns) -> Places:
    """The conversation of each turn, numbered in the order of their names."""
    words, codes = turns.words("session"), turns.codes("session")
    ranks = np.empty(len(words), np.int64)
    ranks[sorted(range(len(words)), key=lambda code: words[code] or "")] = np.arange(len(words))
    return np.unique(ranks[codes], return_inverse=True)[1]


def _rate(name: str, parts: Floats, wholes: Floats, label: str) -> MetricValue:
    """parts, wholes: of each conversation; a part that nobody knows makes the whole rate unknown."""
    if np.isnan(parts).any() or not wholes.any():
        return MetricValue(name, None, label, n=0, n_unit="tokens")
    return _metric(name, estimate_rate(parts, wholes), label, "tokens")


def _counts(measurement: Measurement, measured: Turns) -> list[MetricValue]:
    counters = measurement.counters
    counts: dict[str, float | None] = {name: counters.get(name) for name in COUNTS}
    again = measured["recomputed_tokens"] + measured["resumed_recomputed_tokens"]
    if not np.isnan(again).all():
        counts["recomputed_tokens"] = float(np.nansum(again))
    metrics = [MetricValue(name, value) for name, value in counts.items()]
    priced = [seconds for seconds in measured["recomputed_s"].tolist() if seconds == seconds]
    metrics.append(MetricValue("recomputed_s", sum(priced) if priced else None, n=len(priced), n_unit="turns"))
    outputs = int(measured["output_tokens"].sum())
    for name in BYTES:
        counted = None if name in FOR_NO_TURN else _moved_for(measured, name)
        counted = counters.get(name) if counted is None else counted
        metrics.append(MetricValue(name, counted))
        each = counted / outputs if counted is not None and outputs else None
        metrics.append(MetricValue(f"{name}_per_token", each, n=outputs, n_unit="tokens"))
    return metrics


def _moved_for(measured: Turns, name: str) -> float | None:
    """Sum the bytes over all turns; None where one that completed was not counted, or none was."""
    moved = measured[name]
    unknown = np.isnan(moved)
    if unknown.all() or unknown[measured.that("status", "completed".__eq__)].any():
        return None
    return float(np.nansum(moved))


def _of_the_system(measurement: Measurement, measured: Turns, started: StartReport | None) -> list[MetricValue]:
    """How it started; scheduler and cache time a step; predicted over measured time of the iterations that computed one long
    row, less one; how late requests were sent, and how many did not get the memory they needed."""
    counted, lags = measurement.counters, measurement.send_lag_s
    steps, schedule_ms = counted.get("steps"), counted.get("schedule_ms")
    a_step = schedule_ms / steps if steps and schedule_ms is not None else None
    predicted, took = (counted.get(name, 0.0) for name in ("predicted_ms", "predictable_ms"))
    lag_ms = nearest_rank(lags, 0.99) * 1e3 if len(lags) else None
    return [
        MetricValue("load_s", started.load_s if started else None),
        MetricValue("engine_warmup_ms", started.warmup_ms if started else None),
        MetricValue("schedule_ms_mean", a_step, n=int(steps) if steps is not None else None, n_unit="steps"),
        MetricValue("cost_model_error_pct", (predicted / took - 1) * 100 if took else None),
        MetricValue("send_lag_ms_p99", lag_ms, n=len(lags), n_unit="turns"),
        _count("oom_turns", out_of_memory(measured)),
    ]


OUT_OF_MEMORY = (("refused", CapacityError.reason), ("failed", MemoryRanOut.reason))
"""Status and reason of a turn that did not get the memory it needed: of one GPU tier, or for a process of its own."""


def out_of_memory(turns: Turns) -> Mask:
    found = np.full(len(turns), False)
    for status, reason in OUT_OF_MEMORY:
        found |= turns.that("status", status.__eq__) & turns.that("finish_reason", reason.__eq__)
    return found


def _phases(measured: Turns) -> list[MetricValue]:
    """What only workloads with these phases can give: hit against miss, streaming against not, decoding by itself."""
    metrics: list[MetricValue] = []
    decoded = measured.where(measured.that("phase", "throughput".__eq__))
    if len(decoded):
        metrics += _series(decoded, "total_ms", "per_token_ms")
        metrics += [_alone(decoded, "throughput"), *(_alone(turns, label) for label, turns in _by_label(decoded))]
    probes = measured.completed.where(~np.isnan(measured.completed["ttft_ms"]))
    hit, miss = (probes.where(probes.that("phase", phase.__eq__)) for phase in ("hit", "miss"))
    if len(hit) or len(miss):
        metrics += [_degradation(hit, miss), _stream_overhead(hit, miss)]
    return metrics


def _alone(decoded: Turns, label: str) -> MetricValue:
    """Output tokens over the sum of the latencies: of requests that have the system to themselves."""
    completed = decoded.completed
    done = completed.where(completed["latency_ms"] > 0)
    seconds = sum(done["latency_ms"].tolist()) / 1e3
    return _per_second("throughput_output_tok_s", done["output_tokens"].sum(), seconds, len(done), label)


def _degradation(hit: Turns, miss: Turns) -> MetricValue:
    """(miss - hit) / hit of the mean times to first token, paired by round."""
    hits, misses = _by_round(hit), _by_round(miss)
    if not hits.keys() & misses.keys():
        return MetricValue("ttft_degradation_pct", None, n=0, n_unit="rounds")
    ratio = paired_ratio(misses, hits, of="means")
    value, *ends = (None if one is None else (one - 1.0) * 100 for one in (ratio.value, ratio.ci_low, ratio.ci_high))
    return MetricValue("ttft_degradation_pct", value, "", ratio.n, "rounds", *ends)


def _stream_overhead(*phases: Turns) -> MetricValue:
    """Time to first token when streaming minus when not, paired by round and phase."""
    name = "stream_overhead_ms"
    differences: dict[tuple[int, str], list[float]] = {}
    for turns in phases:
        streamed, whole = (_by_round(turns.where(turns["stream"] == stream)) for stream in (True, False))
        for key in filter(whole.__contains__, streamed):
            differences.setdefault(key, []).append(streamed[key] - whole[key])
    if not differences:
        return MetricValue(name, None, n=0, n_unit="pairs")
    return _metric(name, estimate_mean(*flat(differences), metric_of(name).support), "", "pairs")


def _by_round(turns: Turns) -> dict[tuple[int, str], float]:
    """Mean time to first token of each round, in ms, as pairs are named."""
    found: dict[tuple[int, str], list[float]] = {}
    for number, first_ms in zip(turns["iteration"].tolist(), turns["ttft_ms"].tolist(), strict=True):
        found.setdefault((0, f"{number:.0f}"), []).append(first_ms)
    return {key: sum(values) / len(values) for key, values in found.items()}


SLO_METRICS = ("goodput_req_s", "slo_attainment")
"""An objective is an argument of a view: these are never read from a trial's rows, where older versions stored them."""


def slo_metrics(turns: Turns, start_s: float, end_s: float, slo: Slo) -> list[MetricValue]:
    """Goodput and attainment under an objective. turns: all of a trial, [start_s, end_s]: its window."""
    if slo == Slo():
        return []

    most_ms = [math.inf if most is None else most for most in (slo.ttft_ms, slo.tpot_ms)]

    def met(some: Turns) -> Mask:
        slow = (some["ttft_ms"] > most_ms[0]) | (tpot_ms(some) > most_ms[1])
        return some.that("status", "completed".__eq__) & ~np.isnan(some["ttft_ms"]) & ~slow

    measured = turns.measured
    inside, seconds = _in_window(measured, start_s, end_s)
    good = int(met(inside).sum())
    goodput = _per_second("goodput_req_s", good, seconds, good)
    if not len(measured):
        return [goodput, MetricValue("slo_attainment", None, n=0, n_unit="turns")]
    parts, sessions = met(measured).astype(np.float64), numbered_by_name(measured)
    found = estimate_rate(sums_of(parts, sessions), sums_of(np.ones(len(measured)), sessions))
    return [goodput, _metric("slo_attainment", found, "", "turns")]
