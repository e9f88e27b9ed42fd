"""What is told of made-up sweeps: findings, headline and notes, as they are frozen in messages.json. Each case beside another
one differs in what the rule looks at. `python -m tests.results.test_messages` freezes them anew: read the diff."""

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import SweepTable, sweep_table
from pensieve.serve.record import TurnRecord
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep, trial_fields, turn

GOLDEN = Path(__file__).with_name("messages.json")
Trial = dict[str, Any]
FLAT = [40.0, 40.0, 40.0]
RISING = [40.0, 80.0, 160.0]
CHANCE = [0.9, 1.2, 1.0, 1.1, 0.8, 1.05, 0.95]
OURS: Trial = {"baseline": "pensieve", "ttft": FLAT}
THEIRS: Trial = {"baseline": "stateless", "ttft": RISING}
EVEN: Trial = {"baseline": "gpu_only", "ttft": FLAT}
CUT = {"conversations": 40, "conversations_cut_by_context": 5, "turns_cut_by_context": 12}
CASES: dict[str, Callable[[], SweepTable]] = {}


def turns(ttft_ms: Sequence[float], factor: float = 1.0, queue_share: float = 0.1) -> list[TurnRecord]:
    made = conversation_turns([factor * ms for ms in ttft_ms])
    for one in made:
        assert one.ttft_ms is not None
        one.queue_ms = queue_share * one.ttft_ms
    return made


def told(*trials: dict[str, Any], seeds: int = 5, **axes: Any) -> SweepTable:
    """The table of a sweep of these baselines, each run with every seed; `ttft` rises with chance by seed, `turns` are taken
    as they are."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1,2,3,4", **axes)
    job = count()
    for seed in range(seeds):
        for number, given in enumerate(trials):
            fields = dict(given)
            chance = CHANCE[(seed + 2 * number) % len(CHANCE)]
            own = fields.pop("turns", None) or turns(fields.pop("ttft"), chance, fields.pop("queue", 0.1))
            statuses = fields.pop("statuses", {})
            fields["config"] = {**trial_fields()["config"], **fields.get("config", {}), "seed": seed}
            trial = add_trial(
                store, sweep, next(job), fields.pop("baseline"), own, fields.pop("metrics", None), seed=seed, **fields
            )
            store.add_metrics(trial, [MetricValue("turns", n, status) for status, n in statuses.items()])
    return sweep_table(store, sweep)


def case(name: str, *trials: Trial, seeds: int = 5, **axes: str) -> None:
    assert name not in CASES
    CASES[name] = lambda: told(*trials, seeds=seeds, **axes)


def both(name: str, **changed: Any) -> None:
    case(name, {**OURS, **changed}, {**THEIRS, **changed})


def metrics(one: Trial, **values: float) -> Trial:
    return {**one, "metrics": values}


# Findings and headline: who is beside whom, in how many settings, with what interval

case("ours lower", OURS, THEIRS)
case("ours higher", {**OURS, "ttft": RISING}, {**THEIRS, "ttft": FLAT})
case("not told apart, and lower", OURS, EVEN, THEIRS)
case("alone", OURS)


def settings(name: str, times: list[float], other: str = "stateless", seeds: int = 1) -> None:
    """A sweep of cache sizes, in each of which the other's TTFT is so many times ours, but for chance."""
    trials = []
    for size, factor in enumerate(times):
        config = {"seed": 0, "cache": {"name": "demo", "gpu": str(size)}}
        trials.append({**OURS, "config": config})
        trials.append({"baseline": other, "ttft": [factor * 40.0] * 3, "config": config})
    case(name, *trials, seeds=seeds, **{"cache.gpu": ",".join(map(str, range(len(times))))})


settings("settings, all lower", [1.8, 2.5, 4.0, 2.0, 3.0])
settings("settings, some not told apart", [1.0, 4.0, 0.2, 4.0, 4.0], "gpu_only", seeds=5)


