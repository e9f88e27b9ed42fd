"""A sweep as one HTML page with a verdict for each claim: python analysis/report.py [--sweep ID]

Reads the results database and runs nothing. The page needs no network and no other file; it goes to outputs/reports, and
to the sweep's parent run in MLflow where it has one. The verdicts go to table `claim`, in place of earlier ones.
"""

import argparse
import re
import sys
import tempfile
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import figures
from analysis.sweep import DEFAULT_COMMAND, Source, device_of, ranges
from pensieve.lab.compose.conf import conf_folder, outputs_folder
from pensieve.lab.results.claims import VERDICTS, Judged, Verdict, judge_sweep, read_claims, record_claims
from pensieve.lab.results.frame import axis_value, differences, flat, leaves, text_of, varying_axes
from pensieve.lab.results.mlflow_runs import copy_sweep
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import JobResult, report_file
from pensieve.lab.results.sweep_table import cells_of, sweep_table
from pensieve.lab.statistics import estimated
from pensieve.units import NONE, Table, three_digits

PAGE = Path(__file__).with_name("page")
UPFRONT = ("simulated", "random_weights")
"""Notes that stand before any number, beside those above every table."""
SYMBOLS: Mapping[Verdict, str] = {"holds": "✓", "fails": "✗", "inconclusive": "≈", "not comparable": "–"}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return figures.guarded(lambda: _write(options))


def _write(options: argparse.Namespace) -> None:
    outputs = outputs_folder()
    claims = read_claims(options.claims or conf_folder() / "claims.yaml")
    source = figures.chosen_source(options)
    store, sweep = source.store, source.sweep
    path = options.to or report_file(outputs, sweep.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    judged = judge_sweep(store, sweep.id, claims)
    with tempfile.TemporaryDirectory() as folder:
        html = render(source, judged, Path(folder))
    path.write_text(html, encoding="utf-8")
    print(path)
    record_claims(store, sweep.id, judged)
    if sweep.mlflow_run_id is not None and copy_sweep(outputs, store, sweep.id) is not None:
        print(f"Logged to MLflow as report.html of run {sweep.mlflow_run_id}.")


def render(source: Source, judged: Sequence[Judged], folder: Path) -> str:
    """The sweep as a page: style and pictures are inside, and every value is escaped. Figures are drawn into `folder`."""
    drawings, problems = figures.draw_all(source, folder)
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda path: b64encode(path.read_bytes()).decode("ascii")
    return environment.get_template("page.html.j2").render(
        contents(source, judged), drawings=drawings, problems=problems, written=datetime.now(UTC),
        style=Markup((PAGE / "page.css").read_text(encoding="utf-8")),
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    found = figures.source_options(__doc__ or "")
    found.add_argument("--to", type=Path, help="file to write (default: reports/sweep-ID.html in the outputs folder)")
    found.add_argument("--claims", type=Path, help="file of claims (default: conf/claims.yaml)")
    return found


# What the page says: what ran, where, what came of it, and the verdict on each claim


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
        "results": [
            {**row.group, "baseline": row.baseline, **cells}
            for row, cells in zip(told.rows, cells_of(told.rows), strict=True)
        ],
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


if __name__ == "__main__":
    sys.exit(main())
