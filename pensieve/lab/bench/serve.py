"""End to end: conversations and agents through whole trials, our baselines beside transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import transformers

from pensieve.core.request import is_measured
from pensieve.errors import ConfigError, PensieveError, RequestFailed
from pensieve.lab.bench import Options
from pensieve.lab.bench.case import Case, Figure, Measured
from pensieve.lab.bench.session import Bench
from pensieve.lab.bench.timer import explain
from pensieve.lab.compose import TrialPlan, build_tokenizer, build_workload, check, plan_trial
from pensieve.lab.compose.machine import Device
from pensieve.lab.metrics import MetricValue
from pensieve.lab.trial.jobs import compose_job
from pensieve.plugins.device import shelf
from pensieve.sim.roofline import Roofline

BASELINES = ("pensieve", "gpu_only", "stateless", "prefix_cache", "llama_slots")
OURS, WORST, PEER = "pensieve", "stateless", "transformers_cb"
GPU_BATCH_TOKENS = 2048  # the peer gets the same sizes
MARGIN = 1.25  # over the lowest latency that every system keeps to
_TIMEOUT_S = 180.0  # of one trial


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload, the KV it may keep, and the loads it is tried at. think_s: between a reply and what follows it."""

    workload: str
    fields: Mapping[str, object]
    load_field: str
    loads: Sequence[int]
    gpu: str
    cpu: str
    think_s: float

    @property
    def label(self) -> str:
        return f"{self.workload}, {self.think_s:g} s apart, KV {self.gpu} + {self.cpu}"

    def overrides(self, load: int) -> list[str]:
        each = {"conversations": load} if self.workload == "sharegpt" else {}
        fields = {**self.fields, self.load_field: load, **each}
        sizes = [f"cache.gpu='{self.gpu}'", f"cache.cpu='{self.cpu}'"]
        return [f"workload={self.workload}", *(f"workload.{name}={value}" for name, value in fields.items()), *sizes]


def cells(gpu: bool, full: bool) -> list[Cell]:
    """On a CPU a small model and short conversations. On a GPU loads beyond what the device can do, in KV that is too
    small for them, and as short as 24 trials within some minutes need it; full: whole replies, 5 s of thinking, 40 GB as
    well."""
    if not gpu:
        chat: dict[str, object] = {"think_time_s": 0.5, "min_turns": 2, "max_turns": 3, "max_new_tokens": 12}
        agents: dict[str, object] = {
            "act_s": 0.5,
            "steps": 2,
            "reason_tokens": 96,
            "reason_output": 8,
            "reflect_output": 8,
        }
        tiers = [("1024 tokens", "2048 tokens")]
        loads: tuple[tuple[int, ...], tuple[int, ...]] = ((2, 5), (2, 4))
    elif not full:
        chat = {"think_time_s": 0.25, "min_turns": 2, "max_turns": 3, "max_new_tokens": 64}
        agents = {"act_s": 0.5, "steps": 2, "reason_tokens": 512}
        tiers, loads = [("2GB", "4GB")], ((32, 128), (16, 32))
    else:
        chat = {"think_time_s": 5.0, "min_turns": 2, "max_turns": 8, "max_new_tokens": 512}
        agents = {"act_s": 5.0, "steps": 6, "reason_tokens": 512}
        tiers, loads = [("8GB", "40GB"), ("40GB", "40GB")], ((64, 192, 384), (32, 96, 192))
    found = []
    for on_gpu, on_cpu in tiers:
        think, act = float(str(chat["think_time_s"])), float(str(agents["act_s"]))
        found.append(Cell("sharegpt", {**chat, "warmup_turns": 1}, "users", loads[0], on_gpu, on_cpu, think))
        found.append(Cell("agents", agents, "agents", loads[1], on_gpu, on_cpu, act))
    return found


def chosen_cells(machine: Device, options: Options) -> list[Cell]:
    """Raises ConfigError where bench.only names none."""
    like_gpu = machine.kind == "cuda" or machine.simulated
    wanted = [cell for cell in cells(like_gpu, options.size == "full") if (options.only or "") in cell.label]
    if not wanted:
        raise ConfigError(f"bench.only={options.only} names no cell of serve; try sharegpt or agents.")
    return wanted


def run(bench: Bench) -> None:
    """Target serve. Raises PensieveError where no baseline can run."""
    like_gpu = bench.on_gpu or bench.machine.simulated
    bench.model = bench.options.model or ("llama3_8b" if like_gpu else "tiny")
    wanted = chosen_cells(bench.machine, bench.options)
    for cell in wanted:
        _measure(bench, cell)
    bench.note(
        "value: output tokens/s at one p90 of normalized latency for all, between the loads tried. That p90 is a quarter "
        "above the lowest that every system keeps to; >=: it stayed below at all loads. limit: the throughput of stateless "
        "times the roofline ratio (every history found, no wait for a copy). It compares capacities: where the common "
        "latency keeps stateless far below its own, ours may pass it. TTFT: p50 at the highest load."
    )


