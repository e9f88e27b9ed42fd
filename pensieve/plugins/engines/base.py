"""What it takes to adapt an engine of others: OutsideEngine, what it is set up with, and what it says of a request."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Request, TokenArray
from pensieve.serve.systems.base import Capabilities
from pensieve.serve.tokenizer import Tokenizer
from pensieve.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What every engine of a sweep gets alike; its own fields say how it uses that.

    weights: random (drawn under `seed`), hub (`hub_id`, `revision`), or a folder: those that our engine would run. device:
    cpu or cuda:N. kv_tokens, host_tokens: of KV on the device, and behind it in host memory. longest_tokens: of the
    longest conversation, where the workload knows it. conversations: that the workload has; None: not known. batch_tokens,
    batch_requests: of one iteration. eos: ids that end a Free output. tokenizer: the model's, for engines that are asked in
    text. memory_bytes: what an engine's processes may have resident together (hardware.cpu_memory); None: what the machine
    has. network_gbps: of the network between client and model (hardware.network_gbps); None: as fast as it is.
    """

    baseline: str
    model: ModelSpec
    weights: str
    hub_id: str | None
    revision: str | None
    seed: int
    device: str
    threads: int
    kv_tokens: int
    host_tokens: int
    block_tokens: int
    batch_tokens: int
    batch_requests: int
    longest_tokens: int | None = None
    conversations: int | None = None
    eos: frozenset[int] = frozenset()
    tokenizer: Tokenizer | None = None
    memory_bytes: int | None = None
    network_gbps: float | None = None

    def ends(self, request: Request) -> list[int]:
        """The ids that end this request."""
        output = request.output
        return sorted(self.eos) if isinstance(output, Free) and not output.ignore_eos else []

    def kv_settings(self, tokens: int | None, host_tokens: int = 0) -> dict[str, Any]:
        """What an engine reports of its KV. tokens: that it has room for on the device; None: it has no such limit."""
        per_token = self.model.kv_bytes_per_token
        return {
            "gpu_tokens": tokens,
            "gpu_bytes": None if tokens is None else tokens * per_token,
            "cpu_tokens": host_tokens,
            "cpu_bytes": host_tokens * per_token,
            "kv_bytes_per_token": per_token,
            "dtype": self.model.dtype,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """What an engine says of a request that it has served.

    tokens: those that the channel has not been told; they have no times of their own, unless emitted_s says them. None:
    the engine does not report it: prompt_tokens: of the prompt as it read it, which are more where a server puts text of its
    own around it; cached_tokens: of those, the ones whose KV it had; cached_on_host: of those, the ones that it had
    behind the device, in host memory; admitted_s, emitted_s: readings of
    time.perf_counter; compute_ms: prompt and tokens, without its queue; transfer_ms: waited for what crossed a network;
    *_bytes: of the bodies, over a network.
    """

    finish_reason: str | None = None
    tokens: TokenArray[int] | None = None
    emitted_s: TokenArray[float] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cached_on_host: int | None = None
    admitted_s: float | None = None
    compute_ms: float | None = None
    transfer_ms: float | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None


class Channel(Protocol):
    """What an engine tells while it serves one request."""

    def tell(self, *tokens: int, at_s: float | None = None) -> bool:
        """These tokens have come, now or at that reading of time.perf_counter. False: nobody wants more of them, so the
        engine should stop."""
        ...


class OutsideEngine(Protocol):
    """An engine that blocks: whoever asks waits. OutsideSystem makes a System of it.

    can: as of a System. at_once: threads that may wait in `answer` at a time. Constructing one is cheap and imports no
    engine; `check` and `start` do. Adapters inherit from it, and leave out what they have nothing to say of.
    """

    can: Capabilities = Capabilities()
    at_once: int = 256

    def check(self) -> None:
        """Raise EngineMissing, UnsupportedModel or ConfigError where `start` would. Loads nothing."""

    def identity(self) -> dict[str, str]:
        """What a trial's platform says of it: which build of it would run, as far as that is known before it starts; for a
        server that runs already what that says of itself. `unstated`: in a sentence, why that does not tell all that would
        answer; no completed trial is then reused."""
        return {}

    @abstractmethod
    def start(self) -> StartReport:
        """Load the weights and be ready. settings: as the engine itself reports them. Raises EngineFailed."""
        ...

    @abstractmethod
    def answer(self, request: Request, channel: Channel) -> Reply:
        """Serve a request, whose prompt is whole; returns when it has ended. Any number of threads ask at a time.

        Raises RequestRefused for one that it can never serve, RequestFailed for one that failed, EngineFailed where the
        engine is gone.
        """
        ...

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Ends what `start` began. Safe after a start that failed, and twice."""
