"""The server without HTTP: how one is made, one call a turn, from any number of threads; and what happens to a turn."""

from __future__ import annotations

import itertools
import logging
import queue
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pensieve.core.request import Event, Free, Hint, History, Length, Request, Sampling, text_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, EngineMissing, PensieveError, RequestFailed, WorkerError, refused, typed
from pensieve.lab.compose.build import build_system, check_free_memory
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.explain import explain_crash
from pensieve.lab.compose.model_files import build_tokenizer, model_config
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check, locate
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Conversation, Conversations, Mark, Said, message_keys, told_of
from pensieve.serve.systems.base import AnsweringSystem
from pensieve.serve.tokenizer import ChatTemplate, Message, TextStream, Tokenizer, before_stop
from pensieve.units import percent

if TYPE_CHECKING:
    from pensieve.serve.server.schemas import Tools

log = logging.getLogger(__name__)


def create_server(
    mode: str = "pensieve",
    model: str = "tiny",
    weights: str | None = None,
    gpu_cache: str = "4096 tokens",
    cpu_cache: str = "8192 tokens",
    eviction: str = "retention_value",
    device: str = "auto",
    seed: int = 0,
    scheduler: str = "unified",
    disk_cache: str = "0 tokens",
) -> Server:
    """A server that is ready to answer.

    mode: pensieve, gpu_only, stateless, or another baseline in the engine. model: a name in conf/model,
    a hub id, a folder written by save_pretrained, or a GGUF file; weights: hub (what was published: of a folder, its own),
    random or a folder, by default what the model says.
    gpu_cache, cpu_cache, disk_cache: "4GiB" or "8192 tokens". device: auto, cpu, cuda, or a simulated machine such as
    sim_h100. Raises the errors of pensieve.errors, each a sentence that says what to do.
    """
    return server_of(
        {
            "seed": seed,
            "model": model_config(model, **({} if weights is None else {"weights": weights})).model_dump(),
            "cache": {"name": "api", "gpu": gpu_cache, "cpu": cpu_cache, "disk": disk_cache},
            "eviction": read_option("eviction", eviction),
            "scheduler": read_option("scheduler", scheduler),
            "baseline": read_option("baseline", mode),
            "hardware": read_option("hardware", "local" if device == "auto" else device),
            "tracking": read_option("tracking", "off"),
        }
    )


