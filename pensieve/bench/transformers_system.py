"""transformers' continuous batching as a System, so that a replay drives it like any other: a peer for the serve bench."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import transformers

from pensieve.baselines.base import Capabilities
from pensieve.bench.peers import continuous_batching
from pensieve.clock import Clock, WallClock
from pensieve.errors import WorkerError
from pensieve.plan import StartReport
from pensieve.record import Event, TurnRecord
from pensieve.request import Request

_WAKE_S = 0.25


class TransformersSystem:
    """generate_batch's engine, sized by hand. It keeps no sessions: each turn sends the whole conversation, and what it
    shares of full prefix blocks it does by itself and does not report.

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
        raise AssertionError("it cannot cancel, and says so")

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
