"""An engine on the wall clock: a thread of its own drives it and its worker."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from pensieve.core.machine import CostModel
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request, TokenArray
from pensieve.errors import WorkerError
from pensieve.serve.record import Listener
from pensieve.serve.systems.base import Outbox
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, EngineSystem
from pensieve.serve.systems.profiling import profile_of

log = logging.getLogger(__name__)


_Command = tuple[Callable[[], None], Callable[[Exception], None] | None]
"""What to do in the engine's thread, and who is told there what that raised; None: nobody waits for it."""


_HANDOVER_S = 0.0003
"""For how long the engine's thread leaves the interpreter to those who pass a first token on. It would else plan the next
iteration first, or take the interpreter back whenever they write to a socket; its own pause costs that iteration as much,
once for all requests whose first token came with this one."""


class ThreadedSystem(EngineSystem):
    """`start` starts the thread that owns the engine, `close` ends it; submit, cancel, expect and forget reach it through
    an inbox, and what happened comes back through an outbox that `poll` reads, or through the listener of who began it. A
    command that raises fails alone: its request ends as failed, and the engine goes on. A crash of the thread surfaces in
    listeners, ask, poll and forget, as WorkerError. Any thread may call anything; one at a time polls.
    """

    def __init__(self, **parts: Any) -> None:
        """parts: as EngineSystem takes them, with a WallClock."""
        super().__init__(**parts)
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None: the end
        self._outbox = Outbox(self.clock, lambda: self._closed_or_crashed() if self._ended.done() else None)
        self._thread: threading.Thread | None = None
        self._ended: Future[None] = Future()  # of the thread, with what made it crash

    def submit(self, request: Request) -> None:
        self._outbox.expect(request.id)
        self.begin(request, self._outbox)

    def begin(self, request: Request, listener: Listener) -> None:
        assert self._thread is not None, "start() comes first"
        self._listeners[request.id] = listener
        self._send(lambda: self.engine.submit(request), lambda error: self.engine.failed(request, error))
        if self._ended.done():  # after it told the other listeners, or before: nobody else will tell this one
            self._listeners.fail(self._closed_or_crashed())

    def _send(self, run: Callable[[], None], failed: Callable[[Exception], None] | None = None) -> None:
        self._inbox.put((run, failed))

    def drive(self, awaited: Future[Any]) -> None:
        wait((awaited,))

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        self._send(lambda: self.engine.forget(session, tenant, left))

    def cancel(self, request_id: int, status: str) -> None:
        self._send(lambda: self.engine.cancel(request_id, status))

    def expect(self, session: str, next_use_s: float | None) -> None:
        """When the schedule will ask this conversation again; only an offline policy reads it."""
        self._send(lambda: self.engine.sessions.expect(session, next_use_s))

    def forget(self, session: str | None) -> None:
        """Returns when it is done, so that a cold cache is cold; a closed engine has forgotten everything."""
        assert self._thread is not None, "start() comes first"
        done: Future[None] = Future()

        def command() -> None:
            self.engine.forget(session)
            done.set_result(None)

        self._send(command, done.set_exception)
        wait((done, self._ended), return_when=FIRST_COMPLETED)
        if not done.done() and self._ended.exception() is not None:
            raise self._closed_or_crashed()
        if done.done() and (error := done.exception()) is not None:
            raise WorkerError(f"The engine could not forget: {error}") from error

    def poll(self, until_s: float | None) -> list[Event]:
        """Raises WorkerError once there is nothing more to tell and the engine has crashed or was closed."""
        return self._outbox.poll(until_s)

    def close(self) -> None:
        """Requests under way never finish; commands that came before are carried out."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
        if self._thread is None or self._ended.exception() is not None:
            self._worker.close()

    # -- the caller's side --------------------------------------------------------------------------------------------

    def _prices(self, report: StartReport) -> CostModel:
        size, model = self.chunk_tokens, self._model
        pool, transfers = self._gpu_blocks * size, min(self._cpu_blocks, self._gpu_blocks)
        where = {**report.settings, "model": model.name, "parameters": model.parameters}
        batch = self._scheduler_settings.max_batch_tokens
        found = profile_of(self._worker, self.clock, size, pool, model.max_context, transfers, where, batch)
        self._worker.forget()  # or whoever measures has filled tiers that nobody may ever need, and whoever knows has not
        return found

    def _begin(self) -> None:
        thread = threading.Thread(target=self._drive, name="pensieve-engine", daemon=True)
        thread.start()
        self._thread = thread

    def _closed_or_crashed(self) -> WorkerError:
        """Why the thread that has ended serves nobody."""
        crash = self._ended.exception()
        error = WorkerError(ENGINE_CLOSED if crash is None else f"The engine stopped: {crash}")
        error.__cause__ = crash
        return error

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            self._serve()
            self._worker.close()  # in the thread that drove it: a profiler belongs to its thread
        except BaseException as error:  # whoever polls must learn of it, whatever it is
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        self._listeners.fail(self._closed_or_crashed())
        self._outbox.put([])  # wakes a poll that waits

    def _serve(self) -> None:
        engine = self.engine
        while True:
            idle = not engine.busy and not engine.progressed
            while idle or not self._inbox.empty():
                try:
                    command = self._inbox.get(timeout=self._idle_s() if idle else None)
                except queue.Empty:
                    break  # a conversation's time is up: the step forgets it
                if command is None:
                    return
                run, failed = command
                try:
                    run()
                except Exception as error:  # no reason to stop the engine, which serves others
                    log.exception("A command failed; the engine goes on.")
                    if failed is not None:
                        failed(error)
                idle = False
            events = engine.step(None)
            begin = [self._listeners.get(event.request_id) for event in events if event.kind == "first_token"]
            self._listeners.tell(events)
            if any(listener is not None and listener.streams for listener in begin):
                time.sleep(_HANDOVER_S)
            assert engine.progressed or not engine.busy, "requests wait, and nothing runs that could let them in"

    def _idle_s(self) -> float | None:
        """For how long an idle engine has nothing to do; None: until a command comes."""
        expiry_ns = self.engine.sessions.next_expiry_ns
        if expiry_ns is None:
            return None
        return min(max(0, expiry_ns - self.clock.now_ns()) / 1e9, threading.TIMEOUT_MAX)
