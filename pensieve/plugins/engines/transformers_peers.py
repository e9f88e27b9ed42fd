"""transformers as an engine: plain generate, which most people start with, and its continuous batching."""

import logging
import os
import queue
import threading
from array import array
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import EngineFailed, RequestFailed
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.weights import plain_module
from pensieve.serve.systems.base import Capabilities

WAKE_S = 0.25

_LOGGERS = ("transformers", "ContinuousBatchingLogger")  # the second writes to the terminal, whatever the first does


def end_tokens(setup: EngineSetup, request: Request) -> list[int]:
    """What ends a request; the first id beyond the vocabulary where nothing does."""
    return setup.ends(request) or [setup.model.vocab]


def versions() -> dict[str, Any]:
    """What computes in this process."""
    import torch
    import transformers

    return {
        "version": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }


class NativePytorch(OutsideEngine):
    """transformers' generate, one request at a time. The whole history is sent every turn, and nothing is kept."""

    can = Capabilities(max_in_flight=1)
    at_once = 1

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._module: Any = None

    def start(self) -> StartReport:
        import torch

        began = perf_counter()
        self._module = plain_module(self._setup)
        loaded = perf_counter()
        self._module(input_ids=torch.zeros(1, 8, dtype=torch.long, device=self._module.device), use_cache=False)
        kv = self._setup.kv_settings(None)
        settings = {"engine": "transformers generate", "attention": "sdpa", **versions(), **kv}
        return StartReport(loaded - began, (perf_counter() - loaded) * 1e3, settings)

    def answer(self, request: Request, channel: Channel) -> Reply:
        import torch
        from transformers import GenerationConfig

        admitted_s, ends = perf_counter(), end_tokens(self._setup, request)
        telling = _Telling(channel)
        generation = GenerationConfig(
            do_sample=False,
            max_new_tokens=request.output.max_new_tokens,
            eos_token_id=ends,
            pad_token_id=0,
            use_cache=True,
        )
        ids = torch.tensor([list(request.prompt)], device=self._module.device)
        try:
            with torch.inference_mode():
                self._module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=generation,
                    streamer=telling,
                    stopping_criteria=[telling.stop],
                )
        except (RuntimeError, IndexError, ValueError) as error:
            raise RequestFailed(f"transformers failed the request: {error}") from error
        reason = "eos" if telling.last in ends else "length"
        return Reply(reason, cached_tokens=0, admitted_s=admitted_s, compute_ms=(perf_counter() - admitted_s) * 1e3)

    def close(self) -> None:
        self._module = None


class _Telling:
    """A streamer of generate: the prompt comes first, then each token as soon as it is drawn."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._begun, self._wanted = channel, False, True
        self.last: int | None = None

    def put(self, value: Any) -> None:
        if self._begun:
            self.last = int(value)
            self._wanted = self._channel.tell(self.last)
        self._begun = True

    def end(self) -> None: ...

    def stop(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """The stopping criterion: nobody wants more."""
        import torch

        return torch.full((len(input_ids),), not self._wanted, dtype=torch.bool, device=input_ids.device)


class ContinuousBatching(OutsideEngine):
    """transformers' generate_batch behind its manager. Sized by hand, since its own choice serves far worse: pages for the
    KV budget and no more, batches as large as the scheduler's. It shares full prefix pages, and does not say when it did."""

    can = Capabilities(cancels=False)

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._open = ExitStack()
        self._waiting: dict[str, queue.SimpleQueue[Any]] = {}
        self._closing = False

    def start(self) -> StartReport:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        setup = self._setup
        began = perf_counter()
        module = plain_module(setup)
        loaded = perf_counter()
        sizes = {
            "page_size": setup.block_tokens,
            "num_blocks": max(1, setup.kv_tokens // setup.block_tokens),
            "max_batch_tokens": setup.batch_tokens,
            "max_requests_per_batch": setup.batch_requests,
        }
        for one in map(logging.getLogger, _LOGGERS):
            self._open.callback(one.setLevel, one.level)
            one.setLevel(logging.ERROR)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        config = ContinuousBatchingConfig(**sizes)
        self._manager: Any = self._open.enter_context(
            module.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=config, timeout=10
            )
        )
        reader = threading.Thread(target=self._read, name="continuous-batching", daemon=True)
        reader.start()
        self._open.callback(reader.join)
        settings = {
            "engine": "transformers continuous batching",
            **versions(),
            **setup.kv_settings(sizes["num_blocks"] * sizes["page_size"]),
            **{f"configured_{name}": value for name, value in sizes.items()},
            "max_batch_tokens": setup.batch_tokens,
            "max_batch_requests": setup.batch_requests,
        }
        return StartReport(loaded - began, (perf_counter() - loaded) * 1e3, settings)

    def answer(self, request: Request, channel: Channel) -> Reply:
        name = str(request.id)
        mailbox = self._waiting[name] = queue.SimpleQueue()
        self._manager.add_request(
            list(request.prompt),
            request_id=name,
            max_new_tokens=request.output.max_new_tokens,
            record_timestamps=True,
            eos_token_id=end_tokens(self._setup, request)[0],
        )
        result = mailbox.get()
        if result is None:
            raise EngineFailed("transformers' continuous batching stopped; its log says why.")
        if result.error is not None:
            raise RequestFailed(f"continuous batching failed the request: {result.error}")
        tokens = array("i", result.generated_tokens)
        return Reply(
            "length" if len(tokens) == request.output.max_new_tokens else "eos",
            tokens=tokens,
            emitted_s=array("d", result.timestamps or ()),
            admitted_s=result.lifespan[0] if result.lifespan[0] > 0 else None,
        )

    def _read(self) -> None:
        """Hand each result to whoever waits for it; tell all where the manager has stopped."""
        while not self._closing:
            result = self._manager.get_result(timeout=WAKE_S)
            if result is not None and result.is_finished():
                self._waiting.pop(result.request_id).put(result)
            elif result is None and not self._manager.is_running():
                break
        for mailbox in list(self._waiting.values()):
            mailbox.put(None)

    def close(self) -> None:
        self._closing = True
        self._open.close()
