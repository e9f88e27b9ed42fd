"""How far a simulation is from a real run: figures, errors and a verdict.

A trial that replays the requests of a recorded run is held against that run, request by request.

A machine's simulation (hardware=sim_paired, sim_profile) is held against the machine: the same trials on both. Real trials
are repeated; what each simulated one is held against is their median, and the mean size of its errors counts: simulated
ones differ where each repeat goes by a profile of its own minutes. Beside the error stands what each real repeat is off from
the median of the others, reckoned alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Group, RenderableType

from pensieve.lab.metrics import PERCENTILES, MetricValue
from pensieve.lab.results.frame import Frame, values_of
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.turns import Turns
from pensieve.units import NONE, grid

if TYPE_CHECKING:
    import pandas as pd  # a trial without a real run beside it does without these

    from pensieve.lab.workload.vllm_run import RealRequest

    Errors = pd.Series
    """By figure: rates in points, throughput and TTFT in percent. NaN: cannot be told."""

SEEN_PCT, UNSEEN_PCT = 2.0, 5.0
"""What no figure's error may exceed: of a run that was looked at when the machine was made, and of any other."""

_TIMES, _RATES = ("real_ms", "simulated_ms", "ms"), ("real_tok_s", "simulated_tok_s", "tok/s")
_ERROR, _LIMIT = "fidelity_error_pct", "fidelity_limit_pct"
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
_THROUGHPUT = "throughput"  # output tokens over the time from the first arrival to the last token


def fidelity_metrics(real: Mapping[str, RealRequest], seen: bool, turns: Turns) -> list[MetricValue]:
    """Each figure of the real run, of this one, and the error, labelled ttft_mean and so on. Requests that did not complete
    here are in neither column, and counted."""
    completed = _served(turns.measured.completed)
    there = [one for name, one in real.items() if name in completed]
    here = [completed[name] for name in real if name in completed]
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
    errors = {label: error for (name, label), error in metrics.items() if name == _ERROR and error is not None}
    lines = []
    for label, error in errors.items():
        real, simulated, unit = _RATES if label == _THROUGHPUT else _TIMES
        values = {
            "real": f"{metrics[real, label]:,.1f} {unit}",
            "simulated": f"{metrics[simulated, label]:,.1f} {unit}",
        }
        lines.append({"": _title(label), **values, "error": f"{error:+.2f} %"})
    table = grid(lines, f"Trial {trial_id}: {trial.model}, {trial.hardware},\nagainst vLLM on the real card")
    return Group(table, verdict(errors, limit, int(metrics.get(("fidelity_left_out", "")) or 0)))


def _title(label: str) -> str:
    figure, _, statistic = label.partition("_")
    return f"{_TITLES.get(figure, figure)} {statistic}".rstrip()


def verdict(errors: Mapping[str, float], limit_pct: float, left_out: int) -> str:
    worst = max(errors, key=lambda label: abs(errors[label]))
    holds = abs(errors[worst]) <= limit_pct and not left_out
    run = "looked at when this machine was made" if limit_pct == SEEN_PCT else "not seen before"
    missing = f" {left_out} requests did not complete and are in no figure." if left_out else ""
    return (
        f"Verdict: {'holds' if holds else 'fails'}. The largest error is {errors[worst]:+.2f} % ({_title(worst)}); "
        f"the limit for a run {run} is {limit_pct:g} %.{missing}"
    )


def _served(turns: Turns) -> dict[str, RealRequest]:
    """As if they were of a real run, by conversation."""
    from pensieve.lab.workload.vllm_run import RealRequest

    names = ("intended_s", "prompt_tokens", "output_tokens", "first_token_s", "finished_s")
    columns = (np.nan_to_num(turns[name]).tolist() for name in names)
    words = turns.words("session")
    found = {}
    for session, arrival_s, prompt, tokens, *ends_s in zip(turns.codes("session").tolist(), *columns, strict=True):
        found[words[session] or ""] = RealRequest(arrival_s, int(prompt), int(tokens), *ends_s)
    return found


