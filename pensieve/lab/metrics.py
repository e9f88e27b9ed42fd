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
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pensieve.core.plan import StartReport
from pensieve.core.request import TokenArray
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
    nearest_rank,
    paired_ratio,
)
from pensieve.lab.turn_log import chosen
from pensieve.serve.record import TurnRecord, is_measured

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
_BYTES = ("h2d_bytes", "d2h_bytes", "sent_bytes", "received_bytes")
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
    *_of_unit("bytes", "lower", "swapped_in_bytes", "swapped_out_bytes", *_BYTES),
    *_of_unit("bytes/token", "lower", "wire_bytes_per_token", *(f"{name}_per_token" for name in _BYTES)),
    *_of_unit("chunks", "lower", "evicted_chunks", "dropped_chunks"),
    *_of_unit("requests", "lower", "suspended_requests", "deferred_requests", "restarted_requests"),
    *_of_unit("turns", "none", "moved_turns", "migrated_turns"),
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
    *_of_unit("tok/s", "higher", "throughput_output_tok_s_at_equal_p90"),
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
    "migrated_turns",
    "restarted_requests",
    "replica_failures",
)
MOST_IN_MEMORY = 5_000_000
"""Values of one series, such as the times between tokens, of which an interval is made: that takes some 400 MB."""
BYTES = ("h2d_bytes", "d2h_bytes", "sent_bytes", "received_bytes")
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

    turns: Sequence[TurnRecord]
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
    measured = chosen(measurement.turns, lambda turn: is_measured(turn.phase))
    warmup = chosen(measurement.turns, lambda turn: turn.phase == "warmup")
    found = Counter(turn.status for turn in measured)
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
        *(MetricValue("turns", float(found[one]), one, n=len(measured), n_unit="turns") for one in STATUSES),
        *_by_turn(measured),
    ]
    for label, of_label in _by_label(measured):
        metrics += [*_series(of_label, "ttft_ms", "latency_ms", label=label), *_rates(of_label, label)]
    for label, of_label in _by_label(warmup):
        metrics += _series(of_label, "warmup_ms", label=label)
    return metrics


def _by_label(turns: Sequence[TurnRecord]) -> Iterator[tuple[str, Sequence[TurnRecord]]]:
    for label in sorted({turn.label for turn in turns} - {""}):
        yield label, chosen(turns, lambda turn, label=label: turn.label == label)  # type: ignore[misc]


def thin_percentiles(metrics: Iterable[MetricValue]) -> list[str]:
    """Names (with labels) of the percentiles that have too few values behind them, for the trial's flags."""
    return [f"{metric.name}[{metric.label}]" if metric.label else metric.name for metric in metrics if metric.thin]


def tpot_ms(turn: TurnRecord) -> float | None:
    """(last token - first token) / (output tokens - 1); None below two tokens."""
    if turn.first_token_s is None or turn.finished_s is None or turn.output_tokens < 2:
        return None
    times_s = turn.times_s()
    last = times_s[-1] if times_s else turn.finished_s
    return (last - turn.first_token_s) * 1e3 / (turn.output_tokens - 1)


def _normalized_latency_ms(turn: TurnRecord) -> float | None:
    return None if turn.latency_ms is None or turn.output_tokens == 0 else turn.latency_ms / turn.output_tokens


_SERIES: Mapping[str, Callable[[TurnRecord], float | None]] = {
    "ttft_ms": lambda turn: turn.ttft_ms,
    "tpot_ms": tpot_ms,
    "latency_ms": lambda turn: turn.latency_ms,
    "normalized_latency_ms": _normalized_latency_ms,
    "queue_ms": lambda turn: turn.queue_ms,
    "warmup_ms": lambda turn: turn.latency_ms,
    "total_ms": lambda turn: turn.latency_ms,
    "per_token_ms": _normalized_latency_ms,
}
"""A value of each completed turn."""


def _gaps_ms(turn: TurnRecord) -> Sequence[float]:
    return array("d", (np.diff(np.frombuffer(times_s)) * 1e3).tobytes()) if (times_s := turn.times_s()) else ()


def _series(turns: Iterable[TurnRecord], *names: str, label: str = "") -> list[MetricValue]:
    """Mean and percentiles of these values, by conversation."""
    groups: dict[str, dict[str, TokenArray[float]]] = {name: {} for name in names}
    for turn in turns:
        for name in names if turn.status == "completed" else ():
            if (value := _SERIES[name](turn)) is not None:
                groups[name].setdefault(turn.session, array("d")).append(value)
    return [metric for name in names for metric in _summary(name, groups[name], label)]


