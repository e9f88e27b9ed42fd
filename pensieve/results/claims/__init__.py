"""Published and expected numbers compared with those of a sweep, with a verdict for each."""

from pensieve.results.claims.claim import Claim, read_claims
from pensieve.results.claims.judge import Judged, judge_sweep, record_claims, recorded_claims
from pensieve.results.claims.verdict import VERDICTS, Judgement, Measured, Verdict

__all__ = [
    "VERDICTS",
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
