"""One turn on its way through a server: what it asks, its text while that grows, and what became of it."""

from __future__ import annotations

import logging
import queue
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pensieve.core.request import Event, Free, Hint, History, Length, Request, Sampling
from pensieve.core.session import common_prefix
from pensieve.core.stop import before_stop
from pensieve.errors import PensieveError, RequestFailed, WorkerError, refused
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Asked, Conversation, Mark, message_keys

if TYPE_CHECKING:
    from pensieve.serve.server.api import Server
    from pensieve.serve.server.schemas import Tools

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished turn. text: the reply, without the stop string that ended it. turn: its record (see TurnRecord), whose
    status is `completed`, or `cancelled` where it was cut short: the reply is then what there was until then."""

    token_ids: list[int]
    text: str
    turn: TurnRecord


@dataclass(slots=True, eq=False)
class Turn:
    """From what is asked to what became of it; the listener of its request.

    tools: that the prompt shows. fits: ask for fewer tokens than `output` says where there is no room for as many. hint: what
    the client says of the time after the reply. keep_alive_s: of its conversation, from now on. on_event: called in the
    engine's thread with each token; on_end: called once, when `future` is done. A turn that ended has let go of both, so that
    it and whoever waited for it are no cycle. cut: somebody has cancelled it. asked, held (tokens of the conversation): as
    of its start.
    """

    server: Server
    id: int
    output: Length | Free
    sampling: Sampling
    intended_s: float
    tools: Tools | None = None
    fits: bool = False
    hint: Hint | None = None
    keep_alive_s: float | None = None
    on_event: Callable[[Event], None] | None = None
    on_end: Callable[[], None] | None = None
    future: Future[Generation] = field(default_factory=Future)
    conversation: Conversation = field(init=False)
    ask: Asked | Callable[[Conversation], Asked] | None = field(init=False, default=None)
    asked: Asked | None = None
    held: int = 0
    record: TurnRecord | None = None
    mark: Mark | None = None
    cut: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return self.output.stop if isinstance(self.output, Free) else ()

    def begin(self, conversation: Conversation, ask: Asked | Callable[[Conversation], Asked]) -> None:
        """Serve it once the earlier turns of its conversation have ended. ask: what it asks, or what says so then."""
        self.conversation, self.ask = conversation, ask
        if self.keep_alive_s is not None:
            conversation.keep_alive_s = self.keep_alive_s
        with self.server.conversations.lock:
            self.server.under_way += 1
            if conversation.running is not None:
                conversation.waiting.append(self)
                return
            conversation.running = self
        self._start()

    def cancel(self) -> None:
        """End it now. What a running one has generated stands; one that waits has generated nothing."""
        with self.server.conversations.lock:
            self.cut = True
            waits = self in self.conversation.waiting
            if waits:
                self.conversation.waiting.remove(self)
                self.server.under_way -= 1
        if waits:
            record = TurnRecord(self.conversation.engine_name, 0, status="cancelled", intended_s=self.intended_s)
            self._settle(Generation([], "", record))
        else:
            self.server.system.cancel(self.id, "cancelled")

    # -- the listener of its request ----------------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        return self.on_event is not None

    def happened(self, event: Event) -> None:
        if event.turn is not None:
            self._ended(event.turn)
        elif self.on_event is not None:
            self._call(partial(self.on_event, event))

    def failed(self, error: WorkerError) -> None:
        self._over(RequestFailed(str(error)), error)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Submit it, as the running turn of its conversation."""
        try:
            request = self._request()
        except PensieveError as error:
            self._over(error)
            return
        self.server.system.begin(request, self)
        if self.cut:  # before the engine knew of it
            self.server.system.cancel(self.id, "cancelled")

    def _request(self) -> Request:
        conversation, ask = self.conversation, self.ask
        assert ask is not None, "a turn asks once"
        self.held, self.ask = len(conversation.tokens), None
        asked = self.asked = ask(conversation) if callable(ask) else ask
        if self.fits and isinstance(self.output, Free):
            room = max(1, self.server.most_tokens - len(asked.prompt))
            self.output = replace(self.output, max_new_tokens=min(self.output.max_new_tokens, room))
        conversation.asked += 1
        known, keep_s = conversation.known(asked.prompt), conversation.keep_alive_s
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
            history=History(known, "restarted" if conversation.restored else "kept") if known else None,
            tenant=conversation.tenant,
            hint=self.hint if keep_s is None else replace(self.hint or Hint(), keep_s=keep_s),
        )

    def _ended(self, record: TurnRecord) -> None:
        self.record = record
        error = error_of(record)
        generation = None
        if error is None:
            text = self.server.tokenizer.decode(record.token_ids)
            text = before_stop(text, self.stops) if record.finish_reason == "stop" else text
            generation = Generation(list(record.token_ids), text, record)
            if record.stands:
                self._keep(record, text)
        self.server.tell(self, record)
        self._over(generation or error)

    def _keep(self, record: TurnRecord, text: str) -> None:
        """The conversation is what was asked and answered. A stop string is no part of it."""
        stopped = record.finish_reason == "stop"
        encode, literal = self.server.tokenizer.encode, self.server.tokenizer.literal
        reply = array("i", encode(literal(text), marked=True)) if stopped else record.token_ids
        assert self.asked is not None
        asked, messages, key = self.asked, None, None
        replies = dict(asked.replies)
        if asked.messages is not None:
            if not stopped:  # else the template encodes what was told of it
                replies[len(asked.messages)] = list(reply)
            messages = [*asked.messages, {"role": "assistant", "content": text}]
            key = message_keys(messages, self.tools)[-1]
        tokens = asked.prompt + reply
        before = min(self.held, len(asked.prompt))
        ended = record.finish_reason == "eos"  # by a token that a template may write in its own way
        self.mark = Mark(len(tokens) - ended, record, before, len(messages or ()), key)
        said = common_prefix(reply, record.token_ids[:-1])  # the last token of a turn has no KV
        computed = len(asked.prompt) + said
        self.server.conversations.settle(self.conversation, tokens, self.mark, computed, messages, replies)

    def _over(self, what: Generation | PensieveError | None, cause: BaseException | None = None) -> None:
        """Free its conversation for the next turn, and give up one that never came to anything."""
        assert what is not None
        conversation, conversations = self.conversation, self.server.conversations
        with conversations.lock:  # before who waits is told: its next request finds the conversation idle
            self.server.under_way -= 1
            following = conversation.waiting.popleft() if conversation.waiting else None
            conversation.running = following
            if following is None and not conversation.begun:
                conversations.remove(conversation)
        self._settle(what, cause)
        if following is not None:
            following._start()

    def _settle(self, what: Generation | PensieveError, cause: BaseException | None = None) -> None:
        """Give the result to whoever waits, unless they have cancelled."""
        if not self.future.set_running_or_notify_cancel():
            pass
        elif isinstance(what, Generation):
            self.future.set_result(what)
        else:
            what.__cause__ = cause
            self.future.set_exception(what)
        ended, self.on_end, self.on_event, self.ask = self.on_end, None, None, None
        if ended is not None:
            self._call(ended)

    def _call(self, listener: Callable[[], None]) -> None:
        try:
            listener()
        except Exception:  # whoever listened has gone: no reason to stop the engine, which serves others
            log.exception("the listener of request %s failed", self.id)


