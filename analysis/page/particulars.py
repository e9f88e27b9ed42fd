"""What a report says of a sweep in words and tables: what ran, where, what came of it, and how to do it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.page.document import Table
from analysis.provenance import device_of, ranges
from analysis.sweep import DEFAULT_COMMAND, Source
from pensieve.lab.results.claims import Judged
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.notes import NOTE_COLUMNS, notes
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import JobResult
from pensieve.lab.results.trials import axis_value, differences, flat, varying_axes
from pensieve.units import NONE, three_digits

_GROUPS = ("model", "cache", "eviction", "scheduler", "baseline", "workload", "hardware")
MANY = 4
_PER_TRIAL = ("seed", "repeat")
_HIDDEN = ("_partial_", "missing", "architecture", "inspect")
UPFRONT = ("simulated", "random_weights")
"""Notes that a report shows before any number, beside those above every table."""
_FLAGS_AS_FACTS = ("load", "bench", "floor_is")


def title(source: Source) -> str:
    """What was swept: the overlay or the workload, and the values of each axis, or how many where they are more than MANY."""
    trials = source.trials
    subject = source.sweep.experiment or _list(trial.workload for trial in trials) or source.sweep.name
    axes = {"baseline": [trial.baseline for trial in trials]}
    for axis in varying_axes(source.sweep.overrides, trials):
        axes[axis] = [axis_value(trial, axis) for trial in trials]
    swept = [_swept(axis, list(dict.fromkeys(values))) for axis, values in axes.items() if len(set(values)) > 1]
    return f"{subject}: {'; '.join(swept)}" if swept else subject


def _swept(axis: str, values: Sequence[str]) -> str:
    shown = f"{', '.join(values[:-1])} and {values[-1]}" if len(values) <= MANY else f"{len(values)} values"
    return shown if axis == "baseline" and len(values) <= MANY else f"{axis} of {shown}"


def subtitle(source: Source) -> str:
    sweep = source.sweep
    return f"Sweep {sweep.id}, {sweep.status}, begun {sweep.started_at:%Y-%m-%d %H:%M} UTC on {sweep.host}"


def facts(source: Source) -> list[tuple[str, str]]:
    trials = source.trials
    done = sum(job.trial is not None for job in source.jobs)
    seeds = len({trial.seed for trial in trials})
    found = [
        ("trials completed", f"{done} of {max(source.sweep.n_expected, len(source.jobs))}"),
        ("seeds", str(seeds)),
        ("baselines", _list(trial.baseline for trial in trials)),
        ("workload", _list(trial.workload for trial in trials)),
        ("model", _list(f"{trial.model}{f', {trial.dtype}' if trial.dtype else ''}" for trial in trials)),
        ("device", _list(_device(trial) for trial in trials)),
        ("load", _list(str(load) for trial in trials if (load := (trial.flags or {}).get("load")))),
    ]
    return [(label, value) for label, value in found if value]


def warnings(source: Source) -> list[str]:
    """What a reader has to know before any number."""
    found = Frame(source.store, source.sweep.id, *NOTE_COLUMNS)
    return [note.text for note in notes(found, found.groups()) if note.above or note.code in UPFRONT]


def failures(source: Source) -> Table | None:
    lines = [
        {
            "trial": f"{last.baseline}, seed {last.seed}",
            "id": str(last.id),
            "status": last.status,
            "why": last.error or NONE,
        }
        for last in (job.last for job in source.jobs)
        if last.status != "completed"
    ]
    return Table(lines, "Trials that did not complete") if lines else None


def flags(source: Source) -> Table | None:
    """What trials say of themselves that a reader should know: a line a flag, with the first of its sentences."""
    said: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trial in source.trials:
        for name, value in (trial.flags or {}).items():
            if name not in _FLAGS_AS_FACTS and value not in (None, False, 0, 0.0, [], {}, ""):
                said[name][_flag(name, value)].append(trial.id)
    lines = []
    for name, texts in said.items():
        more = f" ({len(texts) - 1} more like it)" if len(texts) > 1 else ""
        ids = ranges(sorted(id_ for ids in texts.values() for id_ in ids))
        lines.append({"flag": name, "what it says": f"{next(iter(texts))}{more}", "trials": ids})
    return Table(lines, "What trials flag about themselves") if lines else None


def configuration(source: Source) -> list[Table]:
    """The fields that all trials share, a table a group."""
    trials = source.trials
    if not trials:
        return []
    varying = differences(trials)
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for field, value in flat(trials[0].config):
        group, _, rest = field.partition(".")
        if field in varying or field in _PER_TRIAL or any(part in _HIDDEN for part in field.split(".")):
            continue
        place = group if group in _GROUPS and rest else "others"
        groups[place].append({"field": rest if place != "others" else field, "value": value})
    order = [*(name for name in _GROUPS if name in groups), "others"]
    return [Table(groups[name], name) for name in order if groups[name]]


def environment(source: Source) -> Table:
    """Of all trials; where they differ, every value stands."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for trial in source.trials:
        for name, value in _environment(trial):
            if value:
                found[name][value] = None
    return Table([{"what": name, "value": " | ".join(values)} for name, values in found.items()])