def _by_turn(measured: Iterable[TurnRecord]) -> list[MetricValue]:
    """Median time to first token of the first turns, of the second ones, and so on."""
    sessions: dict[str, int] = {}
    found: dict[int, tuple[TokenArray[int], TokenArray[float]]] = {}  # the session and the value of each turn
    for turn in measured:
        members, values = found.setdefault(turn.turn, (array("q"), array("d")))
        if turn.status == "completed" and turn.ttft_ms is not None:
            members.append(sessions.setdefault(turn.session, len(sessions)))
            values.append(turn.ttft_ms)
    metrics: list[MetricValue] = []
    for number, (members, values) in sorted(found.items()):
        groups: dict[int, TokenArray[float]] = {}
        for member, value in zip(members, values, strict=True):
            groups.setdefault(member, array("d")).append(value)
        metrics += _summary("ttft_ms", groups, f"turn={number}", wanted=("p50",))
    return metrics


def _gaps(measured: Sequence[TurnRecord]) -> list[MetricValue]:
    """Times between tokens, of which there is one for nearly each token: over MOST_IN_MEMORY they have no interval."""
    completed = chosen(measured, lambda turn: turn.status == "completed")
    if sum(turn.output_tokens for turn in measured) <= MOST_IN_MEMORY:
        groups: dict[str, TokenArray[float]] = {}
        for turn in completed:
            if len(values := _gaps_ms(turn)):
                groups.setdefault(turn.session, array("d")).extend(values)
        return _summary("itl_ms", groups, n_unit="tokens")
    every = np.concatenate([np.empty(0), *map(_gaps_ms, completed)])
    if not len(every):
        return _summary("itl_ms", {}, n_unit="tokens")
    percentiles = (nearest_rank(every, p) for p in PERCENTILES.values())
    found = zip(SUMMARIES, (float(every.mean()), *percentiles), strict=True)
    return [MetricValue(f"itl_ms_{suffix}", value, n=len(every), n_unit="tokens") for suffix, value in found]


def _summary(
    name: str,
    groups: Mapping[Any, Sequence[float]],
    label: str = "",
    n_unit: str = "turns",
    wanted: Sequence[str] = SUMMARIES,
) -> list[MetricValue]:
    """Summarise values grouped by conversation: the wanted ones of mean and percentiles."""
    if not groups:
        return [MetricValue(f"{name}_{suffix}", None, label, n=0, n_unit=n_unit) for suffix in wanted]
    suffixes = [suffix for suffix in wanted if suffix != "mean"]
    means = [estimate_mean(groups, metric_of(name).support)] if "mean" in wanted else []
    estimates = [*means, *estimate_percentiles(groups, [PERCENTILES[suffix] for suffix in suffixes])]
    return [_metric(f"{name}_{one}", found, label, n_unit) for one, found in zip(wanted, estimates, strict=True)]


def _metric(name: str, estimate: Estimate, label: str, n_unit: str) -> MetricValue:
    return MetricValue(name, estimate.value, label, estimate.n, n_unit, estimate.ci_low, estimate.ci_high)


def _throughputs(measurement: Measurement, measured: Sequence[TurnRecord]) -> list[MetricValue]:
    inside, seconds = _in_window(measured, measurement.measure_start_s, measurement.measure_end_s)
    count, outputs = len(inside), sum(turn.output_tokens for turn in inside)
    known = all(turn.prompt_tokens is not None for turn in inside)
    total = sum(turn.prompt_tokens or 0 for turn in inside) + outputs if known else None
    everything = sum(turn.output_tokens for turn in measured if turn.status == "completed")
    whole_s = measurement.ended_s - measurement.measured_from_s
    return [
        _per_second("throughput_req_s", count, seconds, count),
        _per_second("throughput_output_tok_s", outputs, seconds, count),
        _per_second("throughput_total_tok_s", total, seconds, count),
        _per_second("makespan_output_tok_s", everything, whole_s, len(measured)),
    ]


def _in_window(measured: Sequence[TurnRecord], start: float, end: float) -> tuple[Sequence[TurnRecord], float]:
    """The turns that completed in the window, and its seconds; none where all completed outside of it: then it says nothing
    of how fast they were served."""
    ended = chosen(measured, lambda turn: turn.status == "completed" and turn.finished_s is not None)
    inside = chosen(ended, lambda turn: start <= (turn.finished_s or 0.0) <= end)
    return inside, 0.0 if len(ended) and not len(inside) else end - start


