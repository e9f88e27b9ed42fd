"""What the figures of a changing prefix share: the steps of each conversation, and what they came to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.drawing.source import Cell, Panel, Source
from pensieve.errors import MissingSeries
from pensieve.statistics import Estimate, PairedRatio, bootstrap_percentile_by_seed, paired_ratio

WORKLOAD = "prefix_invalidation"
COMMAND = "python runners/run.py experiment=prefix_invalidation -m"
STEPS = ("warmup", "hit", "miss", "rewarm_hit", "rewarm_miss", "throughput_hit", "throughput_miss")
_COLUMNS = (
    "session", "iteration", "phase", "stream", "status", "ttft_ms", "latency_ms", "output_tokens", "prompt_tokens",
    "gpu_hit_tokens", "cpu_hit_tokens", "shared_hit_tokens", "recomputed_tokens", "new_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One completed turn of a measured conversation.

    name: one of STEPS; what follows a query bears its kind, since a miss leaves another cache behind than a hit does.
    key: (seed, "session/repeat"). round: "number/repeat", the same for the hits and misses that are compared.
    cached: prompt tokens found on any tier; recomputed: known tokens that were not; new: never seen before. None: the
    engine does not say.
    """

    name: str
    key: tuple[int, str]
    round: str
    stream: bool
    ttft_ms: float
    latency_ms: float
    output_tokens: int
    cached: int | None
    recomputed: int | None
    new: int | None

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.latency_ms * 1e3


def applies(source: Source) -> bool:
    """Whether the sweep has trials of this workload."""
    return any(job.last.workload == WORKLOAD for job in source.jobs)


def steps_of(source: Source, cell: Cell) -> list[Step]:
    """The completed turns of a cell's conversations, but for those that the workload runs first and discards.

    Raises MissingSeries where the cell has no hit or no miss, as trials of another workload have none.
    """
    found = []
    for trial in cell.trials:
        rows = [row for row in source.store.turns_of(trial.id, *_COLUMNS) if row.iteration >= 0]
        kinds = {row.session: row.phase for row in rows if row.phase in ("hit", "miss")}
        for row in rows:
            if row.status != "completed" or row.ttft_ms is None or row.latency_ms is None:
                continue
            after = f"_{kinds[row.session]}" if row.phase in ("rewarm", "throughput") and row.session in kinds else ""
            found.append(
                Step(
                    name=f"{row.phase}{after}",
                    key=(trial.seed, f"{row.session}/{trial.repeat}"),
                    round=f"{row.iteration}/{trial.repeat}",
                    stream=bool(row.stream),
                    ttft_ms=row.ttft_ms,
                    latency_ms=row.latency_ms,
                    output_tokens=row.output_tokens,
                    cached=_cached(row.gpu_hit_tokens, row.cpu_hit_tokens, row.shared_hit_tokens),
                    recomputed=row.recomputed_tokens,
                    new=_unseen(row.new_tokens, row.shared_hit_tokens),
                )
            )
    for name in ("hit", "miss"):
        if not any(step.name == name for step in found):
            raise MissingSeries(
                f"Sweep {source.sweep.id} has no completed {name} of baseline {cell.baseline}: it is not a sweep over "
                f"changing prefixes, or all of them failed; run `{COMMAND}`."
            )
    return found


def named(steps: Iterable[Step], *names: str) -> list[Step]:
    """Those whose name is, or begins with, one of `names`: "rewarm" means both rewarm_hit and rewarm_miss."""
    return [step for step in steps if step.name in names or step.name.split("_")[0] in names]


def median(steps: Iterable[Step], value_of: Callable[[Step], float]) -> Estimate:
    """Of one value a conversation, resampling seeds first, then conversations."""
    values: dict[tuple[int, str], float] = {}
    for step in steps:
        assert (*step.key,) not in values, "a conversation goes through each step once"
        values[step.key] = value_of(step)
    return bootstrap_percentile_by_seed(values, 0.5)