def engines(source: Source) -> list[Table]:
    """The settings that each baseline's engine reports of itself, from its first trial."""
    tables = []
    for name in dict.fromkeys(trial.baseline for trial in source.trials):
        trial = next(one for one in source.trials if one.baseline == name)
        said = [(setting, value) for setting, value in flat(trial.engine or {}) if value not in ("", "None")]
        lines = [{"setting": setting, "value": value} for setting, value in said]
        tables.append(Table(lines, f"What the engine of {name} reports (trial {trial.id})"))
    return tables


def trials(source: Source) -> Table:
    axes = varying_axes(source.sweep.overrides, source.trials)
    return Table([_trial(job, axes) for job in source.jobs], words=3 + len(axes))


def commands(source: Source) -> list[tuple[str, str]]:
    """What it does, and the line to type."""
    sweep = source.sweep
    found = [
        ("run the sweep: what is completed is not run again", sweep.command or DEFAULT_COMMAND),
        ("this page", f"python analysis/report.py --sweep {sweep.id}"),
        ("its figures, with the numbers behind them", f"python analysis/figures.py --sweep {sweep.id}"),
    ]
    if source.trials:
        found.append(
            ("one trial again, and what differs", f"python runners/results.py reproduce {source.trials[0].id}")
        )
    return found


def stands_on(one: Judged) -> str:
    """n, seeds, what was held against what, and the trials."""
    found = one.measured
    if found is None:
        return ""
    seeds = "one seed" if found.seeds == 1 else f"{found.seeds} seeds"
    sides = f"{one.ours} against {one.theirs}" if one.theirs else str(one.ours)
    parts = [
        sides,
        f"n = {found.n:,} {found.n_unit}, {seeds}",
        f"trials {ranges(sorted(found.trial_ids))}",
    ]
    return " · ".join(part for part in parts if part)


def _trial(job: JobResult, axes: Sequence[str]) -> dict[str, str]:
    one = job.trial or job.last
    took = (one.finished_at - one.started_at).total_seconds() if one.finished_at else None
    window = (
        None if one.measure_start_s is None or one.measure_end_s is None else one.measure_end_s - one.measure_start_s
    )
    return {
        "trial": str(one.id),
        "baseline": one.baseline,
        **{axis: axis_value(one, axis) for axis in axes},
        "status": f"{job.last.status}{', reused' if job.reused else ''}",
        "job": str(job.job),
        "seed": f"{one.seed}, repeat {one.repeat}" if one.repeat else str(one.seed),
        "TTFT\nmean, ms": three_digits(job.value("ttft_ms_mean")),
        "output\ntok/s": three_digits(job.value("throughput_output_tok_s")),
        "window\ns": three_digits(window),
        "took\ns": three_digits(took),
        "code": one.code_hash[:8],
        "fingerprint": one.fingerprint[:8],
    }


def _environment(trial: Trial) -> Iterable[tuple[str, str]]:
    said = trial.environment or {}
    cpu, git = said.get("cpu") or {}, said.get("git") or {}
    yield "host", str(said.get("host") or "")
    yield "system", str(said.get("os") or "")
    yield "device", _device(trial)
    cores = cpu.get("usable_cores")
    yield "processor", f"{cpu.get('model') or ''}{f', {cores} cores' if cores else ''}"
    memory = said.get("memory_bytes")
    yield "memory", f"{memory / 2**30:,.1f} GiB" if memory else ""
    yield "GPUs", "; ".join(_gpu(gpu) for gpu in said.get("gpus") or ())
    yield "platform", trial.platform
    yield "Python", str(said.get("python") or "")
    yield "packages", ", ".join(f"{name} {version}" for name, version in (said.get("packages") or {}).items())
    changed = " with local changes" if git.get("dirty") else ""
    yield "commit", f"{git['commit'][:12]}{changed}" if git.get("commit") else ""
    yield "code", f"hash {trial.code_hash[:12]}"


def _gpu(gpu: Any) -> str:
    return (
        ", ".join(str(value) for value in gpu.values() if value is not None) if isinstance(gpu, Mapping) else str(gpu)
    )


def _device(trial: Trial) -> str:
    return f"{device_of(trial)}{' (simulated)' if trial.simulated else ''}"


def _flag(name: str, value: Any) -> str:
    if name == "thin_percentiles" and isinstance(value, list):
        labelled = sum("[" in one for one in value)
        plain = ", ".join(one for one in value if "[" not in one)
        more = f"{' and ' if plain else ''}{labelled} of single turns or labels" if labelled else ""
        return f"Too few values to take these percentiles at their word: {plain}{more}."
    if name == "drain_share" and isinstance(value, float):
        return f"{100 * value:.0f} % of the output tokens came after the window and are left out of the throughput."
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _list(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
