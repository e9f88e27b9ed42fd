"""Made-up sweeps over a changing prefix, and what a figure drew, by the name of each mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.sweep import Source
from pensieve.lab.results.store import ResultsStore
from pensieve.serve.record import TurnRecord
from tests.analysis.sweeps import fill
from tests.results.trials import turn

Costs = Mapping[str, float]
FAST: Costs = {"warmup": 60.0, "hit": 10.0, "miss": 30.0, "rewarm_hit": 10.0, "rewarm_miss": 60.0, "throughput": 100.0}
SLOW: Costs = {"warmup": 70.0, "hit": 80.0, "miss": 40.0, "rewarm_hit": 70.0, "rewarm_miss": 70.0, "throughput": 200.0}
CACHED = {"hit": 768, "miss": 0, "rewarm_hit": 767, "rewarm_miss": 0, "throughput": 768}
ROUNDS = 3


def prefix_turns(costs: Costs, cached: Mapping[str, int] = CACHED, overhead_ms: float = 2.0) -> list[TurnRecord]:
    """A discarded conversation, then ROUNDS of a hit and a miss, streaming and not, of A = 512 and B = 256 tokens.

    Round r takes 1 + r / 10 times what `costs` says; streaming adds overhead_ms to the first token of a query.
    """
    found = [_step("discarded-0", number, "warmup", 9000.0, -1, 768, 0, 768) for number in (1, 2, 3, 4)]
    for number in range(ROUNDS):
        for kind in ("hit", "miss"):
            for stream in (True, False):
                session, slower = f"{number}-{kind}{'' if stream else '-whole'}", 1 + number / 10
                known, prompt = (768, 788) if kind == "hit" else (256, 276)
                rest: dict[str, Any] = {"stream": stream}
                query = costs[kind] * slower + (overhead_ms if stream else 0.0)
                found += [
                    _step(session, 1, "warmup", costs["warmup"] * slower, number, 768, 0, 768, **rest),
                    _step(session, 2, kind, query, number, prompt, min(cached[kind], known), prompt - known, **rest),
                    _step(
                        session, 3, "rewarm", costs[f"rewarm_{kind}"] * slower, number, 768, cached[f"rewarm_{kind}"], 1,
                        **rest,
                    ),
                    _step(
                        session, 4, "throughput", costs["throughput"] * slower, number, 788, cached["throughput"], 20,
                        tokens=50, **rest,
                    ),
                ]  # fmt: skip
    return found


def prefix_sweep(
    store: ResultsStore,
    costs: Mapping[str, Costs],
    *,
    blocks: Sequence[str] = ("512/256", "256/512"),
    cached: Mapping[str, Mapping[str, int]] | None = None,
    extra: Mapping[str, Sequence[str]] | None = None,
    seeds: Sequence[int] = (0, 1),
    command: str = "run.py -m",
) -> Source:
    """costs, cached: by baseline. With the second of `blocks` everything takes twice as long. extra: further axes."""
    axes = {"workload.blocks": list(blocks), **(extra or {}), "baseline": list(costs)}

    def turns(at: Mapping[str, str], seed: int) -> list[TurnRecord]:
        slower = 1.0 + blocks.index(at["workload.blocks"]) + 0.01 * seed
        own = {step: ms * slower for step, ms in costs[at["baseline"]].items()}
        return prefix_turns(own, (cached or {}).get(at["baseline"], CACHED))

    return fill(store, axes, turns, seeds=seeds, command=command, workload="prefix_invalidation")


def _step(
    session: str, number: int, phase: str, ms: float, round_: int, prompt: int, cached: int, new: int,
    tokens: int = 1, **rest: Any,
) -> TurnRecord:  # fmt: skip
    record = turn(session, number, ms, tokens=(1,) * tokens, phase=phase, iteration=round_, **rest)
    record.latency_ms = ms
    record.label = phase if phase in ("hit", "miss") else ""
    record.prompt_tokens, record.history_tokens, record.new_tokens = prompt, prompt - new, new
    record.gpu_hit_tokens, record.cpu_hit_tokens, record.shared_hit_tokens = cached, 0, 0
    record.recomputed_tokens = prompt - new - cached
    return record