def _measure(bench: Bench, cell: Cell) -> None:
    points: dict[str, list[Point]] = {name: [] for name in (*BASELINES, PEER)}
    errors: dict[str, str] = {}
    for load in cell.loads:
        for name in points:  # of one load after another: a disturbance meets all systems alike
            if name not in errors:
                try:
                    points[name].append(_trial(bench, cell, load, name))
                except Exception as error:  # recorded with its reason; the others go on
                    errors[name] = str(error) if isinstance(error, PensieveError) else explain(error)
    curves = {name: some for name, some in points.items() if some and name not in errors}
    if OURS not in curves or WORST not in curves:
        missing = OURS if OURS not in curves else WORST
        raise RequestFailed(f"baseline={missing} gave nothing in {cell.label}: {errors.get(missing, 'no point')}")
    latency = common_latency(curves)
    reached = {name: at_latency(some, latency) for name, some in curves.items()}
    ratio = _roofline_ratio(bench, cell, curves[OURS][-1])
    case = Case(
        label=cell.label,
        floor=ratio * reached[WORST].throughput,
        floor_is=f"stateless times the roofline ratio {ratio:.2f}",
        metric="throughput_output_tok_s_at_equal_p90",
        parameters={**cell.fields, "loads": list(cell.loads), "gpu": cell.gpu, "cpu": cell.cpu},
        ours=OURS,
        needs=(PEER,),
    )
    measured = []
    for name in points:
        if name not in curves:
            measured.append(Measured(name, error=errors[name]))
            continue
        times = reached[name].throughput / reached[WORST].throughput
        figures = [Figure("times_stateless", times, remark=reached[name].bound), *_ttft(curves[name][-1])]
        if name == OURS:
            figures.append(Figure("roofline_ratio", ratio))
        engine = {
            "curve": [_row(point) for point in curves[name]],
            "p90_ms_per_token": latency,
            "bound": reached[name].bound,
            "think_s": cell.think_s,
        }
        version = transformers.__version__ if name == PEER else None
        measured.append(Measured(name, (reached[name].throughput,), version, engine, figures))
    bench.record(case, measured)
    bench.note(
        f"{cell.label}: KV on {cell.gpu} of GPU and {cell.cpu} of CPU memory (gpu_only, stateless, prefix_cache, llama_slots "
        f"and {PEER}: GPU alone). Think time {cell.think_s:g} s, {cell.load_field} {', '.join(map(str, cell.loads))}. Equal "
        f"p90 {latency:.3g} ms/token, roofline ratio {ratio:.2f}."
    )


def _compose(bench: Bench, cell: Cell, load: int, baseline: str) -> Any:
    hardware = [f"hardware={bench.hardware.name}"]
    if not bench.machine.simulated:
        hardware += [f"hardware.device={bench.hardware.device}"]
        hardware += [f"hardware.threads={bench.threads}"] if bench.threads else []
    overrides = [
        *(f"model={bench.model}", "model.weights=random", "cache=demo", f"baseline={baseline}", *hardware),
        *(_gpu_batch(bench) if bench.on_gpu or bench.machine.simulated else ()),
        *cell.overrides(load),
        *("force=true", "trial.isolate=false", f"trial.timeout_s={_TIMEOUT_S:g}", f"seed={bench.options.seed}"),
        f"trial.exclusive={str(bench.options.exclusive).lower()}",
        "experiment_name=bench",
    ]
    return compose_job("config", overrides)


def _gpu_batch(bench: Bench) -> tuple[str, ...]:
    requests = 256 if bench.full else 128
    return f"scheduler.max_batch_tokens={GPU_BATCH_TOKENS}", f"scheduler.max_batch_requests={requests}"


