"""What a report says of a sweep: what ran, where, what came of it, and the verdict on each claim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from analysis.provenance import device_of, ranges
from analysis.sweep import DEFAULT_COMMAND, Source
from pensieve.lab.results.claims import VERDICTS, Judged, Verdict
from pensieve.lab.results.frame import axis_value, differences, flat, varying_axes
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import JobResult
from pensieve.lab.results.sweep_table import SweepRow, cells_of, sweep_table
from pensieve.lab.statistics import estimated
from pensieve.units import NONE, Table, three_digits

UPFRONT = ("simulated", "random_weights")
"""Notes that stand before any number, beside those above every table."""
SYMBOLS: Mapping[Verdict, str] = {"holds": "✓", "fails": "✗", "inconclusive": "≈", "not comparable": "–"}
_GROUPS = ("model", "cache", "eviction", "scheduler", "baseline", "workload", "hardware")
_PER_TRIAL = ("seed", "repeat")
_HIDDEN = ("_partial_", "missing", "architecture", "inspect")


def contents(source: Source, judged: Sequence[Judged]) -> dict[str, Any]:
    """By the names that the template has for it."""
    told = sweep_table(source.store, source.sweep.id)
    upfront = [note for note in told.notes if note.above or note.code in UPFRONT]
    axes = varying_axes(source.sweep.overrides, source.trials)
    decided = [one for one in judged if one.verdict != "not comparable"]
    return {
        "sweep": source.sweep,
        "title": source.sweep.experiment or _list(trial.workload for trial in source.trials) or source.sweep.name,
        "command": source.sweep.command or DEFAULT_COMMAND,
        "facts": _facts(source, axes),
        "warnings": [note.text for note in upfront],
        "answer": told.headline,
        "results": _comparison(told.rows),
        "notes": [note.text for note in told.notes if note not in upfront],
        "verdicts": {verdict: sum(one.verdict == verdict for one in decided) for verdict in VERDICTS[:-1]},
        "claims": [_claim(one) for one in decided],
        "elsewhere": len(judged) - len(decided),
        "failures": _failures(source.jobs),
        "flags": _flags(source.trials),
        "configuration": _configuration(source.trials),
        "environment": environment(source.trials),
        "trials": [_trial(job, axes) for job in source.jobs],
        "words": 3 + len(axes),
    }


def _facts(source: Source, axes: Sequence[str]) -> dict[str, str]:
    trials = source.trials
    done = sum(job.trial is not None for job in source.jobs)
    swept = (f"{axis} ({len({axis_value(trial, axis) for trial in trials})} values)" for axis in axes)
    found = {
        "trials completed": f"{done} of {max(source.sweep.n_expected, len(source.jobs))}",
        "seeds": str(len({trial.seed for trial in trials})),
        "baselines": _list(trial.baseline for trial in trials),
        "swept": _list(swept),
        "workload": _list(trial.workload for trial in trials),
        "model": _list(f"{trial.model}{f', {trial.dtype}' if trial.dtype else ''}" for trial in trials),
        "device": _list(_device(trial) for trial in trials),
        "load": _list(str(load) for trial in trials if (load := (trial.flags or {}).get("load"))),
    }
    return {label: value for label, value in found.items() if value}


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


def _configuration(trials: Sequence[Trial]) -> Mapping[str, Table]:
    """The fields that all trials share, a table a group."""
    groups: dict[str, list[dict[str, str]]] = {name: [] for name in (*_GROUPS, "others")}
    varying = differences(trials)
    for field, value in flat(trials[0].config) if trials else ():
        group, _, rest = field.partition(".")
        if field in varying or field in _PER_TRIAL or any(part in _HIDDEN for part in field.split(".")):
            continue
        name, place = (rest, group) if group in _GROUPS and rest else (field, "others")
        groups[place].append({"field": name, "value": value})
    return {name: lines for name, lines in groups.items() if lines}


def environment(trials: Sequence[Trial]) -> dict[str, str]:
    """Of all trials; where they differ, every value stands."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for trial in trials:
        for name, value in _environment(trial):
            if value:
                found[name][value] = None
    return {name: " | ".join(values) for name, values in found.items()}


def _environment(trial: Trial) -> Iterator[tuple[str, str]]:
    said = trial.environment or {}
    cpu, git, memory = said.get("cpu") or {}, said.get("git") or {}, said.get("memory_bytes")
    cores = cpu.get("usable_cores")
    yield "host", str(said.get("host") or "")
    yield "system", str(said.get("os") or "")
    yield "device", _device(trial)
    yield "processor", f"{cpu.get('model') or ''}{f', {cores} cores' if cores else ''}"
    yield "memory", f"{memory / 2**30:,.1f} GiB" if memory else ""
    each = (", ".join(str(value) for value in gpu.values() if value is not None) for gpu in said.get("gpus") or ())
    yield "GPUs", "; ".join(each)
    yield "platform", trial.platform
    yield "Python", str(said.get("python") or "")
    yield "packages", ", ".join(f"{name} {version}" for name, version in (said.get("packages") or {}).items())
    changed = " with local changes" if git.get("dirty") else ""
    yield "commit", f"{git['commit'][:12]}{changed}" if git.get("commit") else ""
    yield "code", f"hash {trial.code_hash[:12]}"


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


def _device(trial: Trial) -> str:
    return f"{device_of(trial)}{' (simulated)' if trial.simulated else ''}"


def _list(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
