"""The server without HTTP: one call a turn, from any number of threads; and which conversation a turn goes on from."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

from pensieve.core.request import Free, Hint, Length, Sampling, stops_of, text_of, tokens_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, RequestFailed, WorkerError
from pensieve.lab.compose.explain import explain_crash
from pensieve.serve.chat_template import ChatTemplate
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import (
    Asked,
    Conversation,
    Conversations,
    Mark,
    Message,
    message_keys,
    session_name,
)
from pensieve.serve.server.turn import Generation, Stream, Turn
from pensieve.serve.systems.base import AnsweringSystem
from pensieve.serve.tokenizer import Tokenizer


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
            self.complete(turn, "", session_id, prompt_ids, whole=False)
        elif self.template.plain:
            self.complete(turn, "", session_id, text_of(text, "text"), whole=False)
        else:
            self.chat(turn, "", session_id, [{"role": "user", "content": text_of(text, "text")}], whole=False)

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

    # -- chat -----------------------------------------------------------------------------------------------------------

    def chat(
        self, turn: Turn, tenant: str, name: str | None, messages: list[Message], whole: bool | None = None
    ) -> None:
        """name: of the conversation; None: the one that began with these messages, or a new one. whole: the messages are the
        whole history; None: they are if the assistant speaks in them, or if they come without a name."""
        if name is None:
            known = self.conversations.by_messages(tenant, message_keys(messages, turn.tools))
            if known is None:
                self._nearest(turn, tenant, self._asked(turn, messages, {}))
            else:
                self.go_on(turn, *known[:2], messages, known[0].first_replies(known[2]))
            return
        if whole is None:
            whole = any(message.get("role") == "assistant" for message in messages)
        with self.conversations.lock:
            conversation = self._named(tenant, name)
            if whole:
                keys, said = (message_keys(all_, turn.tools) for all_ in (messages, conversation.messages or ()))
                same = next((i for i, pair in enumerate(zip(keys, said, strict=False)) if pair[0] != pair[1]), None)
                count = min(len(keys), len(said)) if same is None else same
                asked = self._asked(turn, messages, conversation.first_replies(count))
                turn.begin(self._unclaimed(conversation, asked), asked)
            else:
                turn.begin(conversation, lambda held: self._more(turn, held, messages))

    def go_on(
        self, turn: Turn, conversation: Conversation, mark: Mark, messages: list[Message], replies: dict[int, list[int]]
    ) -> None:
        """Go on from a mark with these messages, the whole history; replies: the model's own tokens of some of them."""
        asked = self._asked(turn, messages, replies)
        with self.conversations.lock:
            if self.conversations.find(conversation.tenant, conversation.id) is not conversation:  # it is gone
                turn.begin(self.conversations.open(conversation.tenant), asked)
                return
            last = bool(conversation.marks) and conversation.marks[-1] is mark
            shared = common_prefix(conversation.tokens, asked.prompt)
            if not (conversation.idle and last and shared >= conversation.claimed()):
                conversation = self.conversations.fork(conversation, shared)
            turn.begin(conversation, asked)

    def _asked(self, turn: Turn, messages: list[Message], replies: dict[int, list[int]]) -> Asked:
        return Asked(array("i", self.template.prompt(messages, replies, turn.tools)), messages, replies)

    def _more(self, turn: Turn, held: Conversation, messages: list[Message]) -> Asked:
        """What the conversation holds, and new messages."""
        if held.messages is None and held.tokens:  # raw text so far
            if len(messages) != 1 or messages[0].get("role") != "user":
                raise ConfigError(
                    "This session holds raw text, so it takes one message of the user at a time, or a whole history."
                )
            following = self.template.following(str(messages[0]["content"]), held.tokens[-1])
            return Asked(held.tokens + array("i", following))
        return self._asked(turn, [*(held.messages or ()), *messages], dict(held.replies))

    # -- text -----------------------------------------------------------------------------------------------------------

    def complete(self, turn: Turn, tenant: str, name: str | None, prompt: str | Sequence[int], whole: bool) -> None:
        """A prompt without roles. With a name it is appended to what the conversation holds, unless it is all of it."""
        if isinstance(prompt, str):
            begin = array("i", self.tokenizer.begin)
            ids = array("i", self.tokenizer.encode(text_of(prompt, "prompt")))
        else:
            begin, ids = array("i"), tokens_of(prompt, self.vocab)
        asked = Asked(begin + ids)
        if name is None:
            self._nearest(turn, tenant, asked, prompt if isinstance(prompt, str) else None)
            return
        with self.conversations.lock:
            conversation = self._named(tenant, name)
            if whole:
                turn.begin(self._unclaimed(conversation, asked), asked)
            else:
                turn.begin(conversation, lambda held: Asked((held.tokens or begin) + ids))

    # -- where ----------------------------------------------------------------------------------------------------------

    def _named(self, tenant: str, name: str) -> Conversation:
        return self.conversations.find(tenant, session_name(name)) or self.conversations.open(tenant, name)

    def _unclaimed(self, conversation: Conversation, asked: Asked) -> Conversation:
        """The conversation, or in its place one that may be changed from where this prompt leaves it."""
        shared = common_prefix(conversation.tokens, asked.prompt)
        if conversation.idle and shared < conversation.claimed():
            return self.conversations.rename_fork(conversation, shared)
        return conversation

    def _nearest(self, turn: Turn, tenant: str, asked: Asked, text: str | None = None) -> None:
        """In the conversation that the prompt goes on from, a fork of the one that shares most with it, or a new one."""
        with self.conversations.lock:
            found = self.conversations.by_tokens(tenant, asked.prompt)
            if found is not None:
                conversation, shared = found
                held = conversation.tokens
                if text is not None and _LEAST_SHARED <= shared < len(held):
                    asked = self._as_held(conversation, text) or asked
                    shared = common_prefix(held, asked.prompt)
                if shared == len(held) and conversation.idle:
                    turn.begin(conversation, asked)
                    return
                if shared >= _LEAST_SHARED:
                    turn.begin(self.conversations.fork(conversation, shared), asked)
                    return
            turn.begin(self.conversations.open(tenant), asked)

    def _as_held(self, conversation: Conversation, text: str) -> Asked | None:
        """A text may begin with all that was said and still encode to other tokens: then those that were said are taken."""
        said = self.tokenizer.decode(conversation.tokens)
        if not said or not text.startswith(said):
            return None
        return Asked(conversation.tokens + array("i", self.tokenizer.encode(text[len(said) :])))

    def stops(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """Of a chat: those of the client, and where the model would go on for the user."""
        return stops + _PLAIN_STOPS if self.template.plain else stops


_LEAST_SHARED = 32  # tokens: below, a conversation of its own computes them as fast as it would find them
_PLAIN_STOPS = ("\nUser:",)  # where a model without a template begins to speak for the user
_RATES = {
    "gpu_hit_rate": "gpu_hit_tokens",
    "cpu_hit_rate": "cpu_hit_tokens",
    "disk_hit_rate": "disk_hit_tokens",
    "miss_rate": "recomputed_tokens",
}
_COUNTED = ("output_tokens", "prompt_tokens", "history_tokens", *_RATES.values(), "new_tokens")
