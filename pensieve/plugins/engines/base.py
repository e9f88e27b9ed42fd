"""An engine of others: what it takes to adapt one (OutsideEngine, what it is set up with, what it says of a request), and the
System around it, in which each request waits in a thread of its own."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Forced, Free, Length, Request, TokenArray
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, EngineFailed, RequestFailed, RequestRefused, WorkerError
from pensieve.serve.record import Transcripts, TurnRecord
from pensieve.serve.systems.base import Capabilities, Outbox, WallClock
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


class OutsideSystem:
    """The System around an OutsideEngine. It keeps what each conversation said for the record alone: how much of a prompt
    was said before (history_tokens) is known here, how much of that the engine had cached only if the engine tells.

    | engine               | gpu_hit                     | cpu_hit            | recomputed     | shared_hit    |
    |----------------------|-----------------------------|--------------------|----------------|---------------|
    | reports cached tokens| min(cached, history) or less | None              | history − hits | cached − hits |
    | and where they were  | min(cached, history) − cpu_hit | min(host, history) | history − hits | cached − hits |
    | does not             | None                        | None               | None           | None          |
    """

    def __init__(self, engine: OutsideEngine) -> None:
        self.clock: Clock = WallClock()
        self.can = engine.can
        self._engine = engine
        self._said = Transcripts()
        self._asked: dict[int, TokenArray[int]] = {}  # every prompt as soon as it is sent, then with its answer
        self._live: dict[int, _Exchange] = {}
        self.outbox = Outbox(self.clock, lambda: self._ended)
        self._threads = ThreadPoolExecutor(engine.at_once, thread_name_prefix="outside-engine")
        self._ended: WorkerError | None = None
        self._settings: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._offset_s = time.perf_counter() - self.clock.now_s()

    def start(self) -> StartReport:
        """Where it fails, the engine is closed before the error is raised."""
        try:
            report = self._engine.start()
        except BaseException:
            self._engine.close()
            raise
        self._settings = report.settings
        return report

    def submit(self, request: Request) -> None:
        exchange = _Exchange(self, request, self._said.history_of(request))
        with self._lock:
            self.outbox.expect(request.id)
            self._live[request.id] = exchange
            self._asked[request.id] = request.prompt
        self._threads.submit(self._serve, exchange)

    def cancel(self, request_id: int, status: str) -> None:
        exchange = self._live.get(request_id)
        if exchange is not None:
            exchange.cancelled_as = status

    def poll(self, until_s: float | None) -> list[Event]:
        """Raises WorkerError once there is nothing more to tell and the engine has crashed or was closed."""
        return self.outbox.poll(until_s)

    def forget(self, session: str | None) -> None:
        """Raises ConfigError."""
        raise ConfigError(
            "An engine of others is not told to forget what it has cached; start it anew for a cold cache."
        )

    def counters(self) -> dict[str, float]:
        return self._engine.counters()

    def settings(self) -> dict[str, Any]:
        return dict(self._settings)

    def close(self) -> None:
        """Requests under way never finish."""
        for exchange in list(self._live.values()):
            exchange.cancelled_as = exchange.cancelled_as or "cancelled"
        self._end(WorkerError("The engine was closed; start another one to serve requests."))
        self._engine.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    # -- how ----------------------------------------------------------------------------------------------------------

    def own_time(self, perf_s: float) -> float:
        """A reading of time.perf_counter, which all processes of a machine share, by this system's clock."""
        return perf_s - self._offset_s

    def unexplained(self, request: Request, cached: int, history: int) -> int:
        """Of the leading tokens that it had cached, those beyond all that any other request of this trial was asked or
        answered: no more can be in a cache that was cold. History need not be a prefix: a server that reuses by content
        finds it wherever it stands."""
        if cached <= history:
            return 0
        with self._lock:
            texts = [text for number, text in self._asked.items() if number != request.id]
        return max(0, cached - max([history, *(common_prefix(request.prompt, text) for text in texts)]))

    def _end(self, error: WorkerError) -> None:
        self._ended = self._ended or error
        self.outbox.put([])  # wakes a poll that waits

    def _serve(self, exchange: _Exchange) -> None:
        """One request from its thread to its record; whoever polls learns of everything."""
        request, turn = exchange.request, exchange.turn
        try:
            _refuse_unsupported(request)
            reply = self._engine.answer(request, exchange)
        except RequestRefused as error:
            exchange.close("refused", error.reason, str(error))
        except RequestFailed as error:
            exchange.close("failed", error.reason, str(error))
        except Exception as error:
            if exchange.cancelled_as is None:
                said = str(error) if isinstance(error, EngineFailed) else f"The engine's adapter stopped: {error!r}"
                crash = WorkerError(said)
                crash.__cause__ = error
                self._end(crash)
                return
            exchange.close("failed", None, str(error))
        else:
            exchange.reply(reply)
        with self._lock:
            del self._live[request.id]
            self._asked[request.id] = request.prompt + turn.token_ids
        self._said.note(request, turn)
        assert turn.finished_s is not None
        self.outbox.put([Event("finished", request.id, turn.finished_s, turn=turn)])


