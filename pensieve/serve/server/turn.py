"""One turn on its way through a server: what it asks, its text while that grows, and what became of it."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pensieve.core.event import Event
from pensieve.core.hint import Hint
from pensieve.core.request import Fork, Free, History, Length, Request, Sampling
from pensieve.core.stop import before_stop
from pensieve.errors import PensieveError, RequestFailed, WorkerError, refused
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Asked, Conversation, Mark

if TYPE_CHECKING:
    from pensieve.serve.server.api import Server

_CUT_AT = 64  # tokens that are decoded together before their front is given up
_KEPT = 8  # tokens behind that cut, decoded again with what follows: a tokenizer may join neighbours
_UNDECIDED = "\ufffd"


class TextStream:
    """`push` gives the text that can no longer change, `finish` the rest.

    A token may be half a character, whose text is then one replacement character at the end; and the text may end with the
    beginning of a stop string. Both are held back until the next token decides.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []  # not given up yet
        self._before = ""  # the text of what was given up
        self._told = 0  # characters that were handed out
        self._ended = False  # a stop string was found

    @property
    def text(self) -> str:
        """The whole text so far, with the part that is held back."""
        return before_stop(self._before + self._decode(self._ids), self._stops)

    def push(self, token: int) -> str:
        """The next token; returns what can be handed out now, possibly nothing."""
        self._ids.append(token)
        if self._ended:
            return ""
        whole = self._before + self._decode(self._ids)
        text = before_stop(whole, self._stops)
        if len(text) < len(whole):
            self._ended = True
            return self._hand_out(text)
        decided = whole[:-1] if whole.endswith(_UNDECIDED) else whole
        held = max((_overlap(decided, stop) for stop in self._stops), default=0)
        piece = self._hand_out(decided[: len(decided) - held])
        if len(self._ids) >= _CUT_AT:
            self._cut(whole)
        return piece

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._hand_out(self.text)

    def _hand_out(self, text: str) -> str:
        piece = text[self._told :]
        self._told = max(self._told, len(text))
        return piece

    def _cut(self, whole: str) -> None:
        """Give up the front, where the text of the rest is the end of the text of all."""
        kept = self._ids[-_KEPT:]
        end = self._decode(kept)
        if end and not end.startswith(_UNDECIDED) and whole.endswith(end):
            self._before, self._ids = whole[: len(whole) - len(end)], kept


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string may begin with."""
    for count in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0


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

    ask: what it asks of the conversation, once it is this turn's time. tools: that the prompt shows. fits: ask for fewer
    tokens than `output` says where there is no room for as many. on_event: called in the engine's thread with each token
    and with the end; on_end: called once, when `future` is done. A turn that ended has let go of all three, so that it and
    whoever waited for it are no cycle. hint: what the client says of the time after the reply; how long it wants the
    conversation kept is the conversation's. cut: somebody has cancelled it. asked, held (tokens of the conversation): as of
    its start.
    """

    server: Server
    conversation: Conversation
    id: int
    ask: Callable[[Conversation], Asked] | None
    output: Length | Free
    sampling: Sampling
    intended_s: float
    stops: tuple[str, ...] = ()
    tools: object = None
    fits: bool = False
    on_event: Callable[[Event], None] | None = None
    on_end: Callable[[], None] | None = None
    hint: Hint | None = None
    future: Future[Generation] = field(default_factory=Future)
    asked: Asked | None = None
    held: int = 0
    record: TurnRecord | None = None
    mark: Mark | None = None
    cut: bool = False

    def request(self) -> Request:
        """Make the request, once the turns before this one have ended; it is then the conversation's running turn."""
        conversation = self.conversation
        self.held = len(conversation.tokens)
        assert self.ask is not None, "a turn asks once"
        asked = self.asked = self.ask(conversation)
        self.ask = None
        if self.fits and isinstance(self.output, Free):
            room = max(1, self.server.most_tokens - len(asked.prompt))
            self.output = replace(self.output, max_new_tokens=min(self.output.max_new_tokens, room))
        conversation.asked += 1
        known = conversation.known(asked.prompt)
        history = History(known, "restarted" if conversation.restored else "kept") if known else None
        fork: Fork | None
        fork, conversation.fork = conversation.fork, None
        return Request(
            self.id,
            conversation.engine_name,
            conversation.asked,
            asked.prompt,
            self.output,
            self.sampling,
            intended_s=self.intended_s,
            fork=fork,
            history=history,
            tenant=conversation.tenant,
            hint=self._hint(),
        )

    def _hint(self) -> Hint | None:
        keep_s = self.conversation.keep_alive_s
        return self.hint if keep_s is None else replace(self.hint or Hint(), keep_s=keep_s)

    @property
    def streams(self) -> bool:
        return self.on_event is not None

    def happened(self, event: Event) -> None:
        told = self.on_event  # which the end lets go of
        if event.turn is not None:
            self.server._ended(self, event.turn)
        if told is not None:
            self._call(partial(told, event))

    def failed(self, error: WorkerError) -> None:
        self.server._over(self, RequestFailed(str(error)), error)

    def _call(self, listener: Callable[[], None]) -> None:
        try:
            listener()
        except Exception:  # whoever listened has gone: no reason to stop the engine, which serves others
            log.exception("the listener of request %s failed", self.id)

    def settle(self, generation: Generation | PensieveError, cause: BaseException | None = None) -> None:
        """Give the result to whoever waits, unless they have cancelled."""
        if not self.future.set_running_or_notify_cancel():
            pass
        elif isinstance(generation, Generation):
            self.future.set_result(generation)
        else:
            generation.__cause__ = cause
            self.future.set_exception(generation)
        ended, self.on_end, self.on_event, self.ask = self.on_end, None, None, None
        if ended is not None:
            self._call(ended)


class Stream:
    """The reply of one turn while it is generated: iterate over its text, piece by piece, once. `result` waits for the end,
    `cancel` brings it about."""

    def __init__(self, server: Server, stops: Sequence[str]) -> None:
        self._server = server
        self._text = TextStream(server.tokenizer.decode, stops)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        self.turn: Turn

    def on_event(self, event: Event) -> None:
        """Take an event of the turn; called in the engine's thread, as `on_end` is, once its future is done."""
        self._events.put(event)

    def on_end(self) -> None:
        self._events.put(None)

    def follow(self, turn: Turn) -> None:
        """Become the reply of this turn, whose listeners are this stream's."""
        self.turn = turn

    def __iter__(self) -> Iterator[str]:
        self._server.drive(self.turn.future)
        while (event := self._events.get()) is not None:
            if event.token is not None and (piece := self._text.push(event.token)):
                yield piece
        rest = self._text.finish()
        if rest:
            yield rest
        self.turn.future.result()  # raises what ended it

    def result(self) -> Generation:
        """The finished turn; raises as Server.generate does."""
        return self._server.wait(self.turn.future)

    def cancel(self) -> None:
        """End it now; what was generated so far stands."""
        self._server.cancel_turn(self.turn)


def error_of(record: TurnRecord) -> PensieveError | None:
    """Why the turn has no reply; None: it has one, if cut short by who asked."""
    if record.status == "refused":
        return refused(record.finish_reason, record.error or "The request was refused.")
    if record.status in ("completed", "cancelled"):
        return None
    return RequestFailed(record.error or f"The request ended as {record.status}.")
