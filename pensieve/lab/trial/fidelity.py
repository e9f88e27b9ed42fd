"""How far a simulated trial is from the real run whose requests it replayed: figures, errors and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Group, RenderableType

from pensieve.lab.metrics import PERCENTILES, MetricValue
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.tables import grid
from pensieve.lab.workload.vllm_run import RealRequest
from pensieve.serve.record import TurnRecord, is_measured

SEEN_PCT, UNSEEN_PCT = 2.0, 5.0
"""What no figure's error may exceed: of a run that was looked at when the machine was made, and of any other."""

_TIMES, _RATES = ("real_ms", "simulated_ms", "ms"), ("real_tok_s", "simulated_tok_s", "tok/s")
_ERROR, _LIMIT = "fidelity_error_pct", "fidelity_limit_pct"
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
_THROUGHPUT = "throughput"  # output tokens over the time from the first arrival to the last token


def fidelity_metrics(real: Mapping[str, RealRequest], seen: bool, turns: Iterable[TurnRecord]) -> list[MetricValue]:
    """Each figure of the real run, of this one, and the error, labelled ttft_mean and so on. Requests that did not complete
    here are in neither column, and counted."""
    completed = {turn.session: turn for turn in turns if is_measured(turn.phase) and turn.status == "completed"}
    there = [one for name, one in real.items() if name in completed]
    here = [_served(completed[name]) for name in real if name in completed]
    metrics = [
        MetricValue(_LIMIT, SEEN_PCT if seen else UNSEEN_PCT),
        MetricValue("fidelity_left_out", float(len(real) - len(here))),
    ]
    theirs, ours = _figures(there), _figures(here)
    for label, value in theirs.items():
        real_name, simulated_name, _ = _RATES if label == _THROUGHPUT else _TIMES
        metrics += [
            MetricValue(real_name, value, label, len(there), "requests"),
            MetricValue(simulated_name, ours[label], label, len(here), "requests"),
            MetricValue(_ERROR, 100 * (ours[label] / value - 1), label, len(here), "requests"),
        ]
    return metrics


def fidelity(store: ResultsStore, trial_id: int) -> RenderableType | None:
    """The table and the verdict of a trial; None for one that replayed no real run."""
    metrics = {(metric.name, metric.label): metric.value for metric in store.metrics_of(trial_id)}
    limit = metrics.get((_LIMIT, ""))
    if limit is None:
        return None
    trial = store.trial(trial_id)
    rows = {f"{f}_{s}": (f"{title} {s}", _TIMES) for f, title in _TITLES.items() for s in ("mean", *PERCENTILES)}
    rows[_THROUGHPUT] = (_THROUGHPUT, _RATES)
    errors: dict[str, float] = {}
    lines = []
    for label, (title, (real_name, simulated_name, unit)) in rows.items():
        error = metrics.get((_ERROR, label))
        if error is None:
            continue  # of a trial that was held against fewer figures
        errors[label] = error
        real, simulated = metrics[real_name, label], metrics[simulated_name, label]
        values = {"real": f"{real:,.1f} {unit}", "simulated": f"{simulated:,.1f} {unit}", "error": f"{error:+.2f} %"}
        lines.append({"": title, **values})
    table = grid(lines, f"Trial {trial_id}: {trial.model}, {trial.hardware},\nagainst vLLM on the real card")
    return Group(table, verdict(errors, limit, int(metrics.get(("fidelity_left_out", "")) or 0)))


def verdict(errors: Mapping[str, float], limit_pct: float, left_out: int) -> str:
    worst = max(errors, key=lambda label: abs(errors[label]))
    figure, _, statistic = worst.partition("_")
    holds = abs(errors[worst]) <= limit_pct and not left_out
    run = "looked at when this machine was made" if limit_pct == SEEN_PCT else "not seen before"
    what = f"{_TITLES.get(figure, figure)} {statistic}".rstrip()
    missing = f" {left_out} requests did not complete and are in no figure." if left_out else ""
    return (
        f"Verdict: {'holds' if holds else 'fails'}. The largest error is {errors[worst]:+.2f} % ({what}); "
        f"the limit for a run {run} is {limit_pct:g} %.{missing}"
    )


def _served(turn: TurnRecord) -> RealRequest:
    """As if it were of a real run."""
    assert turn.first_token_s is not None and turn.finished_s is not None
    tokens = len(turn.token_ids) or turn.output_tokens
    return RealRequest(turn.intended_s, turn.prompt_tokens or 0, tokens, turn.first_token_s, turn.finished_s)


def _figures(requests: Sequence[RealRequest]) -> dict[str, float]:
    columns: dict[str, Callable[[RealRequest], float | None]] = {
        "ttft": lambda each: each.ttft_ms,
        "tpot": lambda each: each.tpot_ms,
        "latency": lambda each: each.latency_ms,
    }
    figures: dict[str, float] = {}
    for name, column in columns.items():
        values = [value for value in map(column, requests) if value is not None]
        figures[f"{name}_mean"] = sum(values) / len(values)
        for percentile, share in PERCENTILES.items():
            figures[f"{name}_{percentile}"] = nearest_rank(values, share)
    began, ended = min(each.arrival_s for each in requests), max(each.last_token_s for each in requests)
    figures[_THROUGHPUT] = sum(each.output_tokens for each in requests) / (ended - began)
    return figures
