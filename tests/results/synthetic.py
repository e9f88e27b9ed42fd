"""A sweep made by hand: baselines whose turns are written down."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import select

from pensieve.lab.results.claims import MEASURES, Claim, Sides
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.schema import ClaimRow
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import Estimate
from pensieve.serve.record import TurnRecord
from tests.analysis.sweeps import fill
from tests.results.trials import MEMORY, turn

Turns = Callable[[int], Sequence[TurnRecord]]


def sweep(
    turns: Mapping[str, Callable[..., Sequence[TurnRecord]]],
    seeds: int = 5,
    metrics: Mapping[str, Callable[..., dict[str, float]]] | None = None,
    axis: str | None = None,
    values: Sequence[Any] = (),
) -> ResultsStore:
    """Sweep 1: a trial for each seed, value of the axis and baseline. turns, metrics: by baseline, of the seed; with an
    axis, of (seed, value as text)."""
    store = ResultsStore(MEMORY)

    def of(made: Mapping[str, Callable[..., Any]], none: Any) -> Callable[[Mapping[str, str], int], Any]:
        return lambda at, seed: made.get(at["baseline"], lambda *_: none)(seed, *([at[axis]] if axis else []))

    axes = {**({axis: [str(value) for value in values]} if axis else {}), "baseline": list(turns)}
    fill(store, axes, of(turns, ()), of(metrics or {}, {}), seeds=range(seeds))
    return store


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
    [group] = evidence.panels(*([over] if over else []))
    sides = Sides(evidence, group.trials[ours], group.trials[theirs] if theirs else (), over)
    return MEASURES[reduction](sides, **arguments).found


def claim(**changed: Any) -> Claim:
    return Claim.model_validate(
        {
            "name": "speedup",
            "text": "It is faster",
            "source": "somebody",
            "measure": "speedup",
            "of": ["pensieve"],
            "against": ["stateless"],
            "claimed": {"low": 2.0},
            "unit": "x",
        }
        | changed
    )


def recorded_claims(store: ResultsStore, sweep_id: int) -> Sequence[Any]:
    """Rows of table claim."""
    query = select(ClaimRow.__table__).where(ClaimRow.sweep_id == sweep_id).order_by(ClaimRow.name)
    with store.database.reading() as connection:
        return connection.execute(query).all()
