"""One turn on its way through a server: what it asks, what it got so far, and what became of it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pensieve.errors import PensieveError, RequestFailed, WorkerError, refused
from pensieve.record import Event, TurnRecord
from pensieve.request import Fork, Free, Length, Request, Sampling, TokenArray
from pensieve.server.conversations import Conversation, Mark

if TYPE_CHECKING:
    from pensieve.server.api import Server

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished turn. text: the reply, without the stop string that ended it. turn: its record (see TurnRecord), whose
    status is `completed`, or `cancelled` where it was cut short: the reply is then what there was until then."""

    token_ids: list[int]
    text: str
    turn: TurnRecord


@dataclass(slots=True, eq=False)
class Turn:
    """The listener of its request.

    prompt_of: makes the whole prompt of what the conversation holds when it is this turn's time. key_of: the name of all
    messages, from that of those before and the reply. on_event: called in the engine's thread with each token and with the
    end. cut: somebody has cancelled it. prompt, held (tokens of the conversation), key_before: as of its start.
    """

    server: Server
    conversation: Conversation
    id: int
    prompt_of: Callable[[TokenArray[int]], TokenArray[int]]
    output: Length | Free
    sampling: Sampling
    intended_s: float
    stops: tuple[str, ...] = ()
    key_of: Callable[[bytes | None, str], bytes | None] | None = None
    on_event: Callable[[Event], None] | None = None
    future: Future[Generation] = field(default_factory=Future)
    prompt: TokenArray[int] = field(default_factory=lambda: array("i"))
    held: int = 0
    key_before: bytes | None = None
    was_restored: bool = False
    record: TurnRecord | None = None
    mark: Mark | None = None
    cut: bool = False

    def request(self) -> Request:
        """To be asked when the turns before it have ended; from then on it is the conversation's running turn."""
        conversation = self.conversation
        self.held, self.key_before = len(conversation.tokens), conversation.key
        self.was_restored = conversation.restored
        self.prompt = self.prompt_of(conversation.tokens)
        conversation.asked += 1
        fork: Fork | None
        fork, conversation.fork = conversation.fork, None
        return Request(
            self.id,
            conversation.engine_name,
            conversation.asked,
            self.prompt,
            self.output,
            self.sampling,
            continues=False,
            intended_s=self.intended_s,
            fork=fork,
            tenant=conversation.tenant,
        )

    def happened(self, event: Event) -> None:
        if event.turn is not None:
            self.server._ended(self, event.turn)
        self._notify(event)

    def failed(self, error: WorkerError) -> None:
        self.server._failed(self, RequestFailed(str(error)), error)

    def generation(self, record: TurnRecord, text: str) -> Generation:
        return Generation(list(record.token_ids), text, record)

    def _notify(self, event: Event) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:  # whoever listened has gone: no reason to stop the engine, which serves others
            log.exception("the listener of request %s failed", self.id)

    def settle(self, generation: Generation | PensieveError, cause: BaseException | None = None) -> None:
        """Tell whoever waits; whoever gave up is not told."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(generation, Generation):
            self.future.set_result(generation)
        else:
            generation.__cause__ = cause
            self.future.set_exception(generation)


def error_of(record: TurnRecord) -> PensieveError | None:
    """Why the turn has no reply; None: it has one, if cut short by who asked."""
    if record.status == "refused":
        return refused(record.finish_reason, record.error or "The request was refused.")
    if record.status in ("completed", "cancelled"):
        return None
    return RequestFailed(record.error or f"The request ended as {record.status}.")
