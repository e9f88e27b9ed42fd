"""The process of an isolated trial: python -m pensieve.trial.isolated, started by trial.isolation and by nobody else."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pensieve.compose import check
from pensieve.errors import PensieveError
from pensieve.results.process import Owner
from pensieve.trial.interrupt import remember_interrupts
from pensieve.trial.isolation import CRASH_FILE
from pensieve.trial.orphan import end_with
from pensieve.trial.outcome import Outcome
from pensieve.trial.run import attempt_trial
from pensieve.trial.task import Job
from pensieve.trial.terminal import INTERRUPTED, say
from pensieve.trial.tracking import Tracking, open_tracking


def main() -> int:
    """One attempt, as asked on stdin. The answer goes to stdout, and whatever else is printed to stderr."""
    asked = json.loads(sys.stdin.readline())
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        parent = asked["parent"]
        started_at = datetime.fromisoformat(parent["process_started_at"])
        end_with(Owner(parent["host"], parent["pid"], started_at))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # even where the shell told our parent to ignore it
        remember_interrupts()
        job = Job(**{**asked["job"], "folder": Path(asked["job"]["folder"])})
        _log_to(job.folder)
        with (job.folder / CRASH_FILE).open("w", encoding="utf-8") as crash:
            faulthandler.enable(crash)
            try:
                outcome = _attempt(asked, job)
            except KeyboardInterrupt:
                return INTERRUPTED
            except PensieveError as error:
                outcome = Outcome(0, "failed", error=str(error))
            finally:
                faulthandler.disable()
        (job.folder / CRASH_FILE).unlink(missing_ok=True)
        answer.write(json.dumps(asdict(outcome)) + "\n")
    return 0


def _attempt(asked: dict[str, Any], job: Job) -> Outcome:
    config = check(asked["config"])
    opened = open_tracking(config, Path(asked["outputs"]))
    tracking = Tracking(opened.outputs, opened.store, asked["mlflow"], opened.kept)
    return attempt_trial(config, asked["config"], tracking, job, say)


def _log_to(folder: Path) -> None:
    """As conf/hydra/job_logging does for a trial in the launcher's process."""
    file, console = logging.FileHandler(folder / "isolated.log", delay=True), logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    form = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=[file, console])


if __name__ == "__main__":
    sys.exit(main())
