"""A sweep made by hand: baselines whose turns are written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import select

from pensieve.lab.results.claims import MEASURES, Claim, Sides
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.schema import ClaimRow
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import Estimate
from pensieve.serve.record import TurnRecord
from tests.results.trials import MEMORY, add_trial, open_sweep, turn

Turns = Callable[[int], Sequence[TurnRecord]]


def sweep(
    turns: Mapping[str, Turns],
    seeds: int = 5,
    metrics: Mapping[str, Callable[[int], dict[str, float]]] | None = None,
    axis: str | None = None,
    values: Sequence[Any] = (None,),
    **changed: Any,
) -> ResultsStore:
    """Sweep 1: a trial for each seed, value of the axis and baseline. turns, metrics: by baseline, of the seed; with an
    axis, of (seed, value). changed: columns of every trial."""
    store = ResultsStore(MEMORY)
    overrides = {"baseline": ",".join(turns)} | ({axis: ",".join(map(str, values))} if axis else {})
    sweep_id = open_sweep(store, **overrides)
    assert sweep_id == 1
    job = 0
    config = changed.pop("config", {"workload": {"name": changed.get("workload", "chat")}})
    for seed in range(seeds):
        for value in values:
            for name, turns_of in turns.items():
                asked = (seed,) if axis is None else (seed, value)
                own = (metrics or {}).get(name, lambda *_: {})(*asked)
                at = config if axis is None else {**config, **_nested(axis, value, config)}
                add_trial(store, 1, job, name, turns_of(*asked), own, seed=seed, config=at, **changed)
                job += 1
    return store


def _nested(axis: str, value: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    group, _, field = axis.partition(".")
    return {group: {**config.get(group, {}), field: value}}


def talk(*ttft_ms: float, sessions: int = 4, **changed: Any) -> Turns:
    """`sessions` conversations, the turns of conversation i taking (1 + i / 10) times as long."""

    def turns(seed: int) -> list[TurnRecord]:
        return numbered(
            turn(f"s{s}", i + 1, ms * (1 + s / 10), **changed) for s in range(sessions) for i, ms in enumerate(ttft_ms)
        )

    return turns


def numbered(turns: Any) -> list[TurnRecord]:
    found = list(turns)
    for ordinal, record in enumerate(found):
        record.ordinal = ordinal
    return found


def measure(
    store: ResultsStore,
    reduction: str,
    /,
    ours: str = "pensieve",
    theirs: str | None = None,
    over: str | None = None,
    **arguments: Any,
) -> Estimate:
    evidence = Frame(store, 1)
    [group] = evidence.groups(over)
    sides = Sides(evidence, group.trials[ours], group.trials[theirs] if theirs else (), over)
    return MEASURES[reduction](sides, **arguments).found


def claim(**changed: Any) -> Claim:
    return Claim.model_validate(
        {
            "name": "speedup",
            "text": "It is faster",
            "source": "somebody",
            "measure": "speedup",
            "of": "pensieve",
            "against": ["stateless"],
            "claimed": {"above": 2.0},
            "unit": "x",
        }
        | changed
    )


def recorded_claims(store: ResultsStore, sweep_id: int) -> Sequence[Any]:
    """Rows of table claim."""
    query = select(ClaimRow.__table__).where(ClaimRow.sweep_id == sweep_id).order_by(ClaimRow.name)
    with store.database.reading() as connection:
        return connection.execute(query).all()
