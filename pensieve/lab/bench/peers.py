"""transformers as a peer: generate with its caches, and its continuous batching, timed by itself or run as a System."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import transformers

from pensieve.core.clock import Clock, WallClock
from pensieve.core.event import Event
from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import RequestFailed, WorkerError
from pensieve.lab.statistics import median
from pensieve.plugins.engines import transformers_peers as engines
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities

_WAKE_S = 0.25
_TIMEOUT_S = 120.0
_PREFILL_TOKENS = 16384  # of one forward, so that its activations fit beside the pools


def prompts(batch: int, context: int, vocab: int) -> list[list[int]]:
    """Make `batch` prompts of `context` tokens; none shares a block with another, so that no prefix cache helps."""
    return [[(slot * 31 + 7 * i) % (vocab - 1) + 1 for i in range(context)] for slot in range(batch)]


class Generate:
    """A decode step of `module.generate` over a cache that holds the context already (dynamic), or its own (static)."""

    def __init__(self, module: Any, batch: int, context: int, vocab: int, static: bool = False) -> None:
        from transformers import DynamicCache

        self._module, self._context, self._static = module, context, static
        self._ids = torch.tensor(prompts(batch, context + 1, vocab), device=module.device)
        self._cache: Any = None
        if not static:
            self._cache = DynamicCache(config=module.config)
            with torch.inference_mode():
                for part in self._ids[:, :context].split(max(1, _PREFILL_TOKENS // batch), dim=1):
                    module(input_ids=part, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def step_ms(self, steps: int) -> float:
        """The median time between two tokens of one generate call; its prefill is left out."""
        from transformers import StoppingCriteriaList

        clock = _TokenClock()
        given = {"cache_implementation": "static"} if self._static else {"past_key_values": self._cache}
        with torch.inference_mode():
            self._module.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                max_new_tokens=steps + 2,
                min_new_tokens=steps + 2,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **given,
            )
        if self._cache is not None:
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


@contextmanager
def continuous_batching(module: Any, tokens: int, batch_tokens: int, requests: int) -> Iterator[Any]:
    """A running manager whose pages hold `tokens` tokens of KV.

    Raises EngineMissing where this version of transformers has none.
    """
    with engines.continuous_batching(module, engines.sized(tokens, batch_tokens, requests)) as manager:
        yield manager


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


class TransformersSystem:
    """transformers' continuous batching as a System, so that a replay drives it like any other. It keeps no sessions: each
    turn sends the whole conversation. It may share full prefix blocks, and does not report that it did.

    kv_tokens: of its pages. batch_tokens, requests: of one forward.
    """

    def __init__(self, module: Any, kv_tokens: int, batch_tokens: int, requests: int) -> None:
        self.clock: Clock = WallClock()
        self._offset_s = perf_counter() - self.clock.now_s()  # the engine stamps tokens by the same counter
        self.can = Capabilities(keeps_sessions=False, cancels=False)
        self._module = module
        self._sizes = {"tokens": kv_tokens, "batch_tokens": batch_tokens, "requests": requests}
        self._open = ExitStack()
        self._manager: Any = None
        self._records: dict[str, TurnRecord] = {}

    def start(self) -> StartReport:
        """Raises EngineMissing where this transformers has no continuous batching."""
        began = perf_counter()
        self._manager = self._open.enter_context(continuous_batching(self._module, **self._sizes))
        return StartReport(0.0, (perf_counter() - began) * 1e3, self.settings())

    def submit(self, request: Request) -> None:
        name, now = str(request.id), self.clock.now_s()
        self._records[name] = TurnRecord(
            session=request.session,
            turn=request.turn,
            intended_s=request.intended_s,
            arrived_s=now,
            prompt_tokens=len(request.prompt),
            request_id=request.id,
        )
        self._manager.add_request(
            list(request.prompt),
            request_id=name,
            max_new_tokens=request.output.max_new_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )

    def cancel(self, request_id: int, status: str) -> None:
        raise AssertionError("can.cancels is False")

    def poll(self, until_s: float | None) -> list[Event]:
        events: list[Event] = []
        while True:
            left = None if until_s is None else until_s - self.clock.now_s()
            if events or (left is not None and left <= 0):
                return events
            result = self._manager.get_result(timeout=_WAKE_S if left is None else max(1e-4, min(_WAKE_S, left)))
            if result is not None and result.is_finished():
                events.append(self._finished(result))
            elif result is None and not self._manager.is_running():
                raise WorkerError("transformers' continuous batching stopped; its log says why.")
            elif result is None and until_s is None and not self._records:
                return events

    def forget(self, session: str | None) -> None:
        """Nothing is kept under a conversation's name."""

    def counters(self) -> dict[str, float]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {"engine": "transformers continuous batching", "version": transformers.__version__, **self._sizes}

    def close(self) -> None:
        self._open.close()
        self._manager = None

    def _finished(self, result: Any) -> Event:
        turn = self._records.pop(result.request_id)
        emitted_s = array("d", (at - self._offset_s for at in result.timestamps or ()))
        admitted_s = result.lifespan[0] - self._offset_s if result.lifespan[0] > 0 else None
        turn.generated(array("i", result.generated_tokens), emitted_s, admitted_s)
        ended_s = emitted_s[-1] if emitted_s else self.clock.now_s()
        if result.error is None:
            turn.close("completed", None, ended_s)
        else:
            turn.close("failed", None, ended_s, str(result.error))
        return Event("finished", turn.request_id, ended_s, turn=turn)