def policies(name: str, seeds: int = 5, **missed: list[int]) -> None:
    """One turn of 100 tokens of history for each number, of which so many had to be recomputed."""
    trials = []
    for policy, own in missed.items():
        made = [
            turn(f"s{i}", 2, history_tokens=100, gpu_hit_tokens=100 - n, cpu_hit_tokens=0, recomputed_tokens=n)
            for i, n in enumerate(own)
        ]
        rate = {"miss_rate": sum(own) / 100 / len(own)}
        trials.append({"baseline": "pensieve", "eviction": policy, "turns": made, "metrics": rate})
    case(name, *trials, seeds=seeds, eviction=",".join(missed))


policies("policies in points", retention_value=[50, 48, 52], lru=[47, 46, 48], fifo=[51, 49, 53])
policies("policies not told apart", retention_value=[40, 60, 50, 45, 55], lru=[55, 45, 50, 60, 41], seeds=1)


def decoded(*ms_a_token: float) -> list[TurnRecord]:
    made = [turn(f"r{number}", 1, 1.0, tokens=(1, 2, 3)) for number in range(len(ms_a_token))]
    for one, ms in zip(made, ms_a_token, strict=True):
        one.latency_ms = 3 * ms
    return made


def decoders(name: str, **ms_a_token: tuple[float, ...]) -> None:
    case(name, *({"baseline": one, "turns": decoded(*ms)} for one, ms in ms_a_token.items()))


decoders(
    "without ours",
    semantic_blind=(300.0, 600.0, 300.0), native_pytorch=(10.0, 20.0, 10.0), fully_aware=(12.0, 24.0, 12.0),
)  # fmt: skip
decoders("the lowest by its ratios, not its mean", even=(10.0,) * 4, skewed=(1.0, 1.0, 1.0, 60.0))
for done, whose in ((5, "ray_keepalive"), (4, "ray_keepalive")):
    lost = {"statuses": {"completed": done, "failed": 10 - done}}
    own = [{"baseline": name, "ttft": FLAT} for name in ("pensieve", "ray_keepalive", "stateless")]
    case(f"{whose} completed {done} of 10", *({**one, **(lost if one["baseline"] == whose else {})} for one in own))

# Notes: what a rule tells, and beside it what it does not

for queue in (0.4, 0.6):
    case(f"waiting {queue}", OURS, {**THEIRS, "queue": queue})
for evicted in ({"evicted_chunks": 521.0, "dropped_chunks": 9.0}, {"evicted_chunks": 0.0, "dropped_chunks": 0.0}, {}):
    case(f"evicted {evicted.get('evicted_chunks')}", metrics(OURS, **evicted), THEIRS, seeds=2)
case("contaminated", OURS, {**THEIRS, "flags": {"contaminated": "It held 64 tokens."}})
for load, window, rate in (
    ("open", {}, 5.4), ("open", {}, 8.8), ("closed", {}, 5.4), ("open", {"window": "too small"}, 5.4),
):  # fmt: skip
    common = {"flags": {"load": load, **window}}
    trials = [{**metrics(one, throughput_req_s=own), **common} for one, own in ((OURS, 9.0), (THEIRS, rate))]
    case(f"rate {rate} of 9, {load} {window}", *trials)
for seeds, repeats in ((1, 1), (2, 2), (7, 1)):
    repeated = [{**one, "repeat": repeat} for one in (OURS, THEIRS) for repeat in range(repeats)]
    case(f"{seeds} seeds, {repeats} repeats", *repeated, seeds=seeds)
SHORT_OF = {"statuses": {"completed": 90.0, "timeout": 8.0, "failed": 2.0, "refused": 0.0}}
case("turns without a reply", {**OURS, "statuses": {"completed": 100.0}}, {**THEIRS, **SHORT_OF}, seeds=2)
case("contended", OURS, {**THEIRS, "contended": True})
case("other code", OURS, {**THEIRS, "code_hash": "other"})
case("other weights", OURS, {**THEIRS, "weights": "hub"})
MACHINES = [{"hardware": name, "simulated": name != "cpu"} for name in ("cpu", "sim_h100")]
case("hardware swept", *({**one, **at} for at in MACHINES for one in (OURS, THEIRS)), hardware="cpu,sim_h100")
for load, window, ours, theirs in (
    ("open", {}, (15.6, 80.0), (13.4, 100.0)),
    ("closed", {}, (13.4, 80.0), (13.4, 100.0)),
    ("closed", {}, (10.0, 120.0), (13.4, 100.0)),
):
    slower = [
        {**metrics(one, tpot_ms_mean=ms, throughput_output_tok_s=rate), "flags": {"load": load, **window}}
        for one, (ms, rate) in ((OURS, ours), (THEIRS, theirs))
    ]
    case(f"slower at, {load} {window} {ours} {theirs}", *slower, seeds=4 if load == "closed" else 5)
