"""Whole model steps by the engine's worker, decode and prefill, beside their limits and transformers' own ways to do them.
Weights are random: only speed is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers

from pensieve.core.plan import Row, Sample, StepPlan
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import TransformersForward
from pensieve.device.model import LoadedModel, load_model
from pensieve.device.sampler import greedy
from pensieve.device.shelf import take_model
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.errors import WorkerError
from pensieve.lab.bench.case import OURS, Case, in_turn, synchronize
from pensieve.lab.bench.session import Bench
from pensieve.lab.compose.build import torch_options
from pensieve.lab.compose.conf import read_option
from pensieve.lab.results.frame import served_by
from pensieve.serve.systems.base import WallClock
from pensieve.sim.roofline import attended_pairs
from pensieve.specs import ModelSpec
from pensieve.units import ceil_div

CHUNK = 32  # tokens of a KV block
ON_GPU, ON_CPU = "llama3_8b", "llama_25m"
# (requests, context) of decode, and tokens of prefill.
_DECODES = {"cuda": ((1, 1024), (32, 1024), (64, 1024), (128, 1024)), "cpu": ((1, 500), (8, 512))}
_PREFILLS = {"cuda": (2048, 8192), "cpu": (768,)}
_STEPS = {"cuda": 32, "cpu": 8}
_PREFILL_TOKENS = 8192  # of one plan
_PEER_TOKENS = 16384  # of one forward of the peer, so that its activations fit beside the pools
_GRAPH_ROWS = 64  # recorded at least


def load(bench: Bench) -> LoadedModel:
    """bench.model, or one that suits a machine of this kind. Raises PensieveError where it does not fit."""
    bench.model = bench.options.model or (ON_GPU if bench.on_gpu else ON_CPU)
    spec = ModelSpec.from_architecture(bench.model, read_option("model", bench.model)["architecture"], bench.dtype_name)
    model = take_model(ModelAsked(spec, "random", None, None, 0, bench.machine.name, bench.threads))
    bench.note(served_by(model.served()))
    return model


def plain_module(model: LoadedModel) -> Any:
    """A transformers module on its own attention (sdpa), for the peers: with the same weights where ours does not run it."""
    module = model.module
    if isinstance(model.forward, TransformersForward):  # ours runs this very module: the peers need another
        module = load_model(ModelAsked(model.spec, device=str(model.device), threads=model.threads, fused=False)).module
    module.set_attn_implementation("sdpa")
    return module


def perform_ms(worker: TorchWorker, plans: Iterable[StepPlan], tokens: dict[int, int] | None = None) -> float:
    """Milliseconds from the first launch until all steps and copies of the plans are done, as many in flight as the worker
    takes. tokens: gets what each slot sampled last. Raises WorkerError."""
    began, in_flight, copies = perf_counter(), 0, set[int]()

    def collect() -> int:
        result = worker.collect(None)
        assert result is not None
        if result.error is not None or not all(one.ok for one in result.moved):
            raise WorkerError(result.error or "A copy between the tiers failed.")
        copies.difference_update(one.ticket for one in result.moved)
        if tokens is not None:
            tokens.update(result.tokens)
        return int(result.step is not None)

    for plan in plans:
        while in_flight == worker.depth:
            in_flight -= collect()
        worker.launch(plan)
        copies.update(move.ticket for move in plan.moves)
        in_flight += 1
    while in_flight or copies:
        in_flight -= collect()
    return (perf_counter() - began) * 1e3


def run_decode(bench: Bench) -> None:
    """Target decode: batches of conversations, one token each a step, beside one forward a token over a DynamicCache. Raises
    PensieveError."""
    model = load(bench)
    module, spec, kind = plain_module(model), model.spec, bench.device.type
    for batch, context in _DECODES[kind]:
        stepper = _stepper(bench, model, batch, context)
        stepper.fill()
        ours = partial(stepper.decode, batch, _STEPS[kind])
        peer = partial(Greedy(module, batch, context, spec.vocab).step_ms, _STEPS[kind])
        sizes = {"batch": batch, "context": context}
        case = Case(f"decode {batch} at {context}", 0.0, "weights and KV at copy bandwidth", "step_ms", sizes)
        _measure(bench, case, partial(floor_ms, spec, batch, context), stepper, ours, peer, bench.options.repeats or 5)


def floor_ms(spec: ModelSpec, batch: int, context: int, copy_bytes_s: float, matrix_flops_s: float) -> float:
    """Least time of one decode step: every weight and all KV read once, or all operations done, whichever takes longer."""
    read = spec.dtype_bytes * (spec.read_parameters(batch) + spec.vocab * spec.hidden)
    read += batch * (context + 1) * spec.kv_bytes_per_token
    flops = batch * (spec.linear_flops_per_token + spec.head_flops + (context + 1) * spec.attention_flops_per_pair)
    return max(read / copy_bytes_s, flops / matrix_flops_s) * 1e3


def run_prefill(bench: Bench) -> None:
    """Target prefill: one prompt, up to the token that follows it. Raises PensieveError."""
    model = load(bench)
    module, spec = plain_module(model), model.spec

    def forward(ids: torch.Tensor) -> float:
        started = perf_counter()
        with torch.inference_mode():
            output = module(input_ids=ids, use_cache=True, logits_to_keep=1)
            int(greedy(output.logits[0, -1]))
        synchronize(bench.device)
        return (perf_counter() - started) * 1e3

    def least_ms(tokens: int, _: float, matrix_flops_s: float) -> float:
        return operations(spec, tokens) / matrix_flops_s * 1e3

    for tokens in _PREFILLS[bench.device.type]:
        stepper = _stepper(bench, model, 1, tokens)
        peer = partial(forward, torch.tensor([prompt(0, tokens, spec.vocab)], device=bench.device))
        floor_is = "operations at the measured matrix rate"
        case = Case(f"prefill {tokens}", 0.0, floor_is, "prefill_ms", {"tokens": tokens})
        rounds = bench.options.repeats or (9 if bench.on_gpu else 5)
        _measure(bench, case, partial(least_ms, tokens), stepper, partial(stepper.prefill, tokens), peer, rounds)


def operations(spec: ModelSpec, tokens: int) -> int:
    """Floating-point operations of a prompt: every projection, causal attention, and the head for one position."""
    attention = attended_pairs(0, tokens) * spec.attention_flops_per_pair
    return tokens * spec.linear_flops_per_token + attention + spec.head_flops


def _measure(
    bench: Bench,
    case: Case,
    floor_ms: Callable[[float, float], float],
    stepper: Stepper,
    ours: Callable[[], float],
    peer: Callable[[], float],
    rounds: int,
) -> None:
    """floor_ms: of the rates of copies and products, which are measured before and after."""
    bench.measure_limits()
    times = in_turn({OURS: ours, "transformers": peer}, rounds)
    engine = stepper.worker.settings()
    stepper.worker.close()
    bench.measure_limits()
    measured = [
        replace(times[OURS], engine=engine),
        replace(times["transformers"], version=transformers.__version__, engine={"attention": "sdpa"}),
    ]
    bench.record(replace(case, floor=floor_ms(bench.copy_bytes_s, bench.matrix_flops_s)), measured)


def prompt(slot: int, tokens: int, vocab: int) -> tuple[int, ...]:
    """Different for each of the first `vocab` slots."""
    return tuple((slot + 7 * i) % vocab for i in range(tokens))


def _stepper(bench: Bench, model: LoadedModel, requests: int, context: int) -> Stepper:
    """With the options of a trial on this hardware, and graphs for every batch that is asked for."""
    options = torch_options(bench.hardware, bench.machine, _PREFILL_TOKENS, max(_GRAPH_ROWS, requests))
    return Stepper(model, requests, context, options)


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

    def _prompt(self, slot: int, tokens: int) -> Row:
        return Row(slot, ((0, tokens),), prompt(slot, tokens, self.worker.model.spec.vocab), Sample(tokens))

    def _plan(self, rows: Sequence[Row], tables: tuple[tuple[int, int, tuple[int, ...]], ...] = ()) -> StepPlan:
        self._step += 1
        return StepPlan(step=self._step, rows=tuple(rows), tables=tables)

    def _perform(self, plans: Sequence[StepPlan]) -> float:
        return perform_ms(self.worker, plans, self.tokens)


# transformers


class Greedy:
    """Decode steps of a transformers module over a cache that holds the context already, each token the likeliest."""

    def __init__(self, module: Any, batch: int, context: int, vocab: int) -> None:
        self._module, self._context = module, context
        self._ids = torch.tensor([prompt(slot, context + 1, vocab) for slot in range(batch)], device=module.device)
        self._cache: Any = None

    def step_ms(self, steps: int) -> float:
        """The mean time of so many steps."""
        with torch.inference_mode():
            if self._cache is None:
                self._cache = transformers.DynamicCache(config=self._module.config)
                for part in self._ids[:, :-1].split(max(1, _PEER_TOKENS // len(self._ids)), dim=1):
                    self._forward(part)
            token = self._ids[:, -1:]
            synchronize(token.device)
            began = perf_counter()
            for _ in range(steps):
                token = greedy(self._forward(token).logits[:, -1])[:, None]
            synchronize(token.device)
            took_ms = (perf_counter() - began) * 1e3 / steps
            self._cache.crop(self._context - self._cache.get_seq_length())  # negative: how many tokens to take off
        return took_ms

    def _forward(self, ids: torch.Tensor) -> Any:
        return self._module(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
