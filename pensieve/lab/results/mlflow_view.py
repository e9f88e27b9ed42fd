"""What MLflow shows of sweeps and trials: their names, and the tags from which its UI shows user, source and commit. No
MLflow is imported."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.trials import axis_value, field_of, swept_axes

TRIAL_TAG, SWEEP_TAG, KEY_TAG = "pensieve.trial_id", "pensieve.sweep_id", "pensieve.sweep_key"
COMMAND_TAG, DIRTY_TAG = "pensieve.command", "pensieve.git_dirty"
PARENT_TAG, FINGERPRINT_TAG, SUPERSEDED_TAG = "mlflow.parentRunId", "fingerprint", "superseded"
NOTE_TAG = "mlflow.note.content"  # which the UI shows as the run's description
_NOT_NAMED = ("seed", "repeat", "baseline")  # they have places of their own in a name
_ONLY_HYDRA = re.compile(r"_\w+_")  # _target_, _partial_, ...
_NOT_PARAMS = ("hydra", "tracking", "trial", "force", "resume", "sweep", "experiment", "experiment_name")


def sweep_name(sweep: Sweep) -> str:
    """ "ablation_eviction: eviction × baseline 2026-11-22 03:31": the overlay, what is swept, and this machine's time."""
    axes = " × ".join(axis for axis in swept_axes(sweep.overrides) if axis not in ("seed", "repeat"))
    what = ": ".join(filter(None, (sweep.experiment, axes))) or sweep.name
    return f"{what} {sweep.started_at.astimezone():%Y-%m-%d %H:%M}"


def trial_name(trial: Trial, sweep: Sweep | None) -> str:
    """ "eviction=lru seed=0": what the sweep varies. The baseline stands first where it varies, or nothing else does."""
    axes = swept_axes(sweep.overrides) if sweep else []
    parts = [f"{axis}={axis_value(trial, axis)}" for axis in axes if axis not in _NOT_NAMED]
    if "baseline" in axes or not parts:
        parts.insert(0, trial.baseline)
    return " ".join([*parts, f"seed={trial.seed}", *([f"repeat={trial.repeat}"] if trial.repeat else [])])


def sweep_tags(sweep: Sweep) -> dict[str, str]:
    return {
        SWEEP_TAG: str(sweep.id),
        KEY_TAG: sweep.key,
        **_who(),
        **_source(sweep.command, sweep.git_commit),
        **({COMMAND_TAG: sweep.command} if sweep.command else {}),
    }


def trial_tags(trial: Trial, sweep: Sweep | None, parent_run_id: str | None, reused: bool) -> dict[str, str]:
    environment = trial.environment or {}
    command = sweep.command if sweep else environment.get("command")
    tags = {
        TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint, "status": trial.status,
        "simulated": str(trial.simulated).lower(), "weights": str(trial.weights),
        **_who(), **_source(command, trial.git_commit),
    }  # fmt: skip
    if command:
        tags[COMMAND_TAG] = command
    if (environment.get("git") or {}).get("dirty"):
        tags[DIRTY_TAG] = "true"
    if parent_run_id:
        tags[PARENT_TAG] = parent_run_id
    if reused:
        tags["reused"] = "true"
    if trial.error:
        tags["error"] = trial.error
    if "reproduces" in (trial.flags or {}):
        tags["reproduces"] = str(trial.flags["reproduces"])
    return tags


def is_param(name: str) -> bool:
    """Whether a dotted field says what was measured; others tell Hydra what to build, or how a trial is run and kept."""
    parts = name.split(".")
    return parts[0] not in _NOT_PARAMS and not any(_ONLY_HYDRA.fullmatch(part) for part in parts)


def note(answers: Sequence[str], command: str | None) -> str:
    """What a sweep found, as Markdown: the answer, what qualifies it, and the command."""
    first = [f"**{answers[0]}**"] if answers else []
    rest = ["\n".join(f"- {answer}" for answer in answers[1:])] if answers[1:] else []
    return "\n\n".join([*first, *rest, *([f"`{command}`"] if command else [])])


def _who() -> dict[str, str]:
    """Tag the user who copies to MLflow: the results database does not keep users."""
    try:
        return {"mlflow.user": getpass.getuser()}
    except (KeyError, OSError):  # a container whose user has no name
        return {}


def _source(command: str | None, commit: str | None) -> dict[str, str]:
    """Tag the script of the command, and the checkout's commit."""
    found = {"mlflow.source.type": "LOCAL"}
    words = shlex.split(command) if command else []
    if words and PurePath(words[0]).name.startswith("python"):
        words = words[1:]
    if words:
        found["mlflow.source.name"] = words[0]
    if commit:
        found["mlflow.source.git.commit"] = commit
    return found


def data_files(trial: Trial) -> list[dict[str, str]]:
    """The files that the trial's workload read: name, path, sha256. Synthetic workloads read none."""
    found = []
    for name, told in ((trial.environment or {}).get("inputs") or {}).items():
        if name.startswith("workload."):
            path = str(field_of(trial, name))
            digest = str(told).removeprefix("sha256:")
            found.append({"name": PurePath(path).name, "path": path, "sha256": digest})
    return found
