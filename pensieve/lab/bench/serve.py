"""End to end: conversations and agents through whole trials, our baselines beside transformers' continuous batching."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from hydra import compose

from pensieve.device import shelf
from pensieve.errors import PensieveError, RequestFailed
from pensieve.lab.bench.case import Case, Measured, explain
from pensieve.lab.bench.session import Bench
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.results.frame import measured_turns
from pensieve.sim.roofline import Roofline

OURS, WORST, PEER = "pensieve", "stateless", "transformers_cb"
BASELINES = (OURS, "gpu_only", WORST, "prefix_cache", PEER)
GPU_BATCH_TOKENS = 2048  # the peer gets the same sizes
_TIMEOUT_S = 180.0  # of one trial


@dataclass(frozen=True, slots=True)
class Load:
    """More of a workload than the device can do. fields: of the workload, `users` or `agents` among them; gpu, cpu: the KV
    that it may keep, too small for it."""

    workload: str
    fields: Mapping[str, object]
    gpu: str
    cpu: str

    @property
    def label(self) -> str:
        at_once = next(f"{self.fields[name]} {name}" for name in ("users", "agents") if name in self.fields)
        return f"{self.workload}, {at_once}, KV {self.gpu} + {self.cpu}"


def loads(gpu: bool) -> list[Load]:
    """On a CPU of a small model, in short conversations."""
    tier = ("2GB", "4GB") if gpu else ("1024 tokens", "2048 tokens")
    users, agents = (128, 32) if gpu else (5, 4)
    chat: dict[str, object] = {
        "users": users,
        "conversations": users,
        "min_turns": 2,
        "max_turns": 3,
        "warmup_turns": 1,
    }
    chat |= {"think_time_s": 0.25, "max_new_tokens": 64} if gpu else {"think_time_s": 0.5, "max_new_tokens": 12}
    steps: dict[str, object] = {"agents": agents, "steps": 2, "act_s": 0.5}
    steps |= {"reason_tokens": 512} if gpu else {"reason_tokens": 96, "reason_output": 8, "reflect_output": 8}
    return [Load("sharegpt", chat, *tier), Load("agents", steps, *tier)]


def run(bench: Bench) -> None:
    """Target serve. Raises PensieveError where no baseline can run."""
    like_gpu = bench.on_gpu or bench.machine.simulated
    bench.model = bench.options.model or ("llama3_8b" if like_gpu else "tiny")
    for load in loads(like_gpu):
        _measure(bench, load)


def _measure(bench: Bench, load: Load) -> None:
    found: dict[str, Measured] = {}
    for name in BASELINES:
        try:
            found[name] = _trial(bench, load, name)
        except Exception as error:  # recorded with its reason; the others go on
            found[name] = Measured(name, error=str(error) if isinstance(error, PensieveError) else explain(error))
    worst, _ = found[WORST].value, found[OURS].value  # raise where one gave nothing
    ratio = _roofline_ratio(bench, load, found[OURS].engine["trial"])
    measured = []
    for name, one in found.items():
        own = {"roofline_ratio": ratio} if name == OURS else {}
        beside = {"times_stateless": one.value / worst} if one.values else {}
        measured.append(replace(one, figures={**beside, **one.figures, **own}))
    floor_is, sizes = (
        f"stateless times the roofline ratio {ratio:.2f}",
        {**load.fields, "gpu": load.gpu, "cpu": load.cpu},
    )
    bench.record(Case(load.label, ratio * worst, floor_is, "throughput_output_tok_s", sizes, OURS, PEER), measured)


def _compose(bench: Bench, load: Load, baseline: str) -> Any:
    hardware = [f"hardware={bench.hardware.name}"]
    if not bench.machine.simulated:
        hardware += [f"hardware.device={bench.hardware.device}"]
        hardware += [f"hardware.threads={bench.threads}"] if bench.threads else []
    if bench.on_gpu or bench.machine.simulated:
        hardware += [f"scheduler.max_batch_tokens={GPU_BATCH_TOKENS}", "scheduler.max_batch_requests=128"]
    overrides = [
        *(f"model={bench.model}", "model.weights=random", "cache=demo", f"baseline={baseline}", *hardware),
        *(f"workload={load.workload}", *(f"workload.{name}={value}" for name, value in load.fields.items())),
        *(f"cache.gpu='{load.gpu}'", f"cache.cpu='{load.cpu}'", "force=true", "trial.isolate=false"),
        *(f"trial.timeout_s={_TIMEOUT_S:g}", "experiment_name=bench"),
    ]
    return compose("config", overrides)


def _trial(bench: Bench, load: Load, name: str) -> Measured:
    """One trial like any other, recorded as such and as part of this command."""
    if name == PEER:
        shelf.empty()  # it loads a module of its own, for which a device may have no room beside ours
    outcome = bench.run_trial(_compose(bench, load, name), f"{load.label} {name}")
    if not outcome.completed:
        raise RequestFailed(outcome.error or "the trial did not complete")
    values = {(m.name, m.label): m.value for m in bench.tracking.store.metrics_of(outcome.trial_id)}
    throughput = values["throughput_output_tok_s", ""]
    if throughput is None:
        raise RequestFailed("no turn completed in the window of the throughput")
    turns = {
        int(label.removeprefix("turn=")): value
        for (metric, label), value in values.items()
        if metric == "ttft_ms_p50" and label.startswith("turn=") and value is not None
    }
    figures = {f"ttft_ms_p50_turn_{turn}": turns[turn] for turn in sorted(turns)[:: max(1, len(turns) - 1)]}
    return Measured(name, (throughput,), figures=figures, engine={"trial": outcome.trial_id})


def _roofline_ratio(bench: Bench, load: Load, trial_id: int) -> float:
    """For the very turns that were measured, at the rates measured in this run (simulated: those of the machine)."""
    plan = plan_trial(check(_compose(bench, load, OURS)))
    hardware = plan.hardware
    if not bench.machine.simulated:
        bench.measure_limits()
        flops, memory_bw = bench.matrix_flops_s, bench.copy_bytes_s
        hardware = replace(hardware, flops=flops, memory_bw=memory_bw, compute_efficiency=1.0, memory_efficiency=1.0)
    columns = ("history_tokens", "new_tokens", "output_tokens")
    rows = [[getattr(row, one) for one in columns] for row in measured_turns(bench.tracking.store, trial_id, *columns)]
    turns = [(history, new, output) for history, new, output in rows if history is not None]
    context = fmean(map(sum, turns))
    at_once = int(str(load.fields.get("users") or load.fields["agents"]))
    room = int(plan.gpu_blocks * plan.chunk_tokens / context)
    batch = max(1, min(at_once, plan.config.scheduler.max_batch_requests, room))
    roofline = Roofline(plan.model, hardware, plan.chunk_tokens)
    return turn_s(roofline, turns, batch, keeps=False) / turn_s(roofline, turns, batch, keeps=True)


def turn_s(roofline: Roofline, turns: Sequence[tuple[int, int, int]], batch: int, keeps: bool) -> float:
    """Mean seconds of device time that a turn takes by the roofline when `batch` conversations decode together.

    turns: tokens already in the conversation, new in the prompt, generated. keeps: all history is found in GPU memory;
    otherwise all of it is computed again. A prompt is computed by itself; a decode step is shared evenly by the batch.
    """
    total = 0.0
    for history, new, output in turns:
        context = history + new
        total += roofline.iteration_s([(history if keeps else 0, context)], 1)
        middle = context + output // 2
        total += output * roofline.iteration_s([(middle, middle + 1)] * batch, batch) / batch
    return total / len(turns)
