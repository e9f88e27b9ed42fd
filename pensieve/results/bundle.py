"""A sweep in one zip that redraws its figures elsewhere: rows, tokens, configurations, code, versions, commands."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path

from sqlalchemy import insert, select

from pensieve.errors import MissingSeries, ResultsError
from pensieve.results.schema import ArtifactRow, Base, Trial, version_table
from pensieve.results.store import DATABASE_NAME, ResultsStore, open_store

SOURCES = ("pensieve", "analysis", "conf", "runners", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
FIGURE_SCRIPT = "analysis/figures.py"
_BATCH = 5000

README = """One sweep of Pensieve, complete: its figures are redrawn from the rows in outputs/{database}.

  sh redraw.sh            makes .venv with the versions in lock.txt, then draws into outputs/figures/latest

outputs/   the database with the rows of sweep {sweep} alone, and the output tokens of its trials
configs/   the resolved configuration of each trial; python runners/results.py reproduce <trial> runs one again
lock.txt   the packages that were installed where this was made
"""

REDRAW = """#!/bin/sh
# Draws every figure of the sweep again, from the rows in outputs/, into outputs/figures/latest.
set -eu
cd "$(dirname "$0")"
if [ -z "${{PYTHON:-}}" ]; then
    python3 -m venv .venv
    .venv/bin/python -m pip install --quiet {packages}
    PYTHON=.venv/bin/python
fi
PENSIEVE_OUTPUTS="$PWD/outputs"
PYTHONPATH="$PWD"  # the code of the bundle, not one that is installed here
export PENSIEVE_OUTPUTS PYTHONPATH
{command}
"""

_FIGURE_PACKAGES = ("numpy", "scipy", "matplotlib", "pandas", "pyarrow", "sqlalchemy", "filelock", "psutil", "rich")


def bundle_sweep(store: ResultsStore, sweep_id: int, checkout: Path, path: Path) -> Path:
    """Write the zip and return its path. checkout: where the package and analysis/ lie.

    Raises MissingSeries where no trial of the sweep is completed, ResultsError where the zip cannot be written.
    """
    store.sweep(sweep_id)
    jobs = store.trials_of_sweep(sweep_id)
    trials = {trial.id: trial for job in jobs for trial in (job.last, job.trial) if trial is not None}
    if not any(job.trial for job in jobs):
        raise MissingSeries(f"No trial of sweep {sweep_id} is completed; run its command again and bundle then.")
    if not (checkout / FIGURE_SCRIPT).is_file():
        raise ResultsError(f"There is no {FIGURE_SCRIPT} in {checkout}; bundle from a checkout, which has the figures.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            partial = path.with_name(f".{path.name}.partial")
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
                tokens = _copy_rows(store, sweep_id, list(trials), Path(name))
                archive.write(Path(name) / DATABASE_NAME, f"outputs/{DATABASE_NAME}")
                for stored, file in tokens.items():
                    archive.write(file, f"outputs/{stored}")
                for trial in trials.values():
                    archive.writestr(f"configs/trial-{trial.id}.json", json.dumps(trial.config, indent=2))
                for file in _source_files(checkout):
                    archive.write(file, file.relative_to(checkout).as_posix())
                lock = _lock()
                archive.writestr("lock.txt", "".join(f"{package}=={version}\n" for package, version in lock.items()))
                archive.writestr("README.txt", README.format(database=DATABASE_NAME, sweep=sweep_id))
                pinned = [f"{package}=={lock[package]}" for package in _FIGURE_PACKAGES if package in lock]
                command = f'"$PYTHON" {FIGURE_SCRIPT} --sweep {sweep_id} --quiet'
                archive.writestr("redraw.sh", REDRAW.format(packages=" ".join(pinned), command=command))
        partial.replace(path)
    except OSError as error:
        raise ResultsError(
            f"The bundle cannot be written to {path} ({error.strerror or error}); name another file with --to."
        ) from None
    return path


def _copy_rows(store: ResultsStore, sweep_id: int, trial_ids: Sequence[int], folder: Path) -> dict[str, Path]:
    """Copy the sweep's rows, with their ids, into a SQLite database; returns the token files by their path in the bundle."""
    target = open_store(folder)
    files: dict[str, Path] = {}
    for trial_id in trial_ids:
        for artifact in store.artifacts_of(trial_id, "tokens"):
            if artifact.path.is_file():
                files[f"tokens/{trial_id}-{artifact.path.name}"] = artifact.path
    for table in Base.metadata.sorted_tables:
        if table in (version_table, ArtifactRow.__table__):
            continue
        query = select(table)
        if "sweep_id" in table.c:
            query = query.where(table.c.sweep_id == sweep_id)
        elif table.name == "sweep":
            query = query.where(table.c.id == sweep_id)
        else:
            query = query.where((table.c.id if table is Trial.__table__ else table.c.trial_id).in_(trial_ids))
        with store.database.reading() as source, target.database.writing() as copy:
            for part in source.execute(query).partitions(_BATCH):
                copy.execute(insert(table), [dict(row._mapping) for row in part])
    with target.database.writing() as copy:
        digests = {a.path: a.sha256 for trial_id in trial_ids for a in store.artifacts_of(trial_id, "tokens")}
        for stored, file in files.items():
            trial_id = int(stored.partition("/")[2].partition("-")[0])
            copy.execute(
                insert(ArtifactRow).values(trial_id=trial_id, kind="tokens", path=stored, sha256=digests[file])
            )
    target.database.checkpoint()
    return files


def _source_files(checkout: Path) -> Iterable[Path]:
    for name in SOURCES:
        top = checkout / name
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


def _lock() -> dict[str, str]:
    found = {str(d.metadata["Name"]).lower(): d.version for d in distributions() if d.metadata["Name"]}
    return {name: found[name] for name in sorted(found) if name != "pensieve"}
