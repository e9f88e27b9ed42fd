"""Made-up trials, for tests of what is recorded and shown."""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select

from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.schema import holding_table
from pensieve.lab.results.store import Holding, ResultsStore
from pensieve.lab.results.tokens import TokenFile
from pensieve.serve.record import TurnRecord

MEMORY = "sqlite://"


def holdings_of(store: ResultsStore, trial_id: int) -> list[Holding]:
    c = holding_table.c
    query = select(*(c[name] for name in Holding._fields)).where(c.trial_id == trial_id).order_by(c.session, c.tier)
    with store.database.reading() as connection:
        return [Holding(*row) for row in connection.execute(query)]


def write_tokens(path: Path, turns: Iterable[TurnRecord]) -> Path | None:
    """All at once."""
    with TokenFile(path) as file:
        file.add(list(turns))
        return file.close()


def trial_fields(fingerprint: str = "f", **changed: Any) -> dict[str, Any]:
    config = {
        "seed": 0,
        "workload": {"name": "chat", "pressure": 2.0},
        "cache": {"name": "demo", "gpu": "4096 tokens"},
        "hydra": {"job": {"name": "run"}},
    }
    fields = {
        "fingerprint": fingerprint, "config_hash": "c", "code_hash": "d", "platform": "sim", "experiment": "pensieve",
        "model": "tiny", "baseline": "pensieve", "eviction": "retention_value", "scheduler": "unified", "cache": "demo",
        "workload": "chat", "hardware": "cpu", "seed": 0, "weights": "random", "dtype": "float32", "simulated": False,
        "gpu_tokens": 4096, "cpu_tokens": 2048, "working_set_tokens": 8200, "config": config,
    }  # fmt: skip
    return {**fields, **changed}


def turn(
    session: str, number: int, ttft_ms: float | None = 10.0, tokens: Sequence[int] = (1, 2), **changed: Any
) -> TurnRecord:
    record = TurnRecord(session=session, turn=number, ttft_ms=ttft_ms, **changed)
    record.token_ids = array("i", tokens)
    record.margins = array("d", [0.5] * len(tokens))
    record.emitted_s = array("d", [float(i) for i in range(len(tokens))])
    record.output_tokens = len(tokens)
    return record


def conversation_turns(ttft_ms: Sequence[float], sessions: int = 3, warmup: int = 1) -> list[TurnRecord]:
    """`sessions` conversations of len(ttft_ms) turns (from 1), after warm-up turns of another conversation."""
    warm = [turn("warmup-0", i + 1, 900.0, phase="warmup") for i in range(warmup)]
    measured = [
        turn(f"s{s}", i + 1, ms * (1 + 0.1 * s), tokens=(s, i, 7))
        for i, ms in enumerate(ttft_ms)
        for s in range(sessions)
    ]
    turns = warm + measured
    for ordinal, record in enumerate(turns):
        record.ordinal = ordinal
    return turns


def add_trial(
    store: ResultsStore,
    sweep_id: int,
    job: int,
    baseline: str,
    turns: Sequence[TurnRecord],
    metrics: dict[str, float] | None = None,
    tokens: Path | None = None,
    **changed: Any,
) -> int:
    """A completed trial, linked to its job; its tokens go to the folder `tokens`."""
    fingerprint = "/".join([baseline, *map(str, changed.values())]).replace("'", "")[:200]
    trial_id = store.begin_trial(trial_fields(fingerprint, baseline=baseline, **changed))
    store.link(sweep_id, trial_id, job, reused=False)
    store.add_turns(trial_id, turns)
    values = {
        "throughput_output_tok_s": 100.0,
        "gpu_hit_rate": 0.5,
        "cpu_hit_rate": 0.25,
        "miss_rate": 0.25,
        **(metrics or {}),
    }
    store.add_metrics(trial_id, [MetricValue(name, value) for name, value in values.items()])
    if tokens is not None:
        path = write_tokens(tokens / f"{trial_id}.parquet", turns)
        assert path is not None
        store.add_artifact(trial_id, "tokens", path)
    store.finish_trial(trial_id, "completed")
    return trial_id


def open_sweep(store: ResultsStore, n_expected: int = 0, **overrides: str) -> int:
    return store.open_sweep("key", "chat", "pensieve", "run.py -m", overrides, n_expected, "host", None)
