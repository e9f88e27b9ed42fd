"""How far the forward on a CPU is from its matrix products alone: `python runners/bench.py target=cpu_path`.

Each case is timed in interleaved rounds beside its floor (the products that transformers' modules would do for it, with
their weights, and nothing else) and its peer (plain transformers: sdpa and a DynamicCache). Rounds alternate, because
another process on the machine disturbs all of them alike; a ratio is taken within a round, and its spread is over rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from pensieve.core.plan import Row, Sample
from pensieve.device.attention import IMPLEMENTATION, Iteration
from pensieve.device.batch import BlockTables, build_batch
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import LoadedModel, load_model
from pensieve.errors import HardwareMissing, PensieveError
from pensieve.lab.bench.case import Case, Figure, Measured
from pensieve.lab.bench.models import CHUNK, ON_CPU, spec_of
from pensieve.lab.bench.record import now
from pensieve.lab.bench.session import Bench


@dataclass(frozen=True, slots=True)
class Step:
    """`requests` requests, each of `new` tokens over `past` ones. goal: for the ratio to the floor, with llama_25m on one
    thread."""

    name: str
    requests: int
    past: int
    new: int
    scattered: bool = False
    goal: float | None = None


STEPS = (
    Step("prefill 768", 1, 0, 768, goal=1.6),
    Step("append 60 over 700", 1, 700, 60),
    Step("decode 1 at 500", 1, 500, 1, goal=2.0),
    Step("decode 8 at 512", 8, 512, 1, goal=1.35),
    Step("decode 8 at 512, blocks scattered", 8, 512, 1, scattered=True),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds a round, the same rounds for all."""

    floor: list[float]
    ours: list[float]
    fallback: list[float]
    peer: list[float]

    def ratio(self, times: Sequence[float]) -> tuple[float, float, float]:
        """Ratio to the floor: of the best rounds, and the quartiles of the ratios within a round."""
        each = sorted(time / floor for time, floor in zip(times, self.floor, strict=True))
        return min(times) / min(self.floor), each[len(each) // 4], each[(3 * len(each)) // 4]


def measure(model: LoadedModel, fallback: LoadedModel, step: Step, rounds: int) -> Timing:
    """Time one step. model: on its fused forward; fallback: the same weights on transformers' modules."""
    vocab = model.spec.vocab
    runs: dict[str, Callable[[], object]] = {
        "floor": _products(fallback.module, step),
        "ours": _paged(model, step),
        "fallback": _paged(fallback, step),
        "peer": _transformers(fallback.module, step, vocab),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for name, run in runs.items():
                if name == "peer":
                    fallback.module.set_attn_implementation("sdpa")
                started = perf_counter()
                run()
                elapsed = (perf_counter() - started) * 1e3
                if name == "peer":
                    fallback.module.set_attn_implementation(IMPLEMENTATION)
                if number > 0:  # the first round chooses kernels and touches memory
                    times[name].append(elapsed)
    return Timing(**times)


def _products(module: Any, step: Step) -> Callable[[], object]:
    """Every projection once, on rows that are ready; the head for the sampled rows only."""
    rows = step.requests * step.new
    head = module.get_output_embeddings()
    weights = [(m.weight, m.in_features) for m in module.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    given = {size: torch.randn(rows, size) for _, size in weights}
    last = torch.randn(step.requests, head.in_features)

    def run() -> None:
        for weight, size in weights:
            F.linear(given[size], weight)
        F.linear(last, head.weight)

    return run


def _paged(model: LoadedModel, step: Step) -> Callable[[], object]:
    """Batch, attention over blocks, logits: all that a worker does in a step but sampling."""
    chunks = -(-(step.past + step.new) // CHUNK)
    pool = KvTensors(model.spec, CHUNK, step.requests * chunks, 0, model.device, model.dtype)
    pool.gpu.normal_()
    blocks = list(range(step.requests * chunks))
    if step.scattered:
        random.Random(0).shuffle(blocks)
    tables = BlockTables()
    stop = step.past + step.new
    rows = []
    for slot in range(step.requests):
        tables.overwrite(slot, 0, blocks[slot * chunks : (slot + 1) * chunks])
        rows.append(Row(slot, ((step.past, stop),), tuple(i % model.spec.vocab for i in range(step.new)), Sample(stop)))

    def run() -> object:
        batch = build_batch(rows, tables, {}, CHUNK, model.device)
        iteration = Iteration(batch, pool.gpu_tokens(), CHUNK, backend=model.attention)
        return model.forward(iteration, batch.logits_at)

    return run


def _transformers(module: Any, step: Step, vocab: int) -> Callable[[], object]:
    """Make a call that computes one step over a cache which holds the past, and then cuts off what the step added."""
    from transformers import DynamicCache

    ids = torch.arange(step.requests * step.new).remainder(vocab).view(step.requests, step.new)
    cache = DynamicCache(config=module.config)
    if step.past:
        module.set_attn_implementation("sdpa")
        with torch.inference_mode():
            past = torch.arange(step.past).remainder(vocab).expand(step.requests, -1)
            module(input_ids=past, past_key_values=cache, use_cache=True, logits_to_keep=1)
        module.set_attn_implementation(IMPLEMENTATION)

    def run() -> object:
        output = module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-step.new)
        return output

    return run


def load_both(name: str, threads: int) -> tuple[LoadedModel, LoadedModel]:
    """The model as it is served, and on transformers' modules with torch's attention, with equal random weights. Raises
    PensieveError.
    """
    spec = spec_of(name)

    def load(fused: bool, attention: str) -> LoadedModel:
        return load_model(spec, "random", None, None, 0, "cpu", threads, fused, attention)

    return load(True, "auto"), load(False, "reference")


def run(bench: Bench) -> None:
    """Target cpu_path: the cases recorded, on one thread unless hardware.threads says otherwise. Raises PensieveError."""
    if bench.on_gpu:
        raise HardwareMissing("target=cpu_path measures a CPU; use hardware=cpu, or target=decode on a GPU.")
    name, rounds = bench.options.model or ON_CPU, bench.rounds(5)
    bench.threads = bench.hardware.threads or 1
    model, fallback = load_both(name, bench.threads)
    if model.forward.name == fallback.forward.name:
        raise PensieveError(f"There is no fused forward to measure ({model.forward_note}).")
    bench.model = name
    for step in STEPS:
        began = now()
        timing = measure(model, fallback, step, rounds * (1 if step.new > 1 else 4))
        goal = step.goal if name == ON_CPU and bench.threads == 1 else None
        bench.record(_case(step, timing), _backends(timing, model, fallback, goal), began)
    bench.note(
        "limit: the best time of the matrix products alone (F.linear with transformers' weights), float32; packed products "
        "are faster than these, so a ratio may be below 1. q1, q3: quartiles of the ratios within a round."
    )
    goals = ", ".join(f"{step.name} {step.goal:g}" for step in STEPS if step.goal is not None)
    if name == ON_CPU and bench.threads == 1:
        bench.note(f"Goals for ours (ratio of best): {goals}.")


def _case(step: Step, timing: Timing) -> Case:
    return Case(
        label=step.name,
        floor=min(timing.floor),
        floor_is="matrix products alone, measured in the same rounds",
        parameters={"requests": step.requests, "past": step.past, "new": step.new, "scattered": step.scattered},
    )


def _backends(timing: Timing, model: LoadedModel, fallback: LoadedModel, goal: float | None) -> list[Measured]:
    """Ratios to the floor: of the best rounds, as the goals are meant, and the quartiles of those within a round."""

    def measured(backend: str, times: list[float], forward: str, aim: float | None = None) -> Measured:
        best, low, high = timing.ratio(times)
        ratios = [Figure("ratio_of_best", best, limit=aim), Figure("q1", low), Figure("q3", high)]
        version = transformers.__version__ if backend == "transformers" else None
        return Measured(backend, times, version, {"forward": forward}, ratios)

    import transformers

    return [
        measured("ours", timing.ours, f"{model.forward.name}, {model.attention.name} attention", goal),
        measured("plain_modules", timing.fallback, f"{fallback.forward.name}, {fallback.attention.name} attention"),
        measured("transformers", timing.peer, "sdpa, DynamicCache"),
    ]