SERVED = {
    "attention_backend": "triton", "attention_version": "3.9.0", "forward": "fused", "attention_note": "Not varlen: old.",
    "forward_note": "", "fell_back": False, "self_check_difference": 0.001,
}  # fmt: skip
FELL_BACK = {**SERVED, "attention_backend": "reference", "attention_version": "", "fell_back": True}
case("served in two ways", {**OURS, "engine": SERVED}, {**THEIRS, "engine": FELL_BACK})
both("context cuts", engine={"workload": CUT})
both("bytes", engine={"workload": {**CUT, "tokens": "bytes", "load": "closed", "sessions": 3}})
LONGER = {"conversations": 40, "conversations_too_long_for_the_context": 2}
case(
    "context cuts in two settings",
    *({**OURS, "model": model, "engine": {"workload": plan}}
      for model, plan in (("opt_13b", CUT), ("llama3_8b", LONGER), ("tiny", {"conversations": 40}))),
    model="opt_13b,llama3_8b,tiny",
)  # fmt: skip
both("bound", metrics={"bound_hit_rate": 0.9})


def by_hand(given: list[tuple[str, int, float]], metric: str, **flags: str) -> SweepTable:
    """Trials of (baseline, seed, the metric's value)."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1,2")
    for job, (baseline, seed, value) in enumerate(given):
        trial = add_trial(store, sweep, job, baseline, turns(FLAT), {metric: value}, seed=seed)
        store.set_trial(trial, flags=flags)
    return sweep_table(store, sweep)


RATE_BY_SEED = [("pensieve", 0, 9.0), ("pensieve", 1, 14.0), ("stateless", 0, 9.0), ("stateless", 2, 4.0)]
CASES["rates of other seeds"] = lambda: by_hand(RATE_BY_SEED, "throughput_req_s", load="open")
TPOT_BY_SEED = [("pensieve", 0, 40.0), ("stateless", 0, 10.0), ("pensieve", 1, 9.0), ("stateless", 1, 10.0)]
CASES["one seed contradicts"] = lambda: by_hand(TPOT_BY_SEED, "tpot_ms_mean")


def unfinished(steps: int) -> SweepTable:
    """A sweep of six trials: nothing yet, three done and one running, that one failed, interrupted."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, n_expected=6, seed="0,1,2")
    if steps:
        for job, (baseline, seed) in enumerate([("pensieve", 0), ("stateless", 0), ("pensieve", 1)]):
            add_trial(store, sweep, job, baseline, turns(FLAT), seed=seed)
        failed = store.begin_trial(trial_fields("failed", baseline="stateless", seed=1))
        store.link(sweep, failed, 3, reused=False)
    if steps > 1:
        store.finish_trial(failed, "failed", "The disk is full; free some space.")
    if steps > 2:
        store.set_sweep(sweep, status="interrupted")
    return sweep_table(store, sweep)


for steps in range(4):
    CASES[f"unfinished {steps}"] = lambda steps=steps: unfinished(steps)  # type: ignore[misc]


def messages(table: SweepTable) -> dict[str, Any]:
    findings = [
        [one.quantity, dict(one.at), one.name, one.other, round(one.found.value, 9), one.verdict, one.text]
        for one in table.findings
    ]
    notes = [[note.code, note.text] for note in table.notes]
    answers, beside = table.answers, {row.baseline: row.beside_ours and row.beside_ours.value for row in table.rows}
    return {
        "answers": answers,
        "findings": findings,
        "notes": notes,
        "beside": {k: v and round(v, 9) for k, v in beside.items()},
    }


@pytest.mark.parametrize("name", CASES)
def test_what_is_told_of_a_sweep(name: str) -> None:
    assert json.loads(json.dumps(messages(CASES[name]()))) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(messages(made()), ensure_ascii=False)}" for name, made in CASES.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
