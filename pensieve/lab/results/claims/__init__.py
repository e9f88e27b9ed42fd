"""Published and expected numbers compared with those of a sweep, with a verdict for each."""

from pensieve.lab.results.claims.claim import Bounds, Claim, read_claims
from pensieve.lab.results.claims.judge import (
    VERDICTS,
    Judged,
    Judgement,
    Verdict,
    judge_sweep,
    record_claims,
    recorded_claims,
)
from pensieve.lab.results.claims.measures import Measured

__all__ = [
    "VERDICTS",
    "Bounds",
    "Claim",
    "Judged",
    "Judgement",
    "Measured",
    "Verdict",
    "judge_sweep",
    "read_claims",
    "record_claims",
    "recorded_claims",
]