class Stream:
    """The reply of one turn, which has not begun, while it is generated: iterate over its text, piece by piece, once.
    `result` waits for the end, `cancel` brings it about."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._text = TextStream(turn.server.tokenizer.decode, turn.stops)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        turn.on_event, turn.on_end = self.on_event, self.on_end

    def on_event(self, event: Event) -> None:
        """Take an event of the turn; called in the engine's thread, as `on_end` is, once its future is done."""
        self._events.put(event)

    def on_end(self) -> None:
        self._events.put(None)

    def __iter__(self) -> Iterator[str]:
        self.turn.server.drive(self.turn.future)
        while (event := self._events.get()) is not None:
            if event.token is not None and (piece := self._text.push(event.token)):
                yield piece
        rest = self._text.finish()
        if rest:
            yield rest
        self.turn.future.result()  # raises what ended it

    def result(self) -> Generation:
        """The finished turn; raises as Server.generate does."""
        return self.turn.server.wait(self.turn.future)

    def cancel(self) -> None:
        """End it now; what was generated so far stands."""
        self.turn.cancel()


def error_of(record: TurnRecord) -> PensieveError | None:
    """Why the turn has no reply; None: it has one, if cut short by who asked."""
    if record.status == "refused":
        return refused(record.finish_reason, record.error or "The request was refused.")
    if record.status in ("completed", "cancelled"):
        return None
    return RequestFailed(record.error or f"The request ended as {record.status}.")
