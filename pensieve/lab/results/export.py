"""What was recorded, for other programs: a sweep as one JSON a baseline, and all its turns as CSV; sweeps and trials as lines
of text, quick for ten thousand of them."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from sqlalchemy import Row, and_, select

from pensieve.errors import MissingSeries, ResultsError
from pensieve.lab.results.frame import Frame, measured_turns
from pensieve.lab.results.schema import MetricRow, Sweep, SweepTrial, Trial
from pensieve.lab.results.store import TURN_COLUMNS, ResultsStore
from pensieve.lab.statistics import median, nearest_rank

TRIAL_COLUMNS = ("trial_id", "model", "baseline", "eviction", "cache", "workload", "hardware", "seed", "repeat")
_MEGABYTE = 1e6
_AS_RECORDED = ("queue_ms", "compute_ms", "transfer_ms", "sent_bytes", "received_bytes")


def export_sweep(store: ResultsStore, sweep_id: int, folder: Path) -> list[Path]:
    """Write the current trials of a sweep into the folder; returns the files.

    Raises MissingSeries where none is completed, ResultsError where the folder cannot be written.
    """
    found = Frame(store, sweep_id)
    if not found.trials:
        raise MissingSeries(f"No trial of sweep {sweep_id} is completed; run its command again and export then.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written, turns = [], folder / "turns.csv"
        for panel in found.panels():
            for name, trials in panel.trials.items():
                parts = [name, *(f"{axis}={value}" for axis, value in panel.group.items())]
                stem = re.sub(r"[^\w.=-]+", "_", "--".join(parts))
                written.append(folder / f"{stem}.json")
                report = json.dumps(baseline_report(found, trials), indent=2)
                written[-1].write_text(f"{report}\n", encoding="utf-8")
        with turns.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*TRIAL_COLUMNS, *TURN_COLUMNS])
            for trial in found.trials:
                head = [trial.id, *(getattr(trial, name) for name in TRIAL_COLUMNS[1:])]
                writer.writerows([*head, *turn] for turn in store.turns_of(trial.id))
        return [*written, turns]
    except OSError as error:
        raise ResultsError(
            f"The export cannot be written to {folder} ({error.strerror or error}); name another folder with --to."
        ) from None


def baseline_report(found: Frame, trials: Sequence[Trial]) -> dict[str, Any]:
    """Report one baseline. A run is one measured turn that completed; its id: trial/session/turn, and /iteration if repeated.

    total_ms: arrival to last token. per_token_ms: total over generated tokens, null without any. prompt_tokens,
    new_tokens: the median run's, history included in the prompt. batch_size: the most runs that were served at once.
    *_mb: 10^6 bytes moved between host and device for the turn (record.TurnRecord says which), null where they were not
    counted. queue_ms, compute_ms, transfer_ms: of total_ms, before admission, computing, and waiting for copies or a
    network. sent_bytes, received_bytes: over a network, as the client serialised them. gpu_util_pct, memory_bw_gbps: the
    trial's, null where the device does not tell: nothing is estimated. p95: nearest rank.
    """
    runs: list[dict[str, Any]] = []
    prompts: list[int] = []
    at_once: list[int] = []
    for trial in trials:
        device = {name: found.metric(trial, name) for name in ("gpu_util_pct", "memory_bw_gbps")}
        turns = measured_turns(found.store, trial.id)
        runs += [_run(trial, turn, device) for turn in turns]
        prompts += [turn.prompt_tokens for turn in turns if turn.prompt_tokens is not None]
        edges = sorted(edge for turn in turns for edge in _edges(turn))
        at_once += accumulate(change for _, change in edges)
    first = trials[0]
    totals, each_token = ([run[name] for run in runs if run[name] is not None] for name in ("total_ms", "per_token_ms"))
    return {
        "baseline": first.baseline,
        "model_id": (first.config.get("model") or {}).get("hub_id") or first.model,
        "prompt_tokens": int(median(prompts)) if prompts else None,
        "new_tokens": int(median([run["tokens_generated"] for run in runs])) if runs else None,
        "batch_size": max(at_once, default=None),
        "runs": runs,
        "aggregates": {
            "mean_total_ms": fmean(totals) if totals else None,
            "p95_total_ms": nearest_rank(totals, 0.95) if totals else None,
            "mean_per_token_ms": fmean(each_token) if each_token else None,
        },
        "simulated": first.simulated,
        "network": (first.engine or {}).get("network"),
    }


def _run(trial: Trial, turn: Row[Any], device: Mapping[str, float | None]) -> dict[str, Any]:
    each = turn.latency_ms / turn.output_tokens if turn.output_tokens and turn.latency_ms is not None else None
    return {
        "run_id": f"{trial.id}/{turn.session}/{turn.turn}" + (f"/{turn.iteration}" if turn.iteration else ""),
        "total_ms": turn.latency_ms,
        "per_token_ms": each,
        "tokens_generated": turn.output_tokens,
        **device,
        "host_to_device_mb": None if turn.h2d_bytes is None else turn.h2d_bytes / _MEGABYTE,
        "device_to_host_mb": None if turn.d2h_bytes is None else turn.d2h_bytes / _MEGABYTE,
        **{column: getattr(turn, column) for column in _AS_RECORDED},
    }


def _edges(turn: Row[Any]) -> Iterable[tuple[float, int]]:
    """+1 when the turn was admitted (or arrived, where the engine does not tell), -1 when it finished."""
    began = turn.admitted_s if turn.admitted_s is not None else turn.intended_s
    return () if began is None or turn.finished_s is None else ((began, 1), (turn.finished_s, -1))


# Lines of text

_NONE = "-"
_SHOWN = ("ttft_ms_p50", "throughput_output_tok_s", "gpu_hit_rate")
_TITLES = ("trial", "status", "baseline", "model", "cache", "eviction", "workload", "hardware", "seed", "started")


def list_sweeps(store: ResultsStore, limit: int | None = None) -> Iterable[str]:
    """A line for each sweep, the newest first."""
    query = select(Sweep).order_by(Sweep.started_at.desc(), Sweep.id.desc()).limit(limit)
    with store.database.reading() as connection:
        rows = connection.execute(query).all()
    cells = [(str(r.id), r.status, str(r.n_expected), _moment(r.started_at), _overrides(r.overrides)) for r in rows]
    return _aligned(("sweep", "status", "trials", "started", "overrides"), cells)


def list_trials(
    store: ResultsStore, sweep_id: int | None = None, status: str | None = None, limit: int | None = None
) -> Iterable[str]:
    """A line for each trial, the newest first, with the metrics that tell trials apart. limit None: all trials."""
    columns = [Trial.id, *(getattr(Trial, name) for name in _TITLES[1:-1]), Trial.started_at]
    query = select(*columns).order_by(Trial.id.desc()).limit(limit)
    if sweep_id is not None:
        query = query.join(SweepTrial, and_(SweepTrial.trial_id == Trial.id, SweepTrial.sweep_id == sweep_id))
    if status is not None:
        query = query.where(Trial.status == status)
    with store.database.reading() as connection:
        trials = connection.execute(query).all()
        chosen = select(MetricRow.trial_id, MetricRow.name, MetricRow.value).where(
            MetricRow.name.in_(_SHOWN), MetricRow.label == "", MetricRow.trial_id.in_(query.with_only_columns(Trial.id))
        )
        values = {(row.trial_id, row.name): row.value for row in connection.execute(chosen)}
    cells = [
        [_NONE if one is None else _moment(one) if isinstance(one, datetime) else str(one) for one in trial]
        + [_number(values.get((trial.id, name))) for name in _SHOWN]
        for trial in trials
    ]
    return _aligned((*_TITLES, *_SHOWN), cells)


def show_trial(store: ResultsStore, trial_id: int) -> Iterable[str]:
    """All that is recorded of one trial but its turns and samples. Raises ResultsError where there is no such trial."""
    trial = store.trial(trial_id)
    for name in (c.name for c in Trial.__table__.columns):
        value = getattr(trial, name)
        if value is None or name in ("traceback", "config", "environment", "engine", "flags"):
            continue
        yield f"{name:<20} {value}"
    for name in ("flags", "engine", "environment", "config"):
        yield f"{name}:"
        yield from ("  " + line for line in json.dumps(getattr(trial, name), indent=1, default=str).splitlines())
    yield "metrics:"
    metrics = [
        (f"{m.name}[{m.label}]" if m.label else m.name, _number(m.value), m.unit, _NONE if m.n is None else str(m.n))
        for m in sorted(store.metrics_of(trial_id), key=lambda m: (m.label, m.name))
    ]
    yield from ("  " + line for line in _aligned(("name", "value", "unit", "n"), metrics))
    for artifact in store.artifacts_of(trial_id):
        yield f"artifact {artifact.kind}: {artifact.path}{'' if artifact.path.exists() else ' (gone)'}"
    if trial.traceback:
        yield trial.traceback.rstrip()


def _aligned(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, without rich: its tables take seconds for ten thousand rows."""
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    form = "  ".join(f"{{:<{width}}}" for width in widths)
    return [form.format(*row).rstrip() for row in (titles, *cells)]


def _overrides(overrides: dict[str, Any]) -> str:
    texts = {key: ",".join(value) if isinstance(value, list) else value for key, value in overrides.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items()) or _NONE


def _moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
