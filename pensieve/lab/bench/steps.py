"""Whole model steps by the engine's worker, decode and prefill, beside their limits and transformers' own ways to do them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers

from pensieve.core.clock import WallClock
from pensieve.core.plan import Row, Sample, StepPlan
from pensieve.device.model import LoadedModel
from pensieve.device.options import TorchOptions
from pensieve.device.sampler import greedy
from pensieve.device.worker import TorchWorker
from pensieve.lab.bench.case import Case, Figure, Measured
from pensieve.lab.bench.models import (
    CHUNK,
    Generate,
    batched_gaps_ms,
    continuous_batching,
    load,
    perform_ms,
    plain_module,
    prompts,
)
from pensieve.lab.bench.session import Bench
from pensieve.lab.bench.timer import attempt, explain, idle_pct, in_turn, synchronize
from pensieve.lab.compose.build import torch_options
from pensieve.sim.roofline import attended_pairs
from pensieve.specs import ModelSpec
from pensieve.units import ceil_div

# (requests, context) of decode, and tokens of prefill; what bench.size=full adds.
_DECODES = {"cuda": ((1, 1024), (32, 1024), (64, 1024), (128, 1024)), "cpu": ((1, 500), (8, 512))}
_MORE_DECODES = {"cuda": ((64, 4096), (8, 8192)), "cpu": ((8, 1024),)}
_PREFILLS = {"cuda": (2048,), "cpu": (768,)}
_MORE_PREFILLS = {"cuda": (512, 8192), "cpu": (276,)}
_STEPS = {"cuda": 32, "cpu": 8}
_PEER_STEPS = {"cuda": 12, "cpu": 8}  # of generate: some 30 ms a step on any GPU, since Python launches its kernels
# Tokens of a batch on a GPU, up to which continuous batching is tried in the small size: without FlashAttention it attends
# through a mask over all of its pages, which takes half a minute for the prompts of 128 x 1024 tokens.
_MOST_BATCHED = 32 * 1024
_IDLE_FROM = 64  # requests: with fewer, the launches decide
_PREFILL_TOKENS = 8192  # of one plan
_GRAPH_ROWS = 64  # recorded at least


def run_decode(bench: Bench) -> None:
    """Target decode: batches of conversations, one token each a step. Raises PensieveError."""
    model = load(bench)
    module, kind = plain_module(model), bench.device.type
    for batch, context in (*_DECODES[kind], *(_MORE_DECODES[kind] if bench.full else ())):
        _measure_decode(bench, model, module, batch, context)
    bench.note(
        "limit: weights and KV of a step at the copy bandwidth measured in this run, or its operations at the matrix rate "
        "where that is longer. transformers_generate: the time between tokens; transformers_cb: continuous batching sized "
        "by hand, the gaps between tokens while all requests decode, run before the other rounds, on a CPU also after them."
    )


def floor_ms(spec: ModelSpec, batch: int, context: int, copy_bytes_s: float, matrix_flops_s: float) -> float:
    """Least time of one decode step: every weight and all KV read once, or all operations done, whichever takes longer."""
    read = spec.dtype_bytes * (spec.read_parameters(batch) + spec.vocab * spec.hidden)
    read += batch * (context + 1) * spec.kv_bytes_per_token
    flops = batch * (spec.linear_flops_per_token + spec.head_flops + (context + 1) * spec.attention_flops_per_pair)
    return max(read / copy_bytes_s, flops / matrix_flops_s) * 1e3


def _measure_decode(bench: Bench, model: LoadedModel, module: Any, batch: int, context: int) -> None:
    spec, steps = model.spec, _STEPS[bench.device.type]
    bench.measure_limits()
    errors: dict[str, str] = {}
    if bench.on_gpu and not bench.full and batch * context > _MOST_BATCHED:
        errors["transformers_cb"] = "left out of the small size, for its time; bench.size=full runs it"
    batched = partial(_batched_ms, module, spec, batch, context, steps)
    batched_ms = attempt("transformers_cb", errors, batched)
    peers = {"transformers_generate": False, **({"transformers_static": True} if bench.full else {})}
    stepper = Stepper(model, batch, context, _options(bench, batch))
    try:
        stepper.fill()
        runs: dict[str, Callable[[], float]] = {"ours": lambda: stepper.decode(batch, steps)}
        for name, static in peers.items():
            try:
                peer = Generate(module, batch, context, spec.vocab, static)
            except Exception as error:  # its cache may not fit; it is recorded, and the others go on
                errors[name] = explain(error)
            else:
                runs[name] = partial(peer.step_ms, _PEER_STEPS[bench.device.type])
        in_turn(runs, 1, errors)  # chooses kernels and captures graphs
        values = in_turn(runs, bench.rounds(5), errors)
        figures = []
        if bench.on_gpu and batch >= _IDLE_FROM and "ours" not in errors:
            figures.append(Figure("gpu_idle_pct", idle_pct(lambda: stepper.decode(batch, steps))))
        engine = stepper.worker.settings()
    finally:
        stepper.close()
    if bench.full or not bench.on_gpu:  # on a GPU it captures its graphs anew each time
        batched_ms += attempt("transformers_cb", errors, batched)
    values["transformers_cb"] = batched_ms
    bench.measure_limits()
    case = Case(
        label=f"decode {batch} at {context}",
        floor=floor_ms(spec, batch, context, bench.copy_bytes_s, bench.matrix_flops_s),
        floor_is="weights and KV at copy bandwidth",
        metric="step_ms",
        parameters={"batch": batch, "context": context},
    )
    names = ("ours", *peers, "transformers_cb")
    bench.record(case, [_measured(name, values, errors, engine, figures if name == "ours" else ()) for name in names])


def _batched_ms(module: Any, spec: ModelSpec, batch: int, context: int, steps: int) -> list[float]:
    batch_tokens = max(512, min(8192, batch * context))
    lead = -(-batch * context // batch_tokens)  # steps by which the first request is ahead of the last
    new = steps + lead + 2
    with continuous_batching(module, batch * (context + new), batch_tokens, batch) as manager:
        inputs = prompts(batch, context, spec.vocab)
        return batched_gaps_ms(manager, inputs, new)


def run_prefill(bench: Bench) -> None:
    """Target prefill: one prompt, up to the token that follows it. Raises PensieveError."""
    model = load(bench)
    module, kind = plain_module(model), bench.device.type
    for tokens in (*_PREFILLS[kind], *(_MORE_PREFILLS[kind] if bench.full else ())):
        _measure_prefill(bench, model, module, tokens)
    bench.note(
        "limit: the prompt's operations (a multiply and an add count two) at the rate of a large square product measured "
        "in this run. transformers: sdpa over the whole prompt, logits of the last position."
    )


def operations(spec: ModelSpec, tokens: int) -> int:
    """Floating-point operations of a prompt: every projection, causal attention, and the head for one position."""
    attention = attended_pairs(0, tokens) * spec.attention_flops_per_pair
    return tokens * spec.linear_flops_per_token + attention + spec.head_flops


def _measure_prefill(bench: Bench, model: LoadedModel, module: Any, tokens: int) -> None:
    spec = model.spec
    bench.measure_limits()
    stepper = Stepper(model, 1, tokens, _options(bench, 1))
    ids = torch.tensor(prompts(1, tokens, spec.vocab), device=bench.device)

    def forward() -> float:
        started = perf_counter()
        with torch.inference_mode():
            output = module(input_ids=ids, use_cache=True, logits_to_keep=1)
            int(greedy(output.logits[0, -1]))
        synchronize(bench.device)
        return (perf_counter() - started) * 1e3

    errors: dict[str, str] = {}
    runs: dict[str, Callable[[], float]] = {"ours": lambda: stepper.prefill(tokens), "transformers": forward}
    in_turn(runs, 1, errors)
    values = in_turn(runs, bench.rounds(9 if bench.on_gpu else 5), errors)
    engine = stepper.worker.settings()
    stepper.close()
    bench.measure_limits()
    floor = operations(spec, tokens) / bench.matrix_flops_s * 1e3
    case = Case(
        label=f"prefill {tokens}",
        floor=floor,
        floor_is="operations at the measured matrix rate",
        metric="prefill_ms",
        parameters={"tokens": tokens},
    )
    measured = []
    for name in runs:
        shares = [Figure("matrix_rate_pct", 100 * floor / min(values[name]))] if name not in errors else []
        measured.append(_measured(name, values, errors, engine, shares))
    bench.record(case, measured)


def _measured(
    name: str,
    values: Mapping[str, Sequence[float]],
    errors: Mapping[str, str],
    engine: Mapping[str, Any],
    figures: Sequence[Figure],
) -> Measured:
    """engine: the settings of ours."""
    ours, failed = name == "ours", name in errors
    return Measured(
        backend=name,
        values=() if failed else values[name],
        version=None if ours else transformers.__version__,
        engine=engine if ours else {"attention": "sdpa"},
        figures=figures,
        error=errors.get(name),
    )


def prompt(slot: int, tokens: int, vocab: int) -> tuple[int, ...]:
    """Different for each of the first `vocab` slots."""
    return tuple((slot + 7 * i) % vocab for i in range(tokens))


def _options(bench: Bench, requests: int) -> TorchOptions:
    """Return the options of a trial on this hardware, with graphs for every batch that is asked for."""
    return torch_options(bench.hardware, bench.machine, _PREFILL_TOKENS, max(_GRAPH_ROWS, requests))


class Stepper:
    """A started worker that is driven through plans as an engine drives it, with nothing to decide: `requests` conversations
    of `context` tokens with all KV on the device, conversation i in slot i.

    Every decode step computes the same position again, so that all steps do the same work. tokens: the last token that each
    slot sampled. options: as trials have them on this device.
    """

    def __init__(self, model: LoadedModel, requests: int, context: int, options: TorchOptions) -> None:
        self.worker = TorchWorker(model, CHUNK, WallClock(), options=options)
        self.requests, self.context = requests, context
        chunks = ceil_div(context + 1, CHUNK)
        self.worker.start(requests * chunks, 0)
        self._tables = tuple((s, 0, tuple(range(s * chunks, (s + 1) * chunks))) for s in range(requests))
        self._step = 0
        self.tokens: dict[int, int] = {}
        self._perform([self._plan((), self._tables)])

    def fill(self) -> None:
        """Prefill all conversations, several a plan."""
        a_plan = max(1, _PREFILL_TOKENS // self.context)
        slots = range(self.requests)
        plans = [slots[i : i + a_plan] for i in range(0, self.requests, a_plan)]
        self._perform([self._plan([self._prompt(slot, self.context) for slot in some]) for some in plans])

    def decode(self, batch: int, steps: int) -> float:
        """Milliseconds a step of the first `batch` conversations, over `steps` steps, as many in flight as it allows."""
        at = self.context
        rows = [Row(slot, ((at, at + 1),), None, Sample(at + 1)) for slot in range(batch)]
        plans = [self._plan(rows) for _ in range(steps)]
        return self._perform(plans) / steps

    def prefill(self, tokens: int) -> float:
        """Milliseconds to compute the first `tokens` positions of the first conversation, with the token after them."""
        return self._perform([self._plan([self._prompt(0, tokens)])])

    def close(self) -> None:
        self.worker.close()

    def _prompt(self, slot: int, tokens: int) -> Row:
        return Row(slot, ((0, tokens),), prompt(slot, tokens, self.worker.model.spec.vocab), Sample(tokens))

    def _plan(self, rows: Sequence[Row], tables: tuple[tuple[int, int, tuple[int, ...]], ...] = ()) -> StepPlan:
        self._step += 1
        return StepPlan(step=self._step, rows=tuple(rows), tables=tables)

    def _perform(self, plans: Sequence[StepPlan]) -> float:
        return perform_ms(self.worker, plans, self.tokens)