def server_of(
    config: Mapping[str, Any],
    keeps_disk: bool = False,
    replicas: int = 1,
    router: str = "affinity",
    environment: Mapping[str, str] | None = None,
) -> Server:
    """A warm server from the configuration of a command, or the fields of a trial but `workload`: callers ask.

    keeps_disk: as of build_system. replicas: several are processes that hold an engine with its KV, and nothing else;
    router, environment: as of build_replicas. Raises ConfigError for a policy that cannot serve, EngineMissing for an engine
    of others.
    """
    trial = {name: value for name, value in config.items() if name not in ("serve", "chat")}
    checked = check({**trial, "workload": read_option("workload", "chat")})
    if checked.baseline.engine is not None:
        raise EngineMissing(
            f"baseline={checked.baseline.name} is an outside engine, and only ours answer callers here. Compare with it in "
            f"trials ({typed('run')} baseline=pensieve,{checked.baseline.name} -m), or choose one of ours, such as "
            "baseline=prefix_cache."
        )
    eviction = f"eviction={checked.eviction.get('name')}"
    if getattr(locate(str(checked.eviction["_target_"]), eviction), "needs_future", False):
        raise ConfigError(f"{eviction} needs a workload whose future is known, and live traffic has none; choose lru.")
    plan = plan_trial(checked)
    if replicas > 1 and plan.device.simulated:
        raise ConfigError(
            f"serve.replicas={replicas} are processes, and hardware={plan.config.hardware.name} is simulated; use "
            "hardware=local, or simulate them with runners/run.py and hardware.replicas."
        )
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)
    if replicas > 1:
        from pensieve.plugins.replicas.system import build_replicas

        return Server(build_replicas(plan, replicas, router, environment), tokenizer, plan.config.seed)
    check_free_memory(plan)
    return Server(build_system(plan, tokenizer, keeps_disk=keeps_disk), tokenizer, plan.config.seed)


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
        totals = dict(self._totals)
        history = totals["history_tokens"]
        shares = {rate: totals[tokens] / history if history else None for rate, tokens in _RATES.items()}
        return {**totals, **shares, **self.system.counters(), "engine": self.system.settings()}

    def get_statistics_str(self) -> str:
        """The same for people, a few lines."""
        s = self.get_statistics()
        engine = s["engine"]
        found = ", ".join(f"{rate.replace('_', ' ')} {percent(s[rate])} %" for rate in _RATES)
        return (
            f"{engine['baseline']} on {engine['device']}, {engine['dtype']}, weights {engine['weights']}: "
            f"GPU tier {engine['gpu_tokens']:,} tokens, CPU tier {engine['cpu_tokens']:,} tokens\n"
            f"{s['turns']:.0f} turns, {s['output_tokens']:.0f} tokens generated, {s['failed_turns']:.0f} turns failed, "
            f"{s['refused_turns']:.0f} refused\n"
            f"history tokens {s['history_tokens']:.0f}: {found}\n"
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
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
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


@dataclass(frozen=True)
class Generation:
    """One finished turn. turn: its record (see TurnRecord), whose status is `completed`, or `cancelled` where it was cut
    short: the reply is then what there was until then."""

    turn: TurnRecord
    _decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)
    _stops: tuple[str, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return list(self.turn.token_ids)

    @cached_property
    def text(self) -> str:
        """The reply, without the stop string that ended it."""
        text = self._decode(self.turn.token_ids)
        return before_stop(text, self._stops) if self.turn.finish_reason == "stop" else text


@dataclass(slots=True, eq=False)
class Turn:
    """From what is asked to what became of it; the listener of its request.

    tools: that the prompt shows. fits: ask for fewer tokens than `output` says where there is no room for as many. hint: what
    the client says of the time after the reply. keep_alive_s: of its conversation, from now on. on_event: called in the
    engine's thread with each token, and with None once `future` is done. A turn that ended has let go of it, so that it and
    whoever waited for it are no cycle. cut: somebody has cancelled it. asked, held (tokens of the conversation): as
    of its start. messages: with its reply, once it stands.
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
    ask: Said | Callable[[Conversation], Said] | None = field(init=False, default=None)
    asked: Said | None = None
    held: int = 0
    messages: list[Message] | None = None
    cut: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return self.output.stop if isinstance(self.output, Free) else ()

    def asks(self, messages: list[Message]) -> Said:
        """What it asks with these messages, all of them."""
        return Said(array("i", self.server.template.prompt(messages, self.tools)), messages)

    def begin(self, conversation: Conversation, ask: Said | Callable[[Conversation], Said]) -> None:
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
            self._settle(Generation(record, self.server.tokenizer.decode))
        else:
            self.server.system.cancel(self.id, "cancelled")

    @property
    def streams(self) -> bool:
        return self.on_event is not None

    def happened(self, event: Event) -> None:
        if event.turn is not None:
            self._ended(event.turn)
        else:
            self._tell(event)

    def failed(self, error: WorkerError) -> None:
        failure = RequestFailed(str(error))
        failure.__cause__ = error
        self._over(failure)

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
            room = max(1, self.server.most_tokens - len(asked.tokens))
            self.output = replace(self.output, max_new_tokens=min(self.output.max_new_tokens, room))
        conversation.asked += 1
        known, keep_s = conversation.known(asked.tokens), conversation.keep_alive_s
        fork, conversation.fork = conversation.fork, None
        return Request(
            self.id,
            conversation.engine_name,
            conversation.asked,
            asked.tokens,
            self.output,
            self.sampling,
            intended_s=self.intended_s,
            fork=fork,
            history=History(known, "restarted" if conversation.restored else "kept") if known else None,
            tenant=conversation.tenant,
            hint=self.hint if keep_s is None else replace(self.hint or Hint(), keep_s=keep_s),
        )

    def _ended(self, record: TurnRecord) -> None:
        what: Generation | PensieveError
        if record.status == "refused":
            what = refused(record.finish_reason, record.error or "The request was refused.")
        elif record.status not in ("completed", "cancelled"):
            what = RequestFailed(record.error or f"The request ended as {record.status}.")
        else:
            what = Generation(record, self.server.tokenizer.decode, self.stops)
            if record.stands:
                self._keep(what)
        self.server.tell(self, record)
        self._over(what)

    def _keep(self, said: Generation) -> None:
        """The conversation is what was asked and answered. A stop string is no part of it."""
        record, asked, tokenizer = said.turn, self.asked, self.server.tokenizer
        stopped = record.finish_reason == "stop"
        reply = array("i", tokenizer.encode(tokenizer.literal(said.text), marked=True)) if stopped else record.token_ids
        assert asked is not None
        messages, key = None, None
        if asked.messages is not None:
            own = {"role": "assistant", "content": said.text, "ids": list(reply)}
            messages = self.messages = [*asked.messages, own]
            key = message_keys(messages, self.tools)[-1]
        tokens = asked.tokens + reply
        before = min(self.held, len(asked.tokens))
        ended = record.finish_reason == "eos"  # by a token that a template may write in its own way
        mark = Mark(len(tokens) - ended, before, told_of(record, self.server.moment), len(messages or ()), key)
        # The last token of a turn has no KV.
        computed = len(asked.tokens) + common_prefix(reply, record.token_ids[:-1])
        self.server.conversations.settle(self.conversation, Said(tokens, messages), mark, computed)

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
        self._tell(None)
        self.on_event = self.ask = None

    def _tell(self, event: Event | None) -> None:
        try:
            if self.on_event is not None:
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
