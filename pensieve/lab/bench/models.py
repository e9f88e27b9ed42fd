"""The models that targets run (random weights: only speed is asked), the plans of their workers, and transformers as a peer
of single steps: generate with its caches, and its continuous batching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from pensieve.core.plan import StepPlan
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import TransformersForward
from pensieve.device.model import LoadedModel, load_model
from pensieve.device.worker import TorchWorker
from pensieve.errors import RequestFailed, WorkerError
from pensieve.lab.bench.session import Bench
from pensieve.lab.compose import read_option
from pensieve.lab.results.frame import sentence
from pensieve.lab.statistics import median
from pensieve.plugins.device.shelf import take_model
from pensieve.plugins.engines import transformers_peers
from pensieve.specs import ModelSpec
from pensieve.units import ceil_div

CHUNK = 32  # tokens of a KV block
ON_GPU, ON_CPU = "llama3_8b", "llama_25m"
_PAGE = 32
_TIMEOUT_S = 120.0
_PREFILL_TOKENS = 16384  # of one forward, so that its activations fit beside the pools


def spec_of(name: str, dtype: str = "float32") -> ModelSpec:
    """name: an option of conf/model. Raises PensieveError."""
    architecture = read_option("model", name)["architecture"]
    return ModelSpec.from_architecture(name, architecture, dtype)


def load(bench: Bench) -> LoadedModel:
    """bench.model, or one that suits a machine of this kind. Raises PensieveError where it does not fit."""
    bench.model = bench.options.model or (ON_GPU if bench.on_gpu else ON_CPU)
    spec = spec_of(bench.model, bench.dtype_name)
    model = take_model(ModelAsked(spec, "random", None, None, bench.options.seed, bench.machine.name, bench.threads))
    bench.note(sentence([model.served()]))
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


# transformers


def prompts(batch: int, context: int, vocab: int) -> list[list[int]]:
    """Make `batch` prompts of `context` tokens; none shares a block with another, so that no prefix cache helps."""
    return [[(slot * 31 + 7 * i) % (vocab - 1) + 1 for i in range(context)] for slot in range(batch)]


class Generate:
    """A decode step of `module.generate` over a cache that holds the context already."""

    def __init__(self, module: Any, batch: int, context: int, vocab: int) -> None:
        self._module, self._context = module, context
        self._ids = torch.tensor(prompts(batch, context + 1, vocab), device=module.device)
        self._cache: Any = None

    def _filled(self) -> Any:
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache(config=self._module.config)
            batch = len(self._ids)
            for part in self._ids[:, : self._context].split(max(1, _PREFILL_TOKENS // batch), dim=1):
                self._module(input_ids=part, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return self._cache

    def step_ms(self, steps: int) -> float:
        """The median time between two tokens of one generate call; its prefill is left out."""
        from transformers import StoppingCriteriaList

        clock = _TokenClock()
        with torch.inference_mode():
            self._module.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                max_new_tokens=steps + 2,
                min_new_tokens=steps + 2,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                past_key_values=self._filled(),
            )
        self._cache.crop(self._context - self._cache.get_seq_length())  # negative: how many tokens to take off
        return clock.gap_ms()


class _TokenClock:
    """A stopping criterion that never stops and notes the time at which it is asked: once a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def gap_ms(self) -> float:
        gaps = [b - a for a, b in pairwise(self.times[1:])]  # the first holds the prefill
        return median(gaps) * 1e3


def continuous_batching(module: Any, tokens: int, batch_tokens: int, requests: int) -> AbstractContextManager[Any]:
    """A running manager whose pages hold `tokens` tokens of KV. Each request under way may fill its last page in part, and
    one page is never used. Raises EngineMissing where this version of transformers has none."""
    sizes = {
        "page_size": _PAGE,
        "num_blocks": ceil_div(tokens, _PAGE) + requests + 1,
        "max_batch_tokens": batch_tokens,
        "max_requests_per_batch": requests,
    }
    return transformers_peers.continuous_batching(module, sizes)


def batched_gaps_ms(manager: Any, inputs: Sequence[list[int]], new_tokens: int) -> list[float]:
    """Milliseconds a decode step while all of `inputs` are decoding and none is still being prefilled.

    Raises RequestFailed where the engine failed one of them.
    """
    manager.add_requests(list(inputs), max_new_tokens=new_tokens, record_timestamps=True)
    finished: list[Any] = []
    deadline = perf_counter() + _TIMEOUT_S
    while len(finished) < len(inputs):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RequestFailed(f"continuous batching failed a request: {result.error}")
            finished.append(result)
        elif result is None and (not manager.is_running() or perf_counter() > deadline):
            raise RequestFailed("continuous batching ended or hung without answering all requests")
    last = max(finished, key=lambda result: result.timestamps[0])
    end = min(result.timestamps[-1] for result in finished)
    inside = [at for at in last.timestamps if at <= end]
    if len(inside) < 2:
        raise RequestFailed("continuous batching never decoded all requests at once; give it more new tokens")
    return [(b - a) * 1e3 for a, b in pairwise(inside)]