def _trial(bench: Bench, cell: Cell, load: int, name: str) -> Point:
    """One trial like any other, recorded as such and as part of this command."""
    if name == PEER:
        shelf.empty()  # it loads a module of its own, for which a device may have no room beside ours
    cfg = _compose(bench, cell, load, name)
    if name == "llama_slots":  # as many slots as conversations, where each still has room for the longest
        plan = plan_trial(check(cfg))
        longest = _longest(plan)
        cfg.baseline.cache.n_slots = max(1, min(load, plan.gpu_blocks * plan.chunk_tokens // (longest + 64)))
    outcome = bench.run_trial(cfg, f"{cell.workload} {cell.load_field}={load} {name}")
    if not outcome.completed:
        raise RequestFailed(outcome.error or "the trial did not complete")
    return _point(load, bench.tracking.store.metrics_of(outcome.trial_id), outcome.trial_id)


def _longest(plan: TrialPlan) -> int:
    """Tokens of the longest conversation of the workload, as it says itself."""
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)
    facts = build_workload(plan, tokenizer)[1].facts
    return int(facts.get("longest_conversation_tokens") or facts.get("longest_context_tokens") or 0)


def _point(load: int, metrics: Sequence[MetricValue], trial_id: int) -> Point:
    values = {(m.name, m.label): m.value for m in metrics}
    throughput = values["throughput_output_tok_s", ""]
    latency = values["normalized_latency_ms_p90", ""]
    if throughput is None or latency is None:
        raise RequestFailed("no turn completed in the window of the throughput")
    turns = {
        int(label[5:]): value
        for (name, label), value in values.items()
        if name == "ttft_ms_p50" and label.startswith("turn=") and value is not None
    }
    return Point(load, throughput, latency, trial_id, turns)


def _roofline_ratio(bench: Bench, cell: Cell, point: Point) -> float:
    """For the very turns that were measured, at the rates measured in this run (simulated: those of the machine)."""
    plan = plan_trial(check(_compose(bench, cell, point.load, OURS)))
    hardware = plan.hardware
    if not bench.machine.simulated:
        bench.measure_limits()
        hardware = replace(
            hardware,
            flops=bench.matrix_flops_s,
            memory_bw=bench.copy_bytes_s,
            compute_efficiency=1.0,
            memory_efficiency=1.0,
        )
    rows = bench.tracking.store.turns_of(
        point.trial_id, "phase", "history_tokens", "new_tokens", "output_tokens", "status"
    )
    turns = [
        Turn(row.history_tokens, row.new_tokens, row.output_tokens)
        for row in rows
        if is_measured(row.phase) and row.status == "completed" and row.history_tokens is not None
    ]
    context = fmean(turn.history + turn.new + turn.output for turn in turns)
    room = int(plan.gpu_blocks * plan.chunk_tokens / context)
    batch = max(1, min(point.load, plan.config.scheduler.max_batch_requests, room))
    return all_hit_ratio(Roofline(plan.model, hardware, plan.chunk_tokens), turns, batch)


def _ttft(point: Point) -> list[Figure]:
    ends = {min(point.ttft_ms, default=0), max(point.ttft_ms, default=0)}
    return [
        Figure(f"ttft_ms_p50_turn_{turn}", value, shown=turn in ends) for turn, value in sorted(point.ttft_ms.items())
    ]


def _row(point: Point) -> dict[str, Any]:
    return {
        "load": point.load,
        "throughput_output_tok_s": point.throughput,
        "normalized_latency_ms_p90": point.latency,
        "trial_id": point.trial_id,
        "ttft_ms_p50_by_turn": {str(turn): value for turn, value in point.ttft_ms.items()},
    }


# -- throughput at equal latency, and the ratio that a roofline allows between systems --------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One trial at one load. latency: P90 of latency over output tokens, ms. ttft_ms: p50 by turn."""

    load: int
    throughput: float
    latency: float
    trial_id: int = 0
    ttft_ms: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reached:
    """throughput at the common latency. bound: "" where it was interpolated; ">=" where the system stayed faster than that
    at all loads tried; "<=" where it was slower at all of them."""

    throughput: float
    bound: str


def common_latency(curves: Mapping[str, Sequence[Point]]) -> float:
    """The lowest latency that every system keeps to at one load at least, and a quarter more.

    A system that is not loaded is hardly slower at twice the load: without the margin noise would decide where its curve
    crosses.
    """
    assert curves
    return MARGIN * max(min(point.latency for point in points) for points in curves.values())


def at_latency(points: Sequence[Point], latency: float) -> Reached:
    """Throughput where the curve crosses `latency`, linear between the two loads around it."""
    ordered = sorted(points, key=lambda point: point.load)
    below = [point for point in ordered if point.latency <= latency]
    if not below:
        return Reached(min(point.throughput for point in ordered), "<=")
    last = below[-1]
    beyond = [point for point in ordered if point.load > last.load]
    if not beyond:
        return Reached(last.throughput, "" if last.latency == latency else ">=")
    after = beyond[0]
    share = (latency - last.latency) / (after.latency - last.latency)
    return Reached(last.throughput + share * (after.throughput - last.throughput), "")


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one turn: already in the conversation, new in the prompt, generated."""

    history: int
    new: int
    output: int


def turn_s(roofline: Roofline, turns: Sequence[Turn], batch: int, keeps: bool) -> float:
    """Mean seconds of device time that a turn takes by the roofline when `batch` conversations decode together.

    keeps: all history is found in GPU memory; otherwise all of it is computed again. A prompt is computed by itself; a
    decode step is shared evenly by the batch.
    """
    assert turns and batch >= 1
    total = 0.0
    for turn in turns:
        start = turn.history if keeps else 0
        context = turn.history + turn.new
        total += roofline.iteration_s([(start, context)], 1)
        middle = context + turn.output // 2
        total += turn.output * roofline.iteration_s([(middle, middle + 1)] * batch, batch) / batch
    return total / len(turns)


def all_hit_ratio(roofline: Roofline, turns: Sequence[Turn], batch: int) -> float:
    """Turns a second with every history found, over turns a second with every history computed again."""
    return turn_s(roofline, turns, batch, keeps=False) / turn_s(roofline, turns, batch, keeps=True)
