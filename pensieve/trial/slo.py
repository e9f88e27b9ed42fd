"""Judge the turns of a recorded trial by another service-level objective (slo.*); nothing runs again."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from pensieve.errors import ResultsError
from pensieve.metrics import Slo, slo_metrics
from pensieve.record import TurnRecord
from pensieve.results.schema import Trial
from pensieve.results.store import TURN_COLUMNS, ResultsStore
from pensieve.results.tokens import read_tokens


def judge_again(store: ResultsStore, trial: Trial, slo: Slo) -> bool:
    """Replace goodput and attainment, where the trial was judged by another objective; returns whether it was.

    The recorded configuration gets the new objective, so that a figure names the one that its numbers belong to.
    """
    asked = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
    if (trial.config.get("slo") or {"ttft_ms": None, "tpot_ms": None}) == asked:
        return False
    start_s, end_s = trial.measure_start_s, trial.measure_end_s
    if start_s is None or end_s is None:
        return False  # without a window there is no goodput; every serving trial has one
    store.replace_metrics(
        trial.id,
        ("goodput_req_s", "slo_attainment"),
        slo_metrics(_turns(store, trial), start_s, end_s, slo),
        config={**trial.config, "slo": asked},
    )
    return True


def _turns(store: ResultsStore, trial: Trial) -> Sequence[TurnRecord]:
    """The recorded turns, with the times of their tokens where the token file is still there."""
    records = [
        TurnRecord(**dict(zip(TURN_COLUMNS, row, strict=True))) for row in store.turns_of(trial.id, *TURN_COLUMNS)
    ]
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
