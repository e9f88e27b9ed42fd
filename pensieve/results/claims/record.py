"""The table `claim`: a sweep's verdicts, replaced whole each time they are judged again."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from pensieve.results.claims.judge import Judged
from pensieve.results.schema import ClaimRow
from pensieve.results.store import ResultsStore


def record_claims(store: ResultsStore, sweep_id: int, judged: Sequence[Judged]) -> None:
    """One row a verdict, in place of those that the sweep had. trial_ids: of the measurement, else empty."""
    rows = [
        {
            "sweep_id": sweep_id,
            "name": one.name,
            "claimed": one.claim.claimed.bounds().claimed,
            "measured": one.measured.value if one.measured else None,
            "ci_low": one.measured.ci_low if one.measured else None,
            "ci_high": one.measured.ci_high if one.measured else None,
            "n": one.measured.n if one.measured else None,
            "verdict": one.judgement.verdict,
            "trial_ids": list(one.measured.trial_ids) if one.measured else [],
        }
        for one in judged
    ]
    with store.database.writing() as connection:
        connection.execute(delete(ClaimRow).where(ClaimRow.sweep_id == sweep_id))
        if rows:
            connection.execute(insert(ClaimRow), rows)


def recorded_claims(store: ResultsStore, sweep_id: int) -> Sequence[ClaimRow]:
    """By name."""
    query = select(ClaimRow).where(ClaimRow.sweep_id == sweep_id).order_by(ClaimRow.name)
    with store.database.reading() as connection, Session(connection, expire_on_commit=False) as session:
        rows = session.scalars(query).all()
        session.expunge_all()
    return rows
