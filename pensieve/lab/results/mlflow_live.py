"""Shows trials in MLflow while they run, in a process of its own: python -m pensieve.lab.results.mlflow_live < lines

The trials' process only writes lines of JSON to a pipe; importing MLflow and each of its transactions happen here.

It runs at a lower priority. A trial is

- {"run": {...}}, answered by READY when the run is there;
- any number of {"step": second, "turns": [[...], ...], "gauges": {...}}, each with what came since the last;
- {"end": true}, answered by ENDED.

The run is then left as it is: the copy of the whole trial, which follows, finds and completes it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pensieve.lab.results.mlflow_view import Served

READY, ENDED = "ready", "ended"
LOWER_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """The run that is written. tags: all of mlflow_view.trial_tags, by which the trial's copy finds it again."""

    outputs: str
    experiment: str
    name: str
    tags: dict[str, str]
    began_ms: int


def begin_line(target: LiveTarget) -> str:
    return json.dumps({"run": asdict(target)}) + "\n"


def step_line(step: int, turns: Sequence[Served], gauges: Mapping[str, float]) -> str:
    return json.dumps({"step": step, "turns": turns, "gauges": gauges}) + "\n"


def end_line() -> str:
    return json.dumps({"end": True}) + "\n"


def write_live(lines: Iterable[str], answers: IO[str]) -> None:
    """Write what the lines tell to MLflow until they end. Raises whatever MLflow does: nobody depends on this process."""
    from pensieve.lab.results.mlflow_store import client_of, log_batches, metrics_of
    from pensieve.lab.results.mlflow_view import Series, Served

    client: Any = None
    run_id, series = "", Series()
    for told in _told(lines):
        if "run" in told:
            target = LiveTarget(**told["run"])
            client, series = client_of(Path(target.outputs)), Series()
            run_id = _run_of(client, target)
            print(READY, file=answers, flush=True)
        elif "end" in told:
            print(ENDED, file=answers, flush=True)
        else:
            series.add(Served(*turn) for turn in told["turns"])
            values = series.values(told["gauges"])
            log_batches(client, run_id, [], metrics_of(values, int(time.time() * 1000), told["step"]))


def _run_of(client: Any, target: LiveTarget) -> str:
    from pensieve.lab.results.mlflow_store import experiment_id, first_run, lock

    outputs = Path(target.outputs)
    with lock(outputs):
        experiment = experiment_id(client, outputs, target.experiment)
        found = first_run(client, experiment, **_identifying(target.tags))
        if found is not None:
            return found
        return str(client.create_run(experiment, target.began_ms, target.tags, target.name).info.run_id)


def _identifying(tags: dict[str, str]) -> dict[str, str]:
    from pensieve.lab.results.mlflow_view import FINGERPRINT_TAG, PARENT_TAG, TRIAL_TAG

    return {name: tags[name] for name in (TRIAL_TAG, FINGERPRINT_TAG, PARENT_TAG) if name in tags}


def _told(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines:
        with suppress(ValueError):  # the last one, where the trial's process was killed in the middle of it
            yield json.loads(line)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trial, which ends the lines
    with suppress(OSError):
        os.nice(LOWER_PRIORITY - os.nice(0))
    write_live(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
