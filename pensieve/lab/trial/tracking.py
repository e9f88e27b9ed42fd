"""Where a trial is recorded: the database that tracking= names, and whether MLflow gets a copy."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pensieve.errors import ConfigError
from pensieve.lab.compose import TrialConfig, outputs_folder
from pensieve.lab.compose.schema import TrackingConfig
from pensieve.lab.results.mlflow_runs import remote_url
from pensieve.lab.results.store import ResultsStore, open_store


@dataclass(frozen=True, slots=True)
class Tracking:
    """kept: False for tracking=off, whose outputs folder is thrown away when the process ends."""

    outputs: Path
    store: ResultsStore
    mlflow: bool
    kept: bool


def open_tracking(config: TrialConfig, outputs: Path | None = None) -> Tracking:
    """outputs: that of the sweep, where the trial belongs to one. Raises ConfigError, ResultsError."""
    return open_named(config.tracking, outputs)


def open_named(tracking: TrackingConfig, outputs: Path | None = None) -> Tracking:
    """As open_tracking, from an option of conf/tracking alone: a benchmark has no composed trial."""
    kept = tracking.name != "off"
    url = None
    if tracking.url_env:
        url = os.environ.get(tracking.url_env)
        if not url:
            raise ConfigError(
                f"tracking={tracking.name} reads the database's URL from {tracking.url_env}, which is not "
                "set; export it, or use tracking=local."
            )
    if tracking.mlflow and kept:
        remote_url()  # a mistake in it is told before anything is opened
    folder = outputs or (outputs_folder() if kept else Path(_thrown_away().name))
    return Tracking(folder, open_store(folder, url), tracking.mlflow and kept, kept)


@functools.lru_cache(maxsize=1)
def _thrown_away() -> tempfile.TemporaryDirectory[str]:
    """One a process, so that the trials of a sweep meet in one database; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pensieve-off-")
