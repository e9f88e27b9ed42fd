"""What a report says of a sweep: what ran, where, what came of it, and the verdict on each claim."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.provenance import device_of, ranges
from analysis.sweep import DEFAULT_COMMAND, Source
from pensieve.lab.results.claims import VERDICTS, Judged, Verdict
from pensieve.lab.results.frame import axis_value, differences, flat, leaves, text_of, varying_axes
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import JobResult
from pensieve.lab.results.sweep_table import SweepRow, cells_of, sweep_table
from pensieve.lab.statistics import estimated
from pensieve.units import NONE, Table, three_digits

UPFRONT = ("simulated", "random_weights")
"""Notes that stand before any number, beside those above every table."""
SYMBOLS: Mapping[Verdict, str] = {"holds": "✓", "fails": "✗", "inconclusive": "≈", "not comparable": "–"}


def contents(source: Source, judged: Sequence[Judged]) -> dict[str, Any]:
    """By the names that the template has for it."""
    told = sweep_table(source.store, source.sweep.id)
    upfront = [note for note in told.notes if note.above or note.code in UPFRONT]
    axes = varying_axes(source.sweep.overrides, source.trials)
    decided = [one for one in judged if one.verdict != "not comparable"]
    return {
        "sweep": source.sweep,
        "title": source.sweep.experiment
        or ", ".join({one.workload: None for one in source.trials})
        or source.sweep.name,
        "command": source.sweep.command or DEFAULT_COMMAND,
        "completed": sum(job.trial is not None for job in source.jobs),
        "expected": max(source.sweep.n_expected, len(source.jobs)),
        "warnings": [note.text for note in upfront],
        "answer": told.headline,
        "results": _comparison(told.rows),
        "notes": [note.text for note in told.notes if note not in upfront],
        "verdicts": {verdict: sum(one.verdict == verdict for one in decided) for verdict in VERDICTS[:-1]},
        "claims": [_claim(one) for one in decided],
        "elsewhere": len(judged) - len(decided),
        "failures": _failures(source.jobs),
        "flags": _flags(source.trials),
        "configuration": _shared(source.trials),
        "environment": _environment(source.trials),
        "trials": [_trial(job, axes) for job in source.jobs],
        "words": 3 + len(axes),
    }


def _comparison(rows: Sequence[SweepRow]) -> Table:
    """Baselines side by side, at every combination of the other swept axes."""
    named = ({**row.group, "baseline": row.baseline} for row in rows)
    return [name | cells for name, cells in zip(named, cells_of(rows), strict=True)]


def _claim(one: Judged) -> dict[str, str]:
    """A line of the claims that this sweep decides: n, seeds, what was held against what, and the trials stand last."""
    found, unit, verdict = one.measured.found if one.measured else None, one.claim.unit.replace("x", "×"), one.verdict
    group = f" ({one.group})" if one.group and one.name != one.claim.name else ""
    line = {
        "verdict": f"{SYMBOLS[verdict]} {verdict}{', simulated' if one.simulated else ''}",
        "claim": f"{one.claim.text}{group}",
        "claimed": f"{one.claim.claimed.shown} {unit}",
        "measured": NONE,
        "why": one.why,
        "of": "",
        "source": one.claim.source,
    }
    if one.measured is not None and found is not None:
        sides = f"{one.ours} against {one.theirs}" if one.theirs else one.ours
        line["measured"] = estimated(found).replace("\n", " ")
        n = f"n = {found.n:,} {one.measured.n_unit}, seeds: {found.groups}"
        line["of"] = f"{sides}, {n}, trials {ranges(one.trial_ids)}"
    return line


def _failures(jobs: Sequence[JobResult]) -> Table:
    return [
        {"trial": f"{one.baseline}, seed {one.seed}", "id": str(one.id), "status": one.status, "why": one.error or NONE}
        for one in (job.last for job in jobs)
        if one.status != "completed"
    ]


def _flags(trials: Sequence[Trial]) -> Table:
    """What trials say of themselves in a sentence: a line a sentence; numbers are among the notes."""
    said: dict[tuple[str, str], list[int]] = defaultdict(list)
    for trial in trials:
        for name, value in (trial.flags or {}).items():
            if isinstance(value, str) and value and name not in ("load", "floor_is"):
                said[name, value].append(trial.id)
    return [{"flag": name, "what it says": text, "trials": ranges(sorted(ids))} for (name, text), ids in said.items()]


def _shared(trials: Sequence[Trial]) -> Table:
    """The fields of the configuration that all trials share."""
    varying = {*differences(trials), "seed", "repeat"}
    fields = flat(trials[0].config) if trials else []
    shown = ((name, value) for name, value in fields if name not in varying and not re.search(r"(^|\.)_", name))
    return [{"field": name, "value": value} for name, value in shown]


def _environment(trials: Sequence[Trial]) -> Table:
    """What was recorded of machine and code; where trials differ, every value stands."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for trial in trials:
        own = {"device": f"{device_of(trial)}{' (simulated)' * trial.simulated}", "platform": trial.platform}
        code = {name: value for name, value in leaves(trial.environment or {}) if not name.startswith("code.")}
        for name, value in {**own, **code, "code": trial.code_hash}.items():
            found[name][text_of(value)] = None
    return [{"field": name, "value": " | ".join(values)} for name, values in found.items()]


def _trial(job: JobResult, axes: Sequence[str]) -> dict[str, str]:
    one = job.trial or job.last
    took = (one.finished_at - one.started_at).total_seconds() if one.finished_at else None
    return {
        "trial": str(one.id),
        "baseline": one.baseline,
        **{axis: axis_value(one, axis) for axis in axes},
        "status": f"{job.last.status}{', reused' if job.reused else ''}",
        "seed": f"{one.seed}, repeat {one.repeat}" if one.repeat else str(one.seed),
        "TTFT mean, ms": three_digits(job.value("ttft_ms_mean")),
        "output tok/s": three_digits(job.value("throughput_output_tok_s")),
        "took, s": three_digits(took),
        "code": one.code_hash[:8],
        "fingerprint": one.fingerprint[:8],
    }
