"""Prefill by the engine's worker beside the matrix rate of the same run, and transformers' forward."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import transformers

from pensieve.bench.case import Case, Figure, Measured
from pensieve.bench.models import load, plain_module
from pensieve.bench.peers import prompts
from pensieve.bench.record import now
from pensieve.bench.session import Bench
from pensieve.bench.stepper import Stepper
from pensieve.bench.timer import explain, synchronize
from pensieve.specs import ModelSpec
from pensieve.worker.torch.model import LoadedModel

_GPU, _CPU = (2048,), (768,)


def run(bench: Bench) -> None:
    """Target prefill: one prompt, up to the token that follows it. Raises PensieveError."""
    model = load(bench)
    module = plain_module(model)
    lengths = _GPU if bench.on_gpu else _CPU
    if bench.full:
        lengths = (*lengths, *((512, 8192) if bench.on_gpu else (276,)))
    for tokens in lengths:
        _measure(bench, model, module, tokens)
    bench.note(
        "limit: the prompt's operations (a multiply and an add count two) at the rate of a large square product measured "
        "in this run. transformers: sdpa over the whole prompt, logits of the last position."
    )


def operations(spec: ModelSpec, tokens: int) -> int:
    """Floating-point operations of a prompt: every projection, causal attention, and the head for one position."""
    return tokens * spec.linear_flops_per_token + spec.attention_flops(tokens, tokens) + spec.head_flops


def _measure(bench: Bench, model: LoadedModel, module: Any, tokens: int) -> None:
    began, spec = now(), model.spec
    work = operations(spec, tokens)
    bench.measure_limits()
    stepper = Stepper(model, 1, tokens)
    ids = torch.tensor(prompts(1, tokens, spec.vocab), device=bench.device)

    def forward() -> float:
        started = perf_counter()
        with torch.inference_mode():
            output = module(input_ids=ids, use_cache=True, logits_to_keep=1)
            int(output.logits[0, -1].argmax())
        synchronize(bench.device)
        return (perf_counter() - started) * 1e3

    runs: dict[str, Callable[[], float]] = {"ours": lambda: stepper.prefill(tokens), "transformers": forward}
    values: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    for number in range(bench.rounds(9 if bench.on_gpu else 5) + 1):
        for name, measure in runs.items():
            if name in errors:
                continue
            try:
                took = measure()
            except Exception as error:  # recorded with its reason; the others go on
                errors[name] = explain(error)
                continue
            if number > 0:  # the first round chooses kernels
                values[name].append(took)
    settings = stepper.worker.settings()
    stepper.close()
    bench.measure_limits()
    case = Case(
        label=f"prefill {tokens}",
        floor=work / bench.matrix_flops_s * 1e3,
        floor_is="operations at the measured matrix rate",
        metric="prefill_ms",
        parameters={"tokens": tokens},
    )
    measured = []
    for name in runs:
        times = [] if name in errors else values[name]
        share = [Figure("matrix_rate_pct", 100 * work / bench.matrix_flops_s * 1e3 / min(times), "%")] if times else []
        engine = settings if name == "ours" else {"attention": "sdpa"}
        version = None if name == "ours" else transformers.__version__
        measured.append(Measured(name, times, version, engine, share, errors.get(name)))
    bench.record(case, measured, began)
