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

from pensieve.core.hint import Hint
from pensieve.core.request import Free, Length, Sampling, stops_of, text_of, tokens_of
from pensieve.errors import ConfigError, RequestFailed, WorkerError
from pensieve.lab.compose.explain import explain_crash
from pensieve.serve.chat_template import ChatTemplate
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Asked, Conversation, Conversations, session_name
from pensieve.serve.server.turn import Generation, Stream, Turn
from pensieve.serve.systems.base import AnsweringSystem
from pensieve.serve.tokenizer import Tokenizer


class Server:
    """A running engine that keeps conversations by name; thread-safe, a context manager.

    Calls from several threads are batched together; turns of one conversation are served in the order they came. The HTTP
    server and the chat are clients of this object, so their conversations are its conversations.
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
        turn = self.asking(prompt_ids, text, **options)
        self.begin(session_id, turn)
        return turn.future

    def stream(
        self, session_id: str, prompt_ids: Sequence[int] | None = None, *, text: str | None = None, **options: Any
    ) -> Stream:
        """As `generate`; the reply comes piece by piece."""
        stream = Stream(self.asking(prompt_ids, text, **options))
        self.begin(session_id, stream.turn)
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
        prompt_ids: Sequence[int] | None,
        text: str | None,
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
        """A turn with the arguments of `generate`, which asks for its conversation with this message behind it."""
        if (prompt_ids is None) == (text is None):
            raise ConfigError("Give either prompt_ids or text.")
        stops = stops_of(stop)
        output = Length(max_new_tokens) if ignore_eos and not stops else Free(max_new_tokens, stops, ignore_eos)
        sampling = Sampling(temperature, top_p, top_k, self._seed if seed is None else seed)
        return self.turn(output, sampling, ask=self._appending(prompt_ids, text), hint=hint)

    def begin(self, session_id: str, turn: Turn) -> None:
        """Serve a turn in the conversation of this name, which is begun where there is none."""
        name = session_name(session_id)
        with self.conversations.lock:
            turn.begin(self.conversations.find("", name) or self.conversations.open("", name))

    def _appending(self, prompt_ids: Sequence[int] | None, text: str | None) -> Callable[[Conversation], Asked]:
        if prompt_ids is None and not self.template.plain:
            said, template = text_of(text, "text"), self.template

            def chat(held: Conversation) -> Asked:
                last = held.tokens[-1:]
                more = template.following(said, last[0]) if last else template.opening(said)
                return Asked(held.tokens + array("i", more))

            return chat
        begin = array("i", self.tokenizer.begin) if prompt_ids is None else array("i")
        given = self.tokenizer.encode(text_of(text, "text")) if prompt_ids is None else prompt_ids
        ids = tokens_of(given, self.vocab)
        return lambda held: Asked((held.tokens or begin) + ids)

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


_RATES = {
    "gpu_hit_rate": "gpu_hit_tokens",
    "cpu_hit_rate": "cpu_hit_tokens",
    "disk_hit_rate": "disk_hit_tokens",
    "miss_rate": "recomputed_tokens",
}
_COUNTED = ("output_tokens", "prompt_tokens", "history_tokens", *_RATES.values(), "new_tokens")
