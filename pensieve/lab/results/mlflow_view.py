"""What MLflow shows of sweeps and trials: their names, the tags from which its UI shows user, source and commit, and a
trial's seconds as series (first tokens by turn, where history was found, what the cache holds). No MLflow is imported."""

from __future__ import annotations

import getpass
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import PurePath
from typing import Any, NamedTuple

from pensieve.lab.results.frame import counts
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ENGINE, Reading
from pensieve.lab.results.trials import axis_value, field_of, swept_axes
from pensieve.lab.statistics import median

TRIAL_TAG, SWEEP_TAG, KEY_TAG = "pensieve.trial_id", "pensieve.sweep_id", "pensieve.sweep_key"
COMMAND_TAG, DIRTY_TAG = "pensieve.command", "pensieve.git_dirty"
PARENT_TAG, FINGERPRINT_TAG, SUPERSEDED_TAG = "mlflow.parentRunId", "fingerprint", "superseded"
NOTE_TAG = "mlflow.note.content"  # which the UI shows as the run's description
LIVE = "live/"  # before the names of these metrics; the section of a run's page in which MLflow draws them
TURNS_SHOWN = 10  # a line each: more could not be told apart
MOST_STEPS = 100
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


# The seconds of a trial


class Served(NamedTuple):
    """What is shown of one turn that counts. Tokens: None where the system does not say what it found."""

    turn: int
    ttft_ms: float | None
    history_tokens: int | None
    gpu_hit_tokens: int | None
    cpu_hit_tokens: int | None
    disk_hit_tokens: int | None = None


def served(turn: Any) -> Served | None:
    """turn: a TurnRecord, or its row. None where it does not count: it prepared others, or did not complete."""
    return Served(*(getattr(turn, name) for name in Served._fields)) if counts(turn) else None


class Series:
    """Everything up to a moment; add what came since, then ask for the values at that moment."""

    def __init__(self) -> None:
        self._ttft_ms: defaultdict[int, list[float]] = defaultdict(list)
        self._changed: set[int] = set()
        self._history = self._gpu = self._cpu = self._disk = 0
        self._turns = 0

    def add(self, turns: Iterable[Served]) -> None:
        for one in turns:
            self._turns += 1
            if one.ttft_ms is not None and one.turn <= TURNS_SHOWN:
                self._ttft_ms[one.turn].append(one.ttft_ms)
                self._changed.add(one.turn)
            if one.history_tokens and one.gpu_hit_tokens is not None:
                self._history += one.history_tokens
                self._gpu += one.gpu_hit_tokens
                self._cpu += one.cpu_hit_tokens or 0
                self._disk += one.disk_hit_tokens or 0

    def values(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """By metric. A turn's median so far stands there when it has changed since the last call; the shares of history are
        of all turns so far. gauges: of this moment."""
        found = {f"{LIVE}{name}": value for name, value in gauges.items()}
        found[f"{LIVE}turns"] = float(self._turns)
        for turn in sorted(self._changed):
            found[f"{LIVE}ttft_ms_p50/turn_{turn:02d}"] = median(self._ttft_ms[turn])
        self._changed.clear()
        if self._history:
            found_tokens = self._gpu + self._cpu + self._disk
            rates = {"gpu": self._gpu, "cpu": self._cpu, "missed": self._history - found_tokens}
            if self._disk:
                rates["disk"] = self._disk
            found |= {f"{LIVE}history/{name}": tokens / self._history for name, tokens in rates.items()}
        return found


def series_of(turns: Sequence[Any], readings: Iterable[Reading]) -> Iterator[tuple[int, dict[str, float]]]:
    """(second, values) of a trial that has ended, at most MOST_STEPS of them."""
    done = sorted(
        ((turn.finished_s, one) for turn in turns if turn.finished_s is not None and (one := served(turn))),
        key=lambda pair: pair[0],
    )
    known = [one for one in readings if one.device == ENGINE and one.value is not None]
    end_s = max([at_s for at_s, _ in done] + [one.at_s for one in known], default=0.0)
    stride = max(1, ceil(end_s / MOST_STEPS))
    series, gauges = Series(), dict[str, float]()
    next_turn = next_reading = 0
    for step in range(stride, ceil(end_s) + stride, stride) if done or known else ():
        begun = next_turn
        while next_turn < len(done) and done[next_turn][0] <= step:
            next_turn += 1
        while next_reading < len(known) and known[next_reading].at_s <= step:
            gauges[known[next_reading].name] = known[next_reading].value or 0.0
            next_reading += 1
        series.add(one for _, one in done[begun:next_turn])
        yield step, series.values(gauges)
