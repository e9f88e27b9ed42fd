"""Decode steps of the engine's worker beside the memory floor and transformers' own ways to decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import transformers

from pensieve.bench.case import Case, Figure, Measured
from pensieve.bench.idle import idle_pct
from pensieve.bench.models import load, plain_module
from pensieve.bench.peers import Generate, batched_gaps_ms, continuous_batching, prompts
from pensieve.bench.record import now
from pensieve.bench.session import Bench
from pensieve.bench.stepper import Stepper
from pensieve.bench.timer import explain
from pensieve.specs import ModelSpec
from pensieve.worker.torch.model import LoadedModel

_GPU = ((1, 1024), (32, 1024), (64, 1024), (128, 1024))
_CPU = ((1, 500), (8, 512))
_STEPS = {"cuda": 32, "cpu": 8}
_PEER_STEPS = {
    "cuda": 12,
    "cpu": 8,
}  # of generate, which takes some 30 ms a step on any GPU: Python launches its kernels
# Tokens of a batch on a GPU, up to which continuous batching is tried in the small size: without FlashAttention it attends
# through a mask over all of its pages, which takes half a minute for the prompts of 128 x 1024 tokens.
_MOST_BATCHED = 32 * 1024
_IDLE_FROM = 64  # requests: below, launching decides


def run(bench: Bench) -> None:
    """Target decode: batches of conversations, one token each a step. Raises PensieveError."""
    model = load(bench)
    module = plain_module(model)
    cases = _GPU if bench.on_gpu else _CPU
    if bench.full:
        cases = (*cases, *(((64, 4096), (8, 8192)) if bench.on_gpu else ((8, 1024),)))
    for batch, context in cases:
        _measure(bench, model, module, batch, context)
    bench.note(
        "limit: weights and KV of a step at the copy bandwidth measured in this run, or its operations at the matrix rate "
        "where that is longer. transformers_generate: the time between tokens; transformers_cb: continuous batching sized "
        "by hand, the gaps between tokens while all requests decode, run before the other rounds, on a CPU also after them."
    )


def floor_ms(spec: ModelSpec, batch: int, context: int, copy_bytes_s: float, matrix_flops_s: float) -> float:
    """Of one step: every weight and all KV read once, or all operations done, whichever takes longer."""
    read = spec.dtype_bytes * (spec.layers * spec.layer_parameters + spec.vocab * spec.hidden)
    read += batch * (context + 1) * spec.kv_bytes_per_token
    flops = batch * (spec.linear_flops_per_token + spec.head_flops + spec.attention_flops(1, context + 1))
    return max(read / copy_bytes_s, flops / matrix_flops_s) * 1e3


def _measure(bench: Bench, model: LoadedModel, module: Any, batch: int, context: int) -> None:
    began, spec, steps = now(), model.spec, _STEPS[bench.device.type]
    bench.measure_limits()
    rounds = bench.rounds(5)
    values: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    if bench.on_gpu and not bench.full and batch * context > _MOST_BATCHED:
        errors["transformers_cb"] = "left out of the small size, for its time; bench.size=full runs it"
    _try("transformers_cb", values, errors, lambda: _batched(module, spec, batch, context, steps))
    stepper = Stepper(model, batch, context)
    try:
        stepper.fill()
        runs: dict[str, Callable[[], float]] = {"ours": lambda: stepper.decode(batch, steps)}
        for name, static in (("transformers_generate", False), ("transformers_static", True)):
            if not static or bench.full:
                peer_steps = _PEER_STEPS[bench.device.type]
                _prepare(name, module, batch, context, spec.vocab, static, peer_steps, runs, errors)
        for number in range(rounds + 1):
            for name, measure in runs.items():
                if number == 0:
                    _try(name, {}, errors, partial(_one, measure))  # chooses kernels, captures graphs
                elif name not in errors:
                    _try(name, values, errors, partial(_one, measure))
        figures = []
        if bench.on_gpu and batch >= _IDLE_FROM and "ours" in values:
            figures.append(Figure("gpu_idle_pct", idle_pct(lambda: stepper.decode(batch, steps)), "%"))
        engine = stepper.worker.settings()
    finally:
        stepper.close()
    if bench.full or not bench.on_gpu:  # on a GPU it captures its graphs anew each time
        _try("transformers_cb", values, errors, lambda: _batched(module, spec, batch, context, steps))
    bench.measure_limits()
    case = Case(
        label=f"decode {batch} at {context}",
        floor=floor_ms(spec, batch, context, bench.copy_bytes_s, bench.matrix_flops_s),
        floor_is="weights and KV at copy bandwidth",
        metric="step_ms",
        parameters={"batch": batch, "context": context},
    )
    version = transformers.__version__
    bench.record(
        case,
        [
            Measured(
                backend=name,
                values=values.get(name, ()) if name not in errors else (),
                version=None if name == "ours" else version,
                engine=engine if name == "ours" else {"attention": "sdpa"},
                figures=figures if name == "ours" else (),
                error=errors.get(name),
            )
            for name in (*runs, "transformers_cb")
        ],
        began,
    )


def _prepare(
    name: str,
    module: Any,
    batch: int,
    context: int,
    vocab: int,
    static: bool,
    steps: int,
    runs: dict[str, Callable[[], float]],
    errors: dict[str, str],
) -> None:
    """Fill the peer's cache; a peer that cannot is recorded with its reason."""
    try:
        peer = Generate(module, batch, context, vocab, static)
        runs[name] = lambda: peer.step_ms(steps)
    except Exception as error:
        errors[name] = explain(error)
        runs[name] = lambda: 0.0


def _one(measure: Callable[[], float]) -> list[float]:
    return [measure()]


def _try(
    name: str, values: dict[str, list[float]], errors: dict[str, str], measure: Callable[[], Sequence[float]]
) -> None:
    if name in errors:
        return
    try:
        values.setdefault(name, []).extend(measure())
    except Exception as error:  # a peer may fail in any way it likes; it is recorded, and the others go on
        errors[name] = explain(error)


def _batched(module: Any, spec: ModelSpec, batch: int, context: int, steps: int) -> list[float]:
    batch_tokens = max(512, min(8192, batch * context))
    lead = -(-batch * context // batch_tokens)  # steps by which the first request is ahead of the last
    new = steps + lead + 2
    with continuous_batching(module, batch * (context + new), batch_tokens, batch) as manager:
        inputs = prompts(batch, context, spec.vocab)
        return batched_gaps_ms(manager, inputs, new)
