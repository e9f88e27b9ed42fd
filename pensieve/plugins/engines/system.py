"""An engine of others as a System: each request waits in a thread of its own, and what became of it is a TurnRecord."""

from __future__ import annotations

import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Forced, Free, Length, Request, TokenArray
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, EngineFailed, RequestFailed, RequestRefused, WorkerError
from pensieve.plugins.engines.base import OutsideEngine, Reply
from pensieve.serve.record import Transcripts, TurnRecord
from pensieve.serve.systems.base import Outbox, WallClock


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
        self._outbox = Outbox(self.clock, lambda: self._ended)
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
            self._outbox.expect(request.id)
            self._live[request.id] = exchange
            self._asked[request.id] = request.prompt
        self._threads.submit(self._serve, exchange)

    def cancel(self, request_id: int, status: str) -> None:
        exchange = self._live.get(request_id)
        if exchange is not None:
            exchange.cancelled_as = status

    def poll(self, until_s: float | None) -> list[Event]:
        """Raises WorkerError once there is nothing more to tell and the engine has crashed or was closed."""
        return self._outbox.poll(until_s)

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

    def tell(self, events: list[Event]) -> None:
        self._outbox.put(events)

    def own_time(self, perf_s: float) -> float:
        """A reading of time.perf_counter, which all processes of a machine share, by this system's clock."""
        return perf_s - self._offset_s

    def said_before(self, request: Request) -> int:
        """How many leading tokens of its prompt any other request of this trial was asked or answered: no more of it can be
        in a cache that was cold."""
        with self._lock:
            texts = [text for number, text in self._asked.items() if number != request.id]
        return max((common_prefix(request.prompt, text) for text in texts), default=0)

    def _end(self, error: WorkerError) -> None:
        self._ended = self._ended or error
        self._outbox.put([])  # wakes a poll that waits

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
        self.tell([Event("finished", request.id, turn.finished_s, turn=turn)])


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
            self._system.tell(events)
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
            turn.unexplained_tokens = self._unexplained(reply.cached_tokens, reply.prompt_tokens or 0)
        asked = self.request.output
        short = isinstance(asked, Length) and len(turn.token_ids) < asked.tokens
        if short and self.cancelled_as is None:
            said = (
                f"The engine ended after {len(turn.token_ids)} of {asked.max_new_tokens} tokens ({reply.finish_reason})"
            )
            self.close("failed", "context", f"{said}; give its sequences more room.")
        else:
            self.close("completed", reply.finish_reason, None)

    def _unexplained(self, cached: int, prompt: int) -> int:
        """Of the tokens that it had cached, those beyond all that this system was asked or answered before. What a server
        puts around a prompt is in none of its prompts here, and in all of them there. History need not be a prefix: a server
        that reuses by content finds it wherever it stands."""
        cached -= max(0, prompt - len(self.request.prompt))
        if cached <= self._history:
            return 0
        return max(0, cached - max(self._history, self._system.said_before(self.request)))

    def close(self, status: str, finish_reason: str | None, error: str | None) -> None:
        turn = self.turn
        ended_s = turn.emitted_s[-1] if status == "completed" and turn.emitted_s else self._system.clock.now_s()
        if self.cancelled_as is not None:
            status, error = self.cancelled_as, None
        turn.close(status, finish_reason, ended_s, error)


def _refuse_unsupported(request: Request) -> None:
    """Raises RequestRefused."""
    output = request.output
    if isinstance(output, Forced):
        raise RequestRefused("Forced tokens need an engine that gives its logits; use a baseline in the engine.")
    if request.sampling.temperature > 0:
        raise RequestRefused(
            "Outside engines draw their own noise, so their outputs could not be compared; ask them with temperature=0."
        )
    if isinstance(output, Free) and output.stop:
        raise RequestRefused("Outside engines are asked without stop strings; use a baseline in the engine.")
