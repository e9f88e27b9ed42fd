"""End to end: conversations and agents through whole trials, our baselines beside transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import transformers

from pensieve.errors import PensieveError, RequestFailed
from pensieve.lab.bench.case import Case, Measured, explain
from pensieve.lab.bench.session import Bench
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.results.frame import measured_turns
from pensieve.lab.trial.command import compose_job
from pensieve.plugins.device import shelf
from pensieve.sim.roofline import Roofline

BASELINES = ("pensieve", "gpu_only", "stateless", "prefix_cache")
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


def cells(gpu: bool) -> list[Cell]:
    """On a CPU a small model and short conversations. On a GPU loads beyond what the device can do, in KV that is too
    small for them, and as short as 24 trials within some minutes need it."""
    if not gpu:
        think, act, tier = 0.5, 0.5, ("1024 tokens", "2048 tokens")
        users, agents = [2, 5], [2, 4]
        chat: dict[str, object] = {"max_turns": 3, "max_new_tokens": 12}
        steps: dict[str, object] = {"steps": 2, "reason_tokens": 96, "reason_output": 8, "reflect_output": 8}
    else:
        think, act, tier = 0.25, 0.5, ("2GB", "4GB")
        users, agents = [32, 128], [16, 32]
        chat = {"max_turns": 3, "max_new_tokens": 64}
        steps = {"steps": 2, "reason_tokens": 512}
    chat |= {"think_time_s": think, "min_turns": 2, "warmup_turns": 1}
    steps |= {"act_s": act}
    return [Cell("sharegpt", chat, "users", users, *tier, think), Cell("agents", steps, "agents", agents, *tier, act)]


def run(bench: Bench) -> None:
    """Target serve. Raises PensieveError where no baseline can run."""
    like_gpu = bench.on_gpu or bench.machine.simulated
    bench.model = bench.options.model or ("llama3_8b" if like_gpu else "tiny")
    for cell in cells(like_gpu):
        _measure(bench, cell)
    bench.note(
        "value: output tokens/s at one p90 of normalized latency for all, between the loads tried. That p90 is a quarter "
        "above the lowest that every system keeps to. limit: the throughput of stateless times the roofline ratio (every "
        "history found, no wait for a copy). It compares capacities: where the common latency keeps stateless far below its "
        "own, ours may pass it. TTFT: p50 of the first and the last turn at the highest load."
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
    for name in (OURS, WORST):
        if name not in curves:
            raise RequestFailed(f"baseline={name} gave nothing in {cell.label}: {errors.get(name, 'no point')}")
    latency = common_latency(curves)
    reached = {name: at_latency(some, latency) for name, some in curves.items()}
    worst, ratio = reached[WORST].throughput, _roofline_ratio(bench, cell, curves[OURS][-1])
    measured = [Measured(name, error=why) for name, why in errors.items()]
    for name, curve in curves.items():
        first, last = (end(curve[-1].ttft_ms, default=0) for end in (min, max))
        figures = {f"ttft_ms_p50_turn_{turn}": curve[-1].ttft_ms[turn] for turn in {first, last} - {0}}
        engine = {
            "curve": [asdict(point) for point in curve],
            "p90_ms_per_token": latency,
            "bound": reached[name].bound,
            "think_s": cell.think_s,
        }
        one = Measured(name, (reached[name].throughput,), engine=engine)
        own = {"roofline_ratio": ratio} if name == OURS else {}
        one = replace(one, figures={"times_stateless": one.value / worst, **figures, **own})
        measured.append(replace(one, version=transformers.__version__) if name == PEER else one)
    case = Case(
        label=cell.label,
        floor=ratio * worst,
        floor_is=f"stateless times the roofline ratio {ratio:.2f}",
        metric="throughput_output_tok_s_at_equal_p90",
        parameters={**cell.fields, "loads": list(cell.loads), "gpu": cell.gpu, "cpu": cell.cpu},
        ours=OURS,
        peer=PEER,
    )
    bench.record(case, sorted(measured, key=lambda one: list(points).index(one.backend)))
    bounded = ", ".join(f"{one.bound} {name}" for name, one in reached.items() if one.bound)
    bench.note(
        f"{cell.label}: KV on {cell.gpu} of GPU and {cell.cpu} of CPU memory (gpu_only, stateless, prefix_cache "
        f"and {PEER}: GPU alone). {cell.load_field} {', '.join(map(str, cell.loads))}. Equal p90 {latency:.3g} ms/token; at "
        f"all loads below it (>=) or above it (<=): {bounded or 'none'}."
    )


def _compose(bench: Bench, cell: Cell, load: int, baseline: str) -> Any:
    hardware = [f"hardware={bench.hardware.name}"]
    if not bench.machine.simulated:
        hardware += [f"hardware.device={bench.hardware.device}"]
        hardware += [f"hardware.threads={bench.threads}"] if bench.threads else []
    if bench.on_gpu or bench.machine.simulated:
        hardware += [f"scheduler.max_batch_tokens={GPU_BATCH_TOKENS}"]
        hardware += ["scheduler.max_batch_requests=128"]
    overrides = [
        *(f"model={bench.model}", "model.weights=random", "cache=demo", f"baseline={baseline}", *hardware),
        *cell.overrides(load),
        *("force=true", "trial.isolate=false", f"trial.timeout_s={_TIMEOUT_S:g}", f"seed={bench.options.seed}"),
        f"trial.exclusive={str(bench.options.exclusive).lower()}",
        "experiment_name=bench",
    ]
    return compose_job("config", overrides)


def _trial(bench: Bench, cell: Cell, load: int, name: str) -> Point:
    """One trial like any other, recorded as such and as part of this command."""
    if name == PEER:
        shelf.empty()  # it loads a module of its own, for which a device may have no room beside ours
    cfg = _compose(bench, cell, load, name)
    outcome = bench.run_trial(cfg, f"{cell.workload} {cell.load_field}={load} {name}")
    if not outcome.completed:
        raise RequestFailed(outcome.error or "the trial did not complete")
    values = {(m.name, m.label): m.value for m in bench.tracking.store.metrics_of(outcome.trial_id)}
    throughput, latency = values["throughput_output_tok_s", ""], values["normalized_latency_ms_p90", ""]
    if throughput is None or latency is None:
        raise RequestFailed("no turn completed in the window of the throughput")
    turns = {
        int(label[5:]): value
        for (metric, label), value in values.items()
        if metric == "ttft_ms_p50" and label.startswith("turn=") and value is not None
    }
    return Point(load, throughput, latency, outcome.trial_id, turns)


def _roofline_ratio(bench: Bench, cell: Cell, point: Point) -> float:
    """For the very turns that were measured, at the rates measured in this run (simulated: those of the machine)."""
    plan = plan_trial(check(_compose(bench, cell, point.load, OURS)))
    hardware = plan.hardware
    if not bench.machine.simulated:
        bench.measure_limits()
        flops, memory_bw = bench.matrix_flops_s, bench.copy_bytes_s
        hardware = replace(hardware, flops=flops, memory_bw=memory_bw, compute_efficiency=1.0, memory_efficiency=1.0)
    rows = measured_turns(bench.tracking.store, point.trial_id, "history_tokens", "new_tokens", "output_tokens")
    turns = [
        Turn(row.history_tokens, row.new_tokens, row.output_tokens) for row in rows if row.history_tokens is not None
    ]
    context = fmean(turn.history + turn.new + turn.output for turn in turns)
    room = int(plan.gpu_blocks * plan.chunk_tokens / context)
    batch = max(1, min(point.load, plan.config.scheduler.max_batch_requests, room))
    return all_hit_ratio(Roofline(plan.model, hardware, plan.chunk_tokens), turns, batch)


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
    last = max((place for place, point in enumerate(ordered) if point.latency <= latency), default=None)
    if last is None:
        return Reached(min(point.throughput for point in ordered), "<=")
    low, high = ordered[last], ordered[min(last + 1, len(ordered) - 1)]
    if high is low:
        return Reached(low.throughput, "" if low.latency == latency else ">=")
    share = (latency - low.latency) / (high.latency - low.latency)
    return Reached(low.throughput + share * (high.throughput - low.throughput), "")


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