class _Exchange:
    """One request on its way through an engine: the Channel it tells tokens to. history: tokens of its prompt that its
    conversation said before."""

    def __init__(self, system: OutsideSystem, request: Request, history: int) -> None:
        self._system, self.request, self._history = system, request, history
        self.turn = turn = TurnRecord.arrived(request, request.turn, system.clock.now_s())
        turn.h2d_bytes = turn.d2h_bytes = None  # nobody here counts what an outside engine copies
        self.cancelled_as: str | None = None

    def tell(self, *tokens: int, at_s: float | None = None) -> bool:
        if self.cancelled_as is not None:
            return False
        now_s = self._system.clock.now_s() if at_s is None else self._system.own_time(at_s)
        events = []
        for token in tokens:
            kind = "token" if self.turn.token_ids else "first_token"
            self.turn.token(token, None, now_s)
            events.append(Event(kind, self.request.id, now_s, token=token))  # type: ignore[arg-type]
        if events:
            self._system.outbox.put(events)
        return True

    def reply(self, reply: Reply) -> None:
        """The engine is done with it."""
        turn, system = self.turn, self._system
        if reply.tokens is not None and self.cancelled_as is None:
            if reply.emitted_s is not None:
                told = array("d", map(system.own_time, reply.emitted_s))
            else:  # a reply of one token is its first token
                told = array("d", [system.clock.now_s()] if len(reply.tokens) == 1 else [])
            turn.generated(reply.tokens, told, None)
        if reply.admitted_s is not None:
            turn.admitted_s = system.own_time(reply.admitted_s)
        turn.compute_ms, turn.transfer_ms = reply.compute_ms, reply.transfer_ms
        turn.sent_bytes, turn.received_bytes = reply.sent_bytes, reply.received_bytes
        turn.prompt_tokens, turn.history_tokens = len(self.request.prompt), self._history
        turn.new_tokens = turn.prompt_tokens - self._history
        if reply.cached_tokens is not None:
            hits = min(reply.cached_tokens, self._history)
            if reply.cached_on_host is not None:
                turn.cpu_hit_tokens = min(reply.cached_on_host, hits)
            turn.gpu_hit_tokens = hits - (turn.cpu_hit_tokens or 0)
            turn.shared_hit_tokens = reply.cached_tokens - hits
            turn.recomputed_tokens = self._history - hits
            # What a server puts around a prompt is in none of its prompts here, and in all of them there.
            own = max(0, (reply.prompt_tokens or 0) - turn.prompt_tokens)
            turn.unexplained_tokens = system.unexplained(self.request, reply.cached_tokens - own, self._history)
        asked, said = self.request.output, len(turn.token_ids)
        if isinstance(asked, Length) and said < asked.tokens and self.cancelled_as is None:
            ended = f"The engine ended after {said} of {asked.tokens} tokens ({reply.finish_reason})"
            self.close("failed", "context", f"{ended}; give its sequences more room.")
        else:
            self.close("completed", reply.finish_reason, None)

    def close(self, status: str, finish_reason: str | None, error: str | None) -> None:
        turn = self.turn
        ended_s = turn.emitted_s[-1] if status == "completed" and turn.emitted_s else self._system.clock.now_s()
        if self.cancelled_as is not None:
            status, error = self.cancelled_as, None
        turn.close(status, finish_reason, ended_s, error)


def _refuse_unsupported(request: Request) -> None:
    """Their noise is their own, so their outputs could not be compared. Raises RequestRefused."""
    output = request.output
    if isinstance(output, Forced) or request.sampling.temperature > 0 or (isinstance(output, Free) and output.stop):
        raise RequestRefused(
            "Outside engines are asked for tokens at temperature=0, not for forced ones, and without stop strings; use a "
            "baseline in the engine."
        )
