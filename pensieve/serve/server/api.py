"""The server without HTTP: one call a turn, from any number of threads; and what happens to a turn on its way."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pensieve.core.request import Event, Free, Hint, History, Length, Request, Sampling, text_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, PensieveError, RequestFailed, WorkerError, refused
from pensieve.lab.compose.explain import explain_crash
from pensieve.serve.chat_template import ChatTemplate
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Asked, Conversation, Conversations, Mark, Message, message_keys
from pensieve.serve.systems.base import AnsweringSystem
from pensieve.serve.tokenizer import TextStream, Tokenizer, before_stop

if TYPE_CHECKING:
    from pensieve.serve.server.schemas import Tools

log = logging.getLogger(__name__)


def stops_of(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Stop strings as callers give them: one, several, or none at all (None or nothing in a list)."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    try:
        return tuple(stop)
    except TypeError as error:
        raise ConfigError(f"stop is a string or a list of strings, not {stop!r}.") from error


class Server:
    """A running engine that keeps conversations by name; thread-safe, a context manager.

    Calls from several threads are batched together; turns of one conversation are served in the order they came. The same
    conversation goes on where its last turn ended; from anywhere else, or while it is busy, another begins as it did (a
    fork). The HTTP server and the chat are clients of this object, so their conversations are its conversations.
    """

    def __init__(self, system: AnsweringSystem, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.system = system
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.conversations = Conversations(self._released)
        self.under_way = 0
        """Turns that run or wait."""
        self._observers: list[Callable[[Turn, TurnRecord], None]] = []
        self._seed = seed
        self._ids = itertools.count(1)
        counted = ("turns", "refused_turns", "failed_turns", *_COUNTED)
        self._totals: dict[str, float] = dict.fromkeys(counted, 0)
        self._lock = threading.Lock()  # of the totals
        self.report = system.start()
        settings = system.settings()
        self.vocab = int(settings["vocab"])
        self.most_tokens = min(int(settings["n_ctx"]), int(settings["request_tokens"]))
        """Of one request, prompt and reply together."""

    def sampling(self, temperature: float | None, top_p: float | None) -> Sampling:
        """How the replies of a chat are drawn. None: as the model's generation_config.json says, where that samples; else
        greedily (temperature 0)."""
        own = self.report.sampling
        return Sampling(own.temperature if temperature is None else temperature, own.top_p if top_p is None else top_p)

    def process_request(self, session_id: str, text: str, max_new_tokens: int = 128, **options: Any) -> str:
        """Send one message of a conversation and return the reply. `options` as of `generate`."""
        return self.generate(session_id, text=text, max_new_tokens=max_new_tokens, **options).text

    def generate(
        self, session_id: str, prompt_ids: Sequence[int] | None = None, *, text: str | None = None, **options: Any
    ) -> Generation:
        """Append a message (token ids, or text) to the conversation and generate.

        text: of a chat model one message of its user, in the model's template; of another model, what follows as it is.
        prompt_ids: whole numbers below the model's vocabulary, of Python or numpy; none at all asks to go on without a new
        message.

        Options: max_new_tokens (128), temperature (0.0: greedy), top_p (1.0), top_k (0: all), seed (of this reply, else the
        server's), stop (one string or several; None or () for none), ignore_eos (False), hint (when the conversation is
        expected to go on, which eviction policies may read).

        Raises CapacityError or ContextLengthError, or RequestRefused itself, for a request that can never be served,
        RequestFailed where the engine failed it, ConfigError for arguments that make no sense.
        """
        return self.wait(self.submit(session_id, prompt_ids, text=text, **options))

    def submit(
        self, session_id: str, prompt_ids: Sequence[int] | None = None, *, text: str | None = None, **options: Any
    ) -> Future[Generation]:
        """As `generate`, without waiting: a future of what that returns or raises. On a simulated machine time goes on while
        somebody waits in `wait`, `generate` or a stream."""
        turn = self.asking(**options)
        self.say(session_id, turn, prompt_ids, text)
        return turn.future

    def stream(
        self, session_id: str, prompt_ids: Sequence[int] | None = None, *, text: str | None = None, **options: Any
    ) -> Stream:
        """As `generate`; the reply comes piece by piece."""
        stream = Stream(self.asking(**options))
        self.say(session_id, stream.turn, prompt_ids, text)
        return stream

    def cancel(self, session_id: str) -> int:
        """End the turns of a conversation that run or wait; returns how many there were. What a running one has generated
        stands, and is its result, with status `cancelled`."""
        known = self.conversations.find("", session_id)
        turns = [] if known is None else known.turns
        for turn in turns:
            turn.cancel()
        return len(turns)

    def wait(self, future: Future[Generation]) -> Generation:
        """The result of a future that `submit` returned."""
        try:
            self.drive(future)
            return future.result()
        except WorkerError as error:
            raise RequestFailed(explain_crash(error)) from error

    def drive(self, future: Future[Any]) -> None:
        """On a simulated machine: let time go on until this future is done. On a real one nobody has to."""
        if self.system.clock.virtual:
            self.system.drive(future)

    def forget(self, session_id: str | None = None) -> None:
        """Free a conversation, or all of them, but for those that have a turn under way."""
        if session_id is None:
            self.conversations.clear()
            self.system.forget(None)
            return
        known = self.conversations.find("", session_id)
        if known is not None and known.idle:
            self.conversations.remove(known)
            self.system.forget(known.engine_name)  # returns when it is done, so that a cold cache is cold

    def get_statistics(self) -> dict[str, Any]:
        """Counts since start: turns, tokens, hits by tier, evictions, bytes moved, and what the engine is.

        turns counts all; refused_turns could never be served, failed_turns could have been.
        """
        with self._lock:
            totals = dict(self._totals)
        history = totals["history_tokens"]
        shares = {rate: totals[tokens] / history if history else None for rate, tokens in _RATES.items()}
        return {**totals, **shares, **self.system.counters(), "engine": self.system.settings()}

    def get_statistics_str(self) -> str:
        """The same for people, a few lines."""
        s = self.get_statistics()
        engine = s["engine"]

        def share(name: str) -> str:
            return "none yet" if s[name] is None else f"{100 * s[name]:.1f} %"

        return (
            f"{engine['baseline']} on {engine['device']}, {engine['dtype']}, weights {engine['weights']}: "
            f"GPU tier {engine['gpu_tokens']:,} tokens, CPU tier {engine['cpu_tokens']:,} tokens\n"
            f"{s['turns']:.0f} turns, {s['output_tokens']:.0f} tokens generated, {s['failed_turns']:.0f} turns failed, "
            f"{s['refused_turns']:.0f} refused\n"
            f"history tokens {s['history_tokens']:.0f}: GPU hit {share('gpu_hit_rate')}, "
            f"CPU hit {share('cpu_hit_rate')}, disk hit {share('disk_hit_rate')}, recomputed {share('miss_rate')}\n"
            f"chunks evicted {s['evicted_chunks']:.0f}, dropped {s['dropped_chunks']:.0f}; "
            f"{s['swapped_in_bytes'] / 1e6:.1f} MB swapped in, {s['swapped_out_bytes'] / 1e6:.1f} MB out"
        )

    def close(self) -> None:
        """Stop the engine; requests under way end with RequestFailed."""
        self.system.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for those who serve and show it -------------------------------------------------------------------------------

    def observe(self, observer: Callable[[Turn, TurnRecord], None]) -> None:
        """Have it called, in the engine's thread, with every turn that ended."""
        self._observers.append(observer)

    def moment(self, clock_s: float) -> float:
        """A time of the engine's clock as seconds since 1970."""
        return time.time() - (self.system.clock.now_s() - clock_s)

    def places(self, conversation: Conversation) -> str:
        """Where each chunk of its KV is, a letter each, see CacheManager.places."""
        return self.system.places(conversation.engine_name)

    def end_session(self, tenant: str, name: str) -> bool:
        """Cancel its turns and free it; False where there is none. Waits for turns to end: not for the engine's thread."""
        known = self.conversations.find(tenant, name)
        if known is None:
            return False
        while True:
            with self.conversations.lock:
                turns = known.turns
                if not turns:
                    self.conversations.remove(known)
                    return True
            for turn in turns:
                turn.cancel()
            for turn in turns:
                self.drive(turn.future)
                wait((turn.future,))

    def turn(self, output: Length | Free, sampling: Sampling, **options: Any) -> Turn:
        """A turn that has not begun. options: further fields of Turn."""
        return Turn(self, next(self._ids), output, sampling, self.system.clock.now_s(), **options)

    def asking(
        self,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        ignore_eos: bool = False,
        hint: Hint | None = None,
    ) -> Turn:
        """A turn with the options of `generate`."""
        stops = stops_of(stop)
        output = Length(max_new_tokens) if ignore_eos and not stops else Free(max_new_tokens, stops, ignore_eos)
        sampling = Sampling(temperature, top_p, top_k, self._seed if seed is None else seed)
        return self.turn(output, sampling, hint=hint)

    def say(
        self, session_id: str, turn: Turn, prompt_ids: Sequence[int] | None = None, text: str | None = None
    ) -> None:
        """Begin a turn with this message behind all that the conversation of this name holds; a new one holds nothing."""
        if (prompt_ids is None) == (text is None):
            raise ConfigError("Give either prompt_ids or text.")
        if prompt_ids is not None:
            self.conversations.complete(turn, "", session_id, prompt_ids, whole=False)
        elif self.template.plain:
            self.conversations.complete(turn, "", session_id, text_of(text, "text"), whole=False)
        else:
            said = {"role": "user", "content": text_of(text, "text")}
            self.conversations.chat(turn, "", session_id, [said], whole=False)

    def _released(self, conversation: Conversation) -> None:
        left = conversation.tokens if conversation.begun else None  # what a fork began with is its parent's
        self.system.release(conversation.engine_name, conversation.tenant, left)

    def tell(self, turn: Turn, record: TurnRecord) -> None:
        """Count a turn that ended, and tell those who observe; called in the engine's thread."""
        with self._lock:
            self._totals["turns"] += 1
            self._totals["refused_turns"] += record.status == "refused"
            self._totals["failed_turns"] += record.status not in ("completed", "cancelled", "refused")
            for name in _COUNTED:
                self._totals[name] += getattr(record, name) or 0
        for observer in self._observers:
            observer(turn, record)

    def stops(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """Of a chat: those of the client, and where the model would go on for the user."""
        return stops + _PLAIN_STOPS if self.template.plain else stops


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
    engine's thread with each token, and with None once `future` is done. A turn that ended has let go of it, so that it and
    whoever waited for it are no cycle. cut: somebody has cancelled it. asked, held (tokens of the conversation): as
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
    on_event: Callable[[Event | None], None] | None = None
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

    def asks(self, messages: list[Message], replies: dict[int, list[int]] | None = None) -> Asked:
        """What it asks with these messages, all of them. replies: the model's own tokens of some of them, by place."""
        replies = replies or {}
        prompt = self.server.template.prompt(messages, replies, self.tools)
        return Asked(array("i", prompt), messages, replies)

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
            self._tell(event)

    def failed(self, error: WorkerError) -> None:
        failure = RequestFailed(str(error))
        failure.__cause__ = error
        self._over(failure)

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
        what: Generation | PensieveError
        if record.status == "refused":
            what = refused(record.finish_reason, record.error or "The request was refused.")
        elif record.status not in ("completed", "cancelled"):
            what = RequestFailed(record.error or f"The request ended as {record.status}.")
        else:
            text = self.server.tokenizer.decode(record.token_ids)
            text = before_stop(text, self.stops) if record.finish_reason == "stop" else text
            what = Generation(list(record.token_ids), text, record)
            if record.stands:
                self._keep(record, text)
        self.server.tell(self, record)
        self._over(what)

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

    def _over(self, what: Generation | PensieveError) -> None:
        """Free its conversation for the next turn, and give up one that never came to anything."""
        conversation, conversations = self.conversation, self.server.conversations
        with conversations.lock:  # before who waits is told: its next request finds the conversation idle
            self.server.under_way -= 1
            following = conversation.waiting.popleft() if conversation.waiting else None
            conversation.running = following
            if following is None and not conversation.begun:
                conversations.remove(conversation)
        self._settle(what)
        if following is not None:
            following._start()

    def _settle(self, what: Generation | PensieveError) -> None:
        """Give the result to whoever waits, unless they have cancelled."""
        if self.future.set_running_or_notify_cancel():
            if isinstance(what, Generation):
                self.future.set_result(what)
            else:
                self.future.set_exception(what)
        if self.on_event is not None:
            self._tell(None)
        self.on_event = self.ask = None

    def _tell(self, event: Event | None) -> None:
        assert self.on_event is not None
        try:
            self.on_event(event)
        except Exception:  # whoever listened has gone: no reason to stop the engine, which serves others
            log.exception("the listener of request %s failed", self.id)


class Stream:
    """The reply of one turn, which has not begun, while it is generated: iterate over its text, piece by piece, once.
    `result` waits for the end, `cancel` brings it about."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._text = TextStream(turn.server.tokenizer.decode, turn.stops)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        turn.on_event = self.on_event

    def on_event(self, event: Event | None) -> None:
        """See Turn; called in the engine's thread."""
        self._events.put(event)

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


_PLAIN_STOPS = ("\nUser:",)  # where a model without a template begins to speak for the user
_RATES = {
    "gpu_hit_rate": "gpu_hit_tokens",
    "cpu_hit_rate": "cpu_hit_tokens",
    "disk_hit_rate": "disk_hit_tokens",
    "miss_rate": "recomputed_tokens",
}
_COUNTED = ("output_tokens", "prompt_tokens", "history_tokens", *_RATES.values(), "new_tokens")