def _per_second(name: str, count: float | None, seconds: float, turns: int) -> MetricValue:
    value = None if count is None or seconds <= 0 else count / seconds
    return MetricValue(name, value, n=turns, n_unit="turns")


def _history(turn: TurnRecord) -> int:
    return turn.history_tokens or 0


# An engine that only reports cached tokens has no CPU tier of ours: null there means "none seen", not unknown.
_RATES: Mapping[str, tuple[Callable[[TurnRecord], Sequence[int | None]], Callable[[TurnRecord], int]]] = {
    "gpu_hit_rate": (lambda turn: (turn.gpu_hit_tokens,), _history),
    "cpu_hit_rate": (lambda turn: (turn.cpu_hit_tokens,), _history),
    "disk_hit_rate": (lambda turn: (turn.disk_hit_tokens,), _history),
    "miss_rate": (lambda turn: (turn.recomputed_tokens,), _history),
    "prompt_hit_rate": (
        lambda turn: (
            turn.gpu_hit_tokens,
            *(tokens or 0 for tokens in (turn.cpu_hit_tokens, turn.disk_hit_tokens, turn.shared_hit_tokens)),
        ),
        lambda turn: turn.prompt_tokens or 0,
    ),
}
"""Tokens that were found, or not, and of how many they are a share."""


def _rates(turns: Iterable[TurnRecord], label: str = "") -> list[MetricValue]:
    """Shares of history and of prompt tokens, sums over sums; turns that were never admitted have no counts."""
    groups: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in _RATES}
    for turn in turns:
        if turn.history_tokens is None or turn.prompt_tokens is None:
            continue
        for name, (parts_of, whole_of) in _RATES.items():
            top, bottom = groups[name].get(turn.session, (0.0, 0.0))
            parts = [math.nan if part is None else part for part in parts_of(turn)]
            groups[name][turn.session] = (top + sum(parts), bottom + whole_of(turn))
    return [_rate(name, found, label) for name, found in groups.items()]


def _rate(name: str, groups: Mapping[str, tuple[float, float]], label: str) -> MetricValue:
    """groups: part and whole of each conversation; a part that nobody knows makes the whole rate unknown."""
    if any(math.isnan(top) for top, _ in groups.values()) or not any(bottom for _, bottom in groups.values()):
        return MetricValue(name, None, label, n=0, n_unit="tokens")
    return _metric(name, estimate_rate(groups), label, "tokens")


def _counts(measurement: Measurement, measured: Sequence[TurnRecord]) -> list[MetricValue]:
    counters = measurement.counters
    counts: dict[str, float | None] = {name: counters.get(name) for name in COUNTS}
    admitted = chosen(measured, lambda turn: turn.recomputed_tokens is not None)
    if admitted:
        counts["recomputed_tokens"] = float(
            sum((turn.recomputed_tokens or 0) + turn.resumed_recomputed_tokens for turn in admitted)
        )
    metrics = [MetricValue(name, value) for name, value in counts.items()]
    priced = array("d", (turn.recomputed_s for turn in measured if turn.recomputed_s is not None))
    metrics.append(MetricValue("recomputed_s", sum(priced) if priced else None, n=len(priced), n_unit="turns"))
    outputs = sum(turn.output_tokens for turn in measured)
    for name in BYTES:
        counted = None if name in FOR_NO_TURN else _moved_for(measured, name)
        counted = counters.get(name) if counted is None else counted
        metrics.append(MetricValue(name, counted))
        each = counted / outputs if counted is not None and outputs else None
        metrics.append(MetricValue(f"{name}_per_token", each, n=outputs, n_unit="tokens"))
    return metrics


def _moved_for(measured: Sequence[TurnRecord], name: str) -> float | None:
    """Sum the bytes over all turns; None where one that completed was not counted, or none was."""
    if any(getattr(turn, name) is None and turn.status == "completed" for turn in measured):
        return None
    counted = array("q", (value for turn in measured if (value := getattr(turn, name)) is not None))
    return float(sum(counted)) if counted else None


def _of_the_system(
    measurement: Measurement, measured: Sequence[TurnRecord], started: StartReport | None
) -> list[MetricValue]:
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
        MetricValue("oom_turns", float(sum(map(out_of_memory, measured))), n=len(measured), n_unit="turns"),
    ]


OUT_OF_MEMORY = (("refused", CapacityError.reason), ("failed", MemoryRanOut.reason))
"""Status and reason of a turn that did not get the memory it needed: of one GPU tier, or for a process of its own."""


