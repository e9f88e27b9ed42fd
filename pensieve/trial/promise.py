"""A recorded trial held against another promise (slo.*): its turns are judged again, and nothing runs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from pensieve.errors import ResultsError
from pensieve.metrics import Slo, promise_metrics
from pensieve.record import TurnRecord
from pensieve.results.schema import Trial
from pensieve.results.store import TURN_COLUMNS, ResultsStore
from pensieve.results.tokens import read_tokens


def hold_against(store: ResultsStore, trial: Trial, slo: Slo) -> bool:
    """Whether the promise is another than the trial was judged by; then its goodput and attainment are replaced.

    The configuration of the trial says the new promise, so that what is drawn from it names the one it was judged by.
    """
    asked = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
    if (trial.config.get("slo") or {"ttft_ms": None, "tpot_ms": None}) == asked:
        return False
    start_s, end_s = trial.measure_start_s, trial.measure_end_s
    if start_s is None or end_s is None:
        return False  # a trial without a window, which a serving trial has
    store.replace_metrics(
        trial.id,
        ("goodput_req_s", "slo_attainment"),
        promise_metrics(_turns(store, trial), start_s, end_s, slo),
        config={**trial.config, "slo": asked},
    )
    return True


def _turns(store: ResultsStore, trial: Trial) -> Sequence[TurnRecord]:
    """With the moments of their tokens where these were kept; else a turn's last token is its end."""
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
        if times[key] == 1 and key in tokens:  # a turn of several iterations is kept under one name
            emitted = tokens[key].emitted_s
            record.emitted_s = array("d", emitted[emitted == emitted])
    return records
