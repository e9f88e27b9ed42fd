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
from pensieve.errors import EngineFailed, RequestFailed, RequestRefused, WorkerError
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

    def __init__(self, engine: OutsideEngine, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or WallClock()
        self.can = engine.can
        self._engine = engine
        self._said = Transcripts()
        self.heard = Heard()
        self._live: dict[int, _Exchange] = {}
        self._outbox = Outbox(self.clock, lambda: self._ended)
        self._threads: ThreadPoolExecutor | None = None
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
        self._threads = ThreadPoolExecutor(self._engine.at_once, thread_name_prefix="outside-engine")
        return report

    def submit(self, request: Request) -> None:
        assert self._threads is not None, "start() comes first"
        exchange = _Exchange(self, request)
        with self._lock:
            self._outbox.expect(request.id)
            self._live[request.id] = exchange
        self._threads.submit(self._serve, exchange)

    def cancel(self, request_id: int, status: str) -> None:
        exchange = self._live.get(request_id)
        if exchange is not None:
            exchange.cancelled_as = status

    def poll(self, until_s: float | None) -> list[Event]:
        """Raises WorkerError once there is nothing more to tell and the engine has crashed or was closed."""
        return self._outbox.poll(until_s)

    def forget(self, session: str | None) -> None:
        """Raises ConfigError where the engine cannot."""
        self._said.forget(session)
        self._engine.forget(session)

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
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    # -- how ----------------------------------------------------------------------------------------------------------

    def tell(self, events: list[Event]) -> None:
        self._outbox.put(events)

    def _end(self, error: WorkerError) -> None:
        self._ended = self._ended or error
        self._outbox.put([])  # wakes a poll that waits

    def _serve(self, exchange: _Exchange) -> None:
        """One request from its thread to its record; whoever polls learns of everything."""
        request = exchange.request
        try:
            _refuse_unsupported(request)
            reply = self._engine.answer(request, exchange)
        except RequestRefused as error:
            exchange.close("refused", error.reason, str(error))
        except RequestFailed as error:
            exchange.close("failed", error.reason, str(error))
        except Exception as error:
            if exchange.cancelled:
                exchange.close("failed", None, str(error))
            else:
                said = str(error) if isinstance(error, EngineFailed) else f"The engine's adapter stopped: {error!r}"
                crash = WorkerError(said)
                crash.__cause__ = error
                self._end(crash)
                return
        else:
            exchange.reply(reply)
        del self._live[request.id]
        turn = exchange.turn
        self.heard.hears(request.session, request.prompt + turn.token_ids)
        self._said.note(request, turn)
        assert turn.finished_s is not None
        self.tell([Event("finished", request.id, turn.finished_s, turn=turn)])

    def own_time(self, perf_s: float) -> float:
        """A reading of time.perf_counter, which all processes of a machine share, by this system's clock."""
        return perf_s - self._offset_s

    def history_of(self, request: Request) -> int:
        return self._said.history_of(request)


class _Exchange:
    """One request on its way through an engine: the Channel it tells tokens to."""

    def __init__(self, system: OutsideSystem, request: Request) -> None:
        self._system, self.request = system, request
        now_s = system.clock.now_s()
        self.turn = turn = TurnRecord.arrived(request, request.turn, now_s)
        turn.h2d_bytes = turn.d2h_bytes = None  # nobody here counts what an outside engine copies
        self._prompt, self._history = len(request.prompt), system.history_of(request)
        self._own = system.heard.of_session(request.session, request.prompt)
        system.heard.hears(request.session, request.prompt)
        self.cancelled_as: str | None = None

    @property
    def cancelled(self) -> bool:
        return self.cancelled_as is not None

    def tell(self, *tokens: int, at_s: float | None = None) -> bool:
        now_s = self._system.clock.now_s() if at_s is None else self._system.own_time(at_s)
        if not self.cancelled:
            events = []
            for token in tokens:
                kind = "token" if self.turn.token_ids else "first_token"
                self.turn.token(token, None, now_s)
                events.append(Event(kind, self.request.id, now_s, token=token))  # type: ignore[arg-type]
            if events:
                self._system.tell(events)
        return not self.cancelled

    def reply(self, reply: Reply) -> None:
        """The engine is done with it."""
        turn, now_s = self.turn, self._system.clock.now_s()
        if reply.tokens is not None and not self.cancelled:
            one = len(reply.tokens) == 1  # a reply of one token is its first token
            told = array("d", [now_s] if one else [])
            if reply.emitted_s is not None:
                told = array("d", (self._system.own_time(at_s) for at_s in reply.emitted_s))
            turn.generated(reply.tokens, told, None)
        if reply.admitted_s is not None:
            turn.admitted_s = self._system.own_time(reply.admitted_s)
        turn.compute_ms, turn.transfer_ms = reply.compute_ms, reply.transfer_ms
        turn.sent_bytes, turn.received_bytes = reply.sent_bytes, reply.received_bytes
        turn.prompt_tokens, turn.history_tokens = self._prompt, self._history
        turn.new_tokens = self._prompt - self._history
        if reply.cached_tokens is not None:
            hits = min(reply.cached_tokens, self._history)
            if reply.cached_on_host is not None:
                turn.cpu_hit_tokens = min(reply.cached_on_host, hits)
            turn.gpu_hit_tokens = hits - (turn.cpu_hit_tokens or 0)
            turn.shared_hit_tokens = reply.cached_tokens - hits
            turn.recomputed_tokens = self._history - hits
            turn.unexplained_tokens = self._unexplained(reply.cached_tokens, reply.prompt_tokens)
        asked = self.request.output
        short = isinstance(asked, Length) and len(turn.token_ids) < asked.tokens
        if short and not self.cancelled:
            self.close(
                "failed",
                "context",
                f"The engine ended after {len(turn.token_ids)} of {asked.max_new_tokens} tokens "
                f"({reply.finish_reason}); give its sequences more room.",
            )
        else:
            self.close("completed", reply.finish_reason, None)

    def _unexplained(self, cached: int, prompt: int | None) -> int:
        """Of the tokens that it had cached, those beyond all that this system was asked or answered before. What a server
        puts around a prompt is in none of its prompts here, and in all of them there. History need not be a prefix: a server
        that reuses by content finds it wherever it stands."""
        around = max(0, (prompt or 0) - self._prompt)
        said = max(self._own, self._history)
        if cached - around <= said:
            return 0
        others = self._system.heard.of_others(self.request.session, self.request.prompt)
        return max(0, cached - around - max(said, others))

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


class Heard:
    """What an engine of others was asked and has answered in this trial, since no more of a prompt can be in a cache that
    was cold: the texts of each conversation, of which none begins with another. Any number of threads ask."""

    def __init__(self) -> None:
        self._texts: dict[str, list[TokenArray[int]]] = {}
        self._lock = threading.Lock()

    def hears(self, session: str, text: TokenArray[int]) -> None:
        """A prompt as soon as it is sent, whatever becomes of it, and again with its answer."""
        with self._lock:
            known = self._texts.get(session, [])
            if all(one[: len(text)] != text for one in known):
                self._texts[session] = [*(one for one in known if one != text[: len(one)]), text]

    def of_session(self, session: str, prompt: TokenArray[int]) -> int:
        """How many leading tokens of the prompt this conversation has said."""
        return _longest(prompt, self._texts.get(session, ()))

    def of_others(self, session: str, prompt: TokenArray[int]) -> int:
        """How many leading tokens of the prompt any other one has said."""
        with self._lock:
            others = [text for name, texts in self._texts.items() if name != session for text in texts]
        return _longest(prompt, others)


def _longest(prompt: TokenArray[int], texts: list[TokenArray[int]] | tuple[()]) -> int:
    return max((common_prefix(prompt, text) for text in texts), default=0)
