"""The programmatic server: one call a turn, from any number of threads."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

from pensieve.core.event import Event
from pensieve.core.hint import Hint
from pensieve.core.request import Free, Length, Sampling, stops_of, text_of, tokens_of
from pensieve.core.session import common_prefix
from pensieve.core.stop import before_stop
from pensieve.errors import ConfigError, PensieveError, RequestFailed, WorkerError
from pensieve.lab.compose.explain import explain_crash
from pensieve.serve.chat_template import ChatTemplate
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Asked, Conversation, Conversations, Mark, message_keys, session_name
from pensieve.serve.server.turn import Generation, Stream, Turn, error_of
from pensieve.serve.systems.base import AnsweringSystem
from pensieve.serve.tokenizer import Tokenizer

_ARGUMENTS = {
    "cache.gpu": "gpu_cache",
    "cache.cpu": "cpu_cache",
    "cache.disk": "disk_cache",
    "hardware.device": "device",
    "model.weights": "weights",
}
"""What a field of the configuration is called by the callers of create_server, whom a sentence about it must tell."""


class Server:
    """A running engine that keeps conversations by name; thread-safe, a context manager.

    Calls from several threads are batched together; turns of one conversation are served in the order they came. The HTTP
    server and the chat are clients of this object, so their conversations are its conversations.
    """

    def __init__(
        self,
        system: AnsweringSystem,
        tokenizer: Tokenizer,
        seed: int = 0,
    ) -> None:
        self.system = system
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.conversations = Conversations(self._released)
        self._observers: list[Callable[[Turn, TurnRecord], None]] = []
        self._seed = seed
        self._ids = itertools.count(1)
        self._under_way: dict[int, Turn] = {}
        counted = ("turns", "output_tokens", "refused_turns", "failed_turns", *_COUNTED)
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
        return self._begin(session_id, prompt_ids, text, **options).future

    def stream(
        self, session_id: str, prompt_ids: Sequence[int] | None = None, *, text: str | None = None, **options: Any
    ) -> Stream:
        """As `generate`; the reply comes piece by piece."""
        stream = Stream(self, stops_of(options.get("stop")))
        stream.follow(self._begin(session_id, prompt_ids, text, stream.on_event, stream.on_end, **options))
        return stream

    def cancel(self, session_id: str) -> int:
        """End the turns of a conversation that run or wait; returns how many there were. What a running one has generated
        stands, and is its result, with status `cancelled`."""
        known = self.conversations.find("", session_id)
        turns = [turn for turn in list(self._under_way.values()) if turn.conversation is known]
        for turn in turns:
            self.cancel_turn(turn)
        return len(turns)

    def wait(self, future: Future[Generation]) -> Generation:
        """The result of a future that `submit` returned."""
        try:
            self.drive(future)
            return future.result()
        except WorkerError as error:
            raise RequestFailed(explain_crash(error)) from error
        except PensieveError as error:
            error.args = (as_arguments(str(error)),)
            raise

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
                turns = [turn for turn in self._under_way.values() if turn.conversation is known]
                if not turns and known.idle:
                    self.conversations.remove(known)
                    return True
            for turn in turns:
                self.cancel_turn(turn)
            for turn in turns:
                self.drive(turn.future)
                wait((turn.future,))

    # -- turns --------------------------------------------------------------------------------------------------------

    def turn(
        self,
        conversation: Conversation,
        ask: Callable[[Conversation], Asked],
        output: Length | Free,
        sampling: Sampling,
        **options: Any,
    ) -> Turn:
        """A turn that has not begun. options: further fields of Turn."""
        stops = output.stop if isinstance(output, Free) else ()
        now_s = self.system.clock.now_s()
        return Turn(self, conversation, next(self._ids), ask, output, sampling, now_s, stops, **options)

    def begin(self, turn: Turn) -> None:
        """Serve it once the turns of its conversation that came before have ended."""
        conversation = turn.conversation
        with self.conversations.lock:
            self._under_way[turn.id] = turn
            if conversation.running is not None:
                conversation.waiting.append(turn)
                return
            conversation.running = turn
        self._start(turn)

    def cancel_turn(self, turn: Turn) -> None:
        with self.conversations.lock:
            turn.cut = True
            waits = turn in turn.conversation.waiting
            if waits:
                turn.conversation.waiting.remove(turn)
        if waits:
            self._never_started(turn)
        else:
            self.system.cancel(turn.id, "cancelled")

    @property
    def under_way(self) -> int:
        """Turns that run or wait."""
        return len(self._under_way)

    def _begin(
        self,
        session_id: str,
        prompt_ids: Sequence[int] | None,
        text: str | None,
        on_event: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] | None = None,
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
        if (prompt_ids is None) == (text is None):
            raise ConfigError("Give either prompt_ids or text.")
        ask = self._appending(prompt_ids, text)
        stops = stops_of(stop)
        output = Length(max_new_tokens) if ignore_eos and not stops else Free(max_new_tokens, stops, ignore_eos)
        sampling = Sampling(temperature, top_p, top_k, self._seed if seed is None else seed)
        with self.conversations.lock:
            conversation = self.conversations.find("", session_name(session_id))
            if conversation is None:
                conversation = self.conversations.open("", session_id)
            turn = self.turn(conversation, ask, output, sampling, on_event=on_event, on_end=on_end, hint=hint)
            self.begin(turn)
        return turn

    def _appending(self, prompt_ids: Sequence[int] | None, text: str | None) -> Callable[[Conversation], Asked]:
        """What asks for the conversation and this message behind it."""
        if prompt_ids is not None:
            ids = tokens_of(prompt_ids, self.vocab)
        elif self.template.plain:
            begin = array("i", self.tokenizer.begin)
            ids = tokens_of(self.tokenizer.encode(text_of(text, "text")), self.vocab)
            return lambda held: Asked((held.tokens or begin) + ids)
        else:
            said, template = text_of(text, "text"), self.template

            def chat(held: Conversation) -> Asked:
                known = held.tokens
                return Asked(
                    known + array("i", template.following(said, known[-1]) if known else template.opening(said))
                )

            return chat
        return lambda held: Asked(held.tokens + ids)

    def _start(self, turn: Turn) -> None:
        """Submit the turn, as the running one of its conversation."""
        try:
            request = turn.request()
        except PensieveError as error:
            self._over(turn, error)
            return
        self.system.begin(request, turn)
        if turn.cut:  # before the engine knew of it
            self.system.cancel(turn.id, "cancelled")

    def _released(self, conversation: Conversation) -> None:
        left = conversation.tokens if conversation.begun else None  # what a fork began with is its parent's
        self.system.release(conversation.engine_name, conversation.tenant, left)

    def _ended(self, turn: Turn, record: TurnRecord) -> None:
        """Finish a turn with its record; called in the engine's thread."""
        turn.record = record
        self._count(record)
        error = error_of(record)
        generation = None
        if error is None:
            text = self.tokenizer.decode(record.token_ids)
            text = before_stop(text, turn.stops) if record.finish_reason == "stop" else text
            generation = Generation(list(record.token_ids), text, record)
            if record.stands:
                self._keep(turn, generation)
        for observer in self._observers:
            observer(turn, record)
        self._over(turn, generation or error)

    def _keep(self, turn: Turn, generation: Generation) -> None:
        """The conversation is what was asked and answered. A stop string is no part of it."""
        conversation, record = turn.conversation, generation.turn
        stopped = record.finish_reason == "stop"
        encode, literal = self.tokenizer.encode, self.tokenizer.literal
        reply = array("i", encode(literal(generation.text), marked=True)) if stopped else record.token_ids
        assert turn.asked is not None
        asked, messages, key = turn.asked, None, None
        replies = dict(asked.replies)
        if asked.messages is not None:
            if not stopped:  # else the template encodes what was told of it
                replies[len(asked.messages)] = list(reply)
            messages = [*asked.messages, {"role": "assistant", "content": generation.text}]
            key = message_keys(messages, turn.tools)[-1]
        tokens = asked.prompt + reply
        before = min(turn.held, len(asked.prompt))
        ended = record.finish_reason == "eos"  # by a token that a template may write in its own way
        turn.mark = Mark(len(tokens) - ended, record, before, len(messages or ()), key)
        said = common_prefix(reply, record.token_ids[:-1])  # the last token of a turn has no KV
        self.conversations.settle(conversation, tokens, turn.mark, len(asked.prompt) + said, messages, replies)

    def _never_started(self, turn: Turn) -> None:
        record = TurnRecord(turn.conversation.engine_name, 0, status="cancelled", intended_s=turn.intended_s)
        self._under_way.pop(turn.id, None)
        turn.settle(Generation([], "", record))

    def _over(self, turn: Turn, what: Generation | PensieveError | None, cause: BaseException | None = None) -> None:
        """Finish a turn: free its conversation for the next one, and give up a conversation that never came to anything."""
        assert what is not None
        conversation = turn.conversation
        with self.conversations.lock:  # before who waits is told: its next request finds the conversation idle
            self._under_way.pop(turn.id, None)
            following = conversation.waiting.popleft() if conversation.waiting else None
            conversation.running = following
            if following is None and not conversation.begun:
                self.conversations.remove(conversation)
        turn.settle(what, cause)
        if following is not None:
            self._start(following)

    def _count(self, record: TurnRecord) -> None:
        with self._lock:
            self._totals["turns"] += 1
            self._totals["refused_turns"] += record.status == "refused"
            self._totals["failed_turns"] += record.status not in ("completed", "cancelled", "refused")
            self._totals["output_tokens"] += record.output_tokens
            for name in _COUNTED:
                self._totals[name] += getattr(record, name) or 0


_RATES = {
    "gpu_hit_rate": "gpu_hit_tokens",
    "cpu_hit_rate": "cpu_hit_tokens",
    "disk_hit_rate": "disk_hit_tokens",
    "miss_rate": "recomputed_tokens",
}
_COUNTED = ("prompt_tokens", "history_tokens", *_RATES.values(), "new_tokens")


def as_arguments(sentence: str) -> str:
    """The same sentence for callers of create_server: fields are called as its arguments are."""
    for field, argument in _ARGUMENTS.items():
        sentence = sentence.replace(field, argument)
    return sentence