def ttft(steps: Iterable[Step]) -> Estimate:
    return median(steps, lambda step: step.ttft_ms)


def degradation_pct(steps: Sequence[Step]) -> PairedRatio:
    """(miss - hit) / hit in %, of the mean times to first token, paired by round."""
    found = paired_ratio(_by_round(named(steps, "miss")), _by_round(named(steps, "hit")), of="means")
    low, high = (None if end is None else (end - 1) * 100 for end in (found.ci_low, found.ci_high))
    return PairedRatio((found.ratio - 1) * 100, low, high, found.n, found.n_seeds)


def stream_overhead_ms(steps: Sequence[Step]) -> Estimate | None:
    """Median over rounds of the time to first token when streaming minus when not, the same kind of query compared with
    itself; None where the workload asked in one way only."""
    differences: dict[tuple[int, str], float] = {}
    for kind in ("hit", "miss"):
        streamed, whole = (_by_round(s for s in named(steps, kind) if s.stream is stream) for stream in (True, False))
        for seed, number in streamed.keys() & whole.keys():
            differences[seed, f"{number}/{kind}"] = streamed[seed, number] - whole[seed, number]
    return bootstrap_percentile_by_seed(differences, 0.5) if differences else None


@dataclass(frozen=True, slots=True)
class Summary:
    """One baseline on one split of the prefix. quantities: by name with its unit, in order of QUANTITIES; None: the
    workload asked nothing that would tell."""

    baseline: str
    cell: Cell
    quantities: Mapping[str, Estimate | None]


QUANTITIES = {
    "hit_ttft_ms": "hit\n(ms)",
    "miss_ttft_ms": "miss\n(ms)",
    "degradation_pct": "degra-\ndation (%)",
    "stream_overhead_ms": "overhead\n(ms)",
    "throughput_tok_s": "decoding\n(tokens/s)",
    "warmup_ms": "warm-up\n(ms)",
}


def summaries(source: Source) -> list[tuple[Panel, list[Summary]]]:
    """What each baseline came to, a panel for each split of the prefix."""
    return [(panel, [_summary(source, cell) for cell in panel.cells]) for panel in source.panels()]


def _summary(source: Source, cell: Cell) -> Summary:
    steps = steps_of(source, cell)
    change = degradation_pct(steps)
    decoded, warmed = named(steps, "throughput"), named(steps, "warmup")
    found = {
        "hit_ttft_ms": ttft(named(steps, "hit")),
        "miss_ttft_ms": ttft(named(steps, "miss")),
        "degradation_pct": Estimate(change.ratio, change.ci_low, change.ci_high, change.n, change.n_seeds),
        "stream_overhead_ms": stream_overhead_ms(steps),
        "throughput_tok_s": median(decoded, lambda step: step.output_tok_s) if decoded else None,
        "warmup_ms": median(warmed, lambda step: step.latency_ms) if warmed else None,
    }
    return Summary(cell.baseline, cell, {name: found[name] for name in QUANTITIES})


def mean_tokens(steps: Sequence[Step]) -> Mapping[str, float] | None:
    """Mean cached, recomputed and new tokens a prompt; None where the engine does not say."""
    if not steps or any(part is None for step in steps for part in (step.cached, step.recomputed, step.new)):
        return None
    return {
        name: sum(getattr(step, name) for step in steps) / len(steps) for name in ("cached", "recomputed", "new")
    }  # fmt: skip


def _by_round(steps: Iterable[Step]) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        found.setdefault((step.key[0], step.round), []).append(step.ttft_ms)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _cached(gpu: int | None, cpu: int | None, shared: int | None) -> int | None:
    """An engine that reports cached tokens only has no CPU tier of ours: null there means none."""
    return None if gpu is None else gpu + (cpu or 0) + (shared or 0)


def _unseen(new: int | None, shared: int | None) -> int | None:
    return None if new is None else new - (shared or 0)