def out_of_memory(turn: TurnRecord) -> bool:
    return (turn.status, turn.finish_reason) in OUT_OF_MEMORY


def _phases(measured: Sequence[TurnRecord]) -> list[MetricValue]:
    """What only workloads with these phases can give: hit against miss, streaming against not, decoding by itself."""
    metrics: list[MetricValue] = []
    decoded = chosen(measured, lambda turn: turn.phase == "throughput")
    if decoded:
        metrics += _series(decoded, "total_ms", "per_token_ms")
        metrics += [_alone(decoded, "throughput"), *(_alone(turns, label) for label, turns in _by_label(decoded))]
    probes = [t for t in measured if t.phase in ("hit", "miss") and t.status == "completed" and t.ttft_ms is not None]
    if probes:
        metrics += [_degradation(probes), _stream_overhead(probes)]
    return metrics


def _alone(decoded: Sequence[TurnRecord], label: str) -> MetricValue:
    """Output tokens over the sum of the latencies: of requests that have the system to themselves."""
    done = [turn for turn in decoded if turn.status == "completed" and turn.latency_ms]
    tokens, seconds = sum(turn.output_tokens for turn in done), sum(turn.latency_ms or 0.0 for turn in done) / 1e3
    return replace(_per_second("throughput_output_tok_s", tokens, seconds, len(done)), label=label)


def _degradation(probes: Sequence[TurnRecord]) -> MetricValue:
    """(miss - hit) / hit of the mean times to first token, paired by round."""
    hit, miss = (_by_round(turn for turn in probes if turn.phase == phase) for phase in ("hit", "miss"))
    if not hit.keys() & miss.keys():
        return MetricValue("ttft_degradation_pct", None, n=0, n_unit="rounds")
    ratio = paired_ratio(miss, hit, of="means")
    value, *ends = (None if one is None else (one - 1.0) * 100 for one in (ratio.value, ratio.ci_low, ratio.ci_high))
    return MetricValue("ttft_degradation_pct", value, "", ratio.n, "rounds", *ends)


def _stream_overhead(probes: Sequence[TurnRecord]) -> MetricValue:
    """Time to first token when streaming minus when not, paired by round and phase."""
    name = "stream_overhead_ms"
    differences: dict[tuple[int, str], list[float]] = {}
    for phase in ("hit", "miss"):
        streamed, whole = (
            _by_round(turn for turn in probes if turn.phase == phase and turn.stream is stream)
            for stream in (True, False)
        )
        for key in filter(whole.__contains__, streamed):
            differences.setdefault(key, []).append(streamed[key] - whole[key])
    if not differences:
        return MetricValue(name, None, n=0, n_unit="pairs")
    return _metric(name, estimate_mean(differences, metric_of(name).support), "", "pairs")


def _by_round(turns: Iterable[TurnRecord]) -> dict[tuple[int, str], float]:
    """Mean time to first token of each round, in ms, as pairs are named."""
    found: dict[tuple[int, str], list[float]] = {}
    for turn in turns:
        found.setdefault((0, str(turn.iteration)), []).append(turn.ttft_ms or 0.0)
    return {key: sum(values) / len(values) for key, values in found.items()}


SLO_METRICS = ("goodput_req_s", "slo_attainment")
"""An objective is an argument of a view: these are never read from a trial's rows, where older versions stored them."""


def slo_metrics(turns: Sequence[TurnRecord], start_s: float, end_s: float, slo: Slo) -> list[MetricValue]:
    """Goodput and attainment under an objective. turns: all of a trial, [start_s, end_s]: its window."""
    if slo == Slo():
        return []
    measured = chosen(turns, lambda turn: is_measured(turn.phase))

    def met(turn: TurnRecord) -> bool:
        if turn.status != "completed" or turn.ttft_ms is None:
            return False
        slow = slo.ttft_ms is not None and turn.ttft_ms > slo.ttft_ms
        each = tpot_ms(turn)
        return not slow and (slo.tpot_ms is None or each is None or each <= slo.tpot_ms)

    groups: dict[str, tuple[float, float]] = {}
    for turn in measured:
        top, bottom = groups.get(turn.session, (0.0, 0.0))
        groups[turn.session] = (top + met(turn), bottom + 1.0)
    inside, seconds = _in_window(measured, start_s, end_s)
    good = sum(map(met, inside))
    goodput = _per_second("goodput_req_s", good, seconds, good)
    if not groups:
        return [goodput, MetricValue("slo_attainment", None, n=0, n_unit="turns")]
    return [goodput, _metric("slo_attainment", estimate_rate(groups), "", "turns")]
