"""A service-level objective is an argument of a view: it judges the turns of finished trials and changes none of their rows.

A sweep's objective is what its command set (its overrides); that of a trial by itself is in its configuration.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pensieve.errors import ResultsError
from pensieve.lab.metrics import MetricValue, Slo, slo_metrics
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.tokens import read_tokens
from pensieve.serve.record import TurnRecord

if TYPE_CHECKING:
    from pensieve.lab.results.store import ResultsStore

SLO_METRICS = ("goodput_req_s", "slo_attainment")
"""Never read from a trial's rows: older versions stored there what the latest objective gave."""

PREFIX = "slo."


def slo_of_sweep(overrides: Mapping[str, Any]) -> Slo:
    """overrides: of a sweep, key to text."""
    typed = {key.lstrip("+"): str(text) for key, text in overrides.items()}
    return _slo({key.removeprefix(PREFIX): text for key, text in typed.items() if key.startswith(PREFIX)})


def slo_of_trial(trial: Trial) -> Slo:
    """The objective of the command that ran the trial."""
    return _slo((trial.config or {}).get("slo") or {})


def _slo(asked: Mapping[str, Any]) -> Slo:
    given = {name: float(value) for name, value in asked.items() if str(value).lower() not in ("none", "null")}
    return Slo(given.get("ttft_ms"), given.get("tpot_ms"))


def judged(store: ResultsStore, trial: Trial, slo: Slo) -> list[MetricValue]:
    """SLO_METRICS of a trial under an objective; empty where none is asked, or the trial has no window."""
    if slo == Slo() or trial.measure_start_s is None or trial.measure_end_s is None:
        return []
    return slo_metrics(_turns(store, trial), trial.measure_start_s, trial.measure_end_s, slo)


def _turns(store: ResultsStore, trial: Trial) -> Sequence[TurnRecord]:
    """The recorded turns, with the times of their tokens where the token file is still there."""
    records = [TurnRecord(**row._mapping) for row in store.turns_of(trial.id)]
    try:
        found = [read_tokens(artifact.path) for artifact in store.artifacts_of(trial.id, "tokens")]
    except ResultsError:
        found = []
    tokens = found[0] if found else {}
    times = Counter((record.session, record.turn) for record in records)
    for record in records:
        key = (record.session, record.turn)
        if times[key] == 1 and key in tokens:  # a turn that ran several times has one entry in the file
            emitted = tokens[key].emitted_s
            record.emitted_s = array("d", emitted[emitted == emitted])
    return records