def _figures(requests: Sequence[RealRequest]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in _TITLES:
        values = [value for each in requests if (value := getattr(each, f"{name}_ms")) is not None]
        figures[f"{name}_mean"] = sum(values) / len(values)
        for percentile, share in PERCENTILES.items():
            figures[f"{name}_{percentile}"] = nearest_rank(values, share)
    began, ended = min(each.arrival_s for each in requests), max(each.last_token_s for each in requests)
    figures[_THROUGHPUT] = sum(each.output_tokens for each in requests) / (ended - began)
    return figures


HIT_POINTS, THROUGHPUT_PCT, TTFT_PCT = 1.0, 5.0, 10.0
"""What each error may come to: hit rates in points, by tier; output tokens a second; first tokens, mean over turns."""
_HITS = {"gpu_hit_rate": "GPU", "cpu_hit_rate": "CPU", "miss_rate": "missed"}
FLOW, TTFT = "throughput_output_tok_s", "ttft"
_LEGEND = (
    "Simulated: how far each simulation is from the median of n real repeats. Real again: how far each of these is from "
    "that of the others. Both are mean sizes, with the sign of their mean. Hit rates by tier and miss rate: in points. "
    "Output tokens/s: in %. TTFT: in %, the mean over turns of each one's error."
)


class Observed(NamedTuple):
    """One trial. figures: of _HITS, as shares, NaN where there was no history; and its throughput. ttft_ms: by conversation
    and turn."""

    figures: pd.Series[float]
    ttft_ms: pd.Series[float]


def holds(errors: Errors | None) -> bool:
    """Hits may be unknown, where there is no history; what has no throughput or no first tokens does not hold."""
    if errors is None:
        return False
    hits = (errors[list(_HITS)].dropna().abs() <= HIT_POINTS).all()
    return bool(hits and abs(errors[FLOW]) <= THROUGHPUT_PCT and abs(errors[TTFT]) <= TTFT_PCT)


def errors_of(one: Observed, others: Sequence[Observed]) -> Errors:
    """Of a trial against the median of others. TTFT: mean absolute percentage error over the turns that all have."""
    import pandas as pd

    every = pd.DataFrame([other.figures for other in others])
    middle = every.quantile(0.5, interpolation="lower").where(every.notna().all())
    off = 100 * (one.figures - middle)
    off[FLOW] /= middle[FLOW]
    turns = pd.concat([one.ttft_ms, *(other.ttft_ms for other in others)], axis=1, join="inner")
    theirs = turns.iloc[:, 1:].quantile(0.5, axis=1, interpolation="lower")
    off[TTFT] = 100 * (turns.iloc[:, 0] / theirs - 1).abs().mean()
    return off


def mean_of(errors: Iterable[Errors]) -> Errors | None:
    """Mean sizes, with the sign of the mean; NaN where one of them is, None where there is none."""
    import pandas as pd

    each = pd.DataFrame(list(errors))
    return None if each.empty else pd.Series(np.copysign(each.abs().mean(skipna=False), each.mean()))


def fidelity_here(store: ResultsStore, sweep_id: int) -> RenderableType | None:
    """The table and the verdict of a sweep that ran on a machine and on its profile, by place of its other axes; None where
    no trial goes by a profile, or all do. A place that lacks one of the two is not within the limits."""
    found, lines, outside, both = Frame(store, sweep_id), list[dict[str, str]](), list[str](), False
    for group in found.panels("hardware"):
        for baseline, trials in group.trials.items():
            for seed in sorted({trial.seed for trial in trials}):
                own = [trial for trial in trials if trial.seed == seed]
                real = [_observed(found, trial) for trial in own if not trial.simulated]
                simulated = [_observed(found, trial) for trial in own if trial.simulated and _goes_by_a_profile(trial)]
                both = both or bool(real and simulated)
                place = ", ".join(filter(None, (group.text, baseline, f"seed {seed}")))
                errors = mean_of(errors_of(one, real) for one in simulated if real)
                lines.append({"": place, "n": str(len(real)), **_cells(errors, again(real))})
                outside += [] if holds(errors) else [place]
    if not both:
        return None
    limits = f"{HIT_POINTS:g} point of hit rate, {THROUGHPUT_PCT:g} % of throughput, {TTFT_PCT:g} % of TTFT"
    said = f"Verdict: holds. All {len(lines)} places are within {limits}."
    if outside:
        at = f"{len(outside)} of {len(lines)} places: {'; '.join(outside)}"
        said = f"Verdict: fails at {at}. The limits are {limits}."
    return Group(grid(lines, "This machine's simulation, against the machine", fold=True), _LEGEND, said)


def again(real: Sequence[Observed]) -> Errors | None:
    """Of each repeat against the median of the others; None below two."""
    return mean_of(errors_of(one, [*real[:at], *real[at + 1 :]]) for at, one in enumerate(real) if len(real) > 1)


def _cells(simulated: Errors | None, real: Errors | None) -> dict[str, str]:
    cells = {}
    for name, head in {**_HITS, FLOW: "tok/s", TTFT: "TTFT"}.items():
        ours, theirs = (np.nan if errors is None else errors[name] for errors in (simulated, real))
        shown = NONE if np.isnan(ours) else f"{ours:{'' if name == TTFT else '+'}.1f}"
        cells[head] = f"{shown}/{NONE if np.isnan(theirs) else f'{abs(theirs):.1f}'}"
    return cells


def _observed(found: Frame, trial: Trial) -> Observed:
    import pandas as pd

    figures = pd.Series({name: found.metric(trial, name) for name in (*_HITS, FLOW)}, dtype=float)
    figures[FLOW] = figures[FLOW] or np.nan
    return Observed(figures, values_of(found.turns([trial]), "ttft_ms").groupby(["session", "turn"]).last())


def _goes_by_a_profile(trial: Trial) -> bool:
    return ((trial.engine or {}).get("cost") or {}).get("kind") == "machine profile"
