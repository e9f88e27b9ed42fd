"""The programmatic server: one call to make it, one call a turn, from any number of threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pensieve.baselines.base import AnsweringSystem
from pensieve.compose import (
    build_system,
    build_tokenizer,
    check,
    check_free_memory,
    model_config,
    options,
    plan_trial,
    read_option,
)
from pensieve.compose.explain import explain_crash
from pensieve.compose.folder import ended, nearest
from pensieve.compose.target import locate
from pensieve.errors import ConfigError, EngineMissing, PensieveError, RequestFailed, WorkerError, refused
from pensieve.eviction.base import needs_future
from pensieve.record import TurnRecord
from pensieve.request import UNNUMBERED, Free, Length, Request, Sampling, TokenArray, stops_of, text_of, tokens_of
from pensieve.stop import before_stop
from pensieve.tokenizer import Tokenizer

_ARGUMENTS = {
    "cache.gpu": "gpu_cache",
    "cache.cpu": "cpu_cache",
    "hardware.device": "device",
    "model.weights": "weights",
}
"""What a field of the configuration is called by the callers of create_server, whom a sentence about it must tell."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished turn. text: the reply, without the stop string that ended it. turn: its record (see TurnRecord)."""

    token_ids: list[int]
    text: str
    turn: TurnRecord


class Server:
    """A running engine that keeps conversations by name; thread-safe, a context manager.

    Calls from several threads are batched together; turns of one conversation are served in the order they came.
    """

    def __init__(self, system: AnsweringSystem, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._system = system
        self._tokenizer = tokenizer
        self._seed = seed
        self._ids = itertools.count(1)
        self._totals: dict[str, float] = {
            "turns": 0,
            "output_tokens": 0,
            "refused_turns": 0,
            "failed_turns": 0,
            **dict.fromkeys(_COUNTED, 0),
        }
        self._lock = threading.Lock()  # of the totals
        self.report = system.start()
        self._vocab = int(system.settings()["vocab"])

    def process_request(self, session_id: str, text: str, max_new_tokens: int = 128, **options: Any) -> str:
        """Send one message of a conversation and return the reply. `options` as of `generate`."""
        return self.generate(session_id, text=text, max_new_tokens=max_new_tokens, **options).text

    def generate(
        self,
        session_id: str,
        prompt_ids: Sequence[int] | None = None,
        *,
        text: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        ignore_eos: bool = False,
    ) -> Generation:
        """Append a message (token ids, or text) to the conversation and generate.

        prompt_ids: whole numbers below the model's vocabulary, of Python or numpy; none at all asks to go on without a new
        message. seed: of this reply, else the server's. stop: one string or several; None or () for none.

        Raises CapacityError or ContextLengthError, or RequestRefused itself, for a request that can never be served,
        RequestFailed where the engine failed it, ConfigError for arguments that make no sense.
        """
        if (prompt_ids is None) == (text is None):
            raise ConfigError("Give either prompt_ids or text.")
        if prompt_ids is None:
            prompt_ids = self._tokenizer.encode(text_of(text, "text"))
        stops = stops_of(stop)
        turn = self._serve(
            session_id,
            tokens_of(prompt_ids, self._vocab),
            Length(max_new_tokens) if ignore_eos and not stops else Free(max_new_tokens, stops, ignore_eos),
            Sampling(temperature, top_p, top_k, self._seed if seed is None else seed),
        )
        if turn.status == "refused":
            raise refused(turn.finish_reason, _as_arguments(turn.error or "The request was refused."))
        if turn.status != "completed":
            raise RequestFailed(turn.error or f"The request ended as {turn.status}.")
        return Generation(list(turn.token_ids), self._text(turn, stops), turn)

    def forget(self, session_id: str | None = None) -> None:
        """Free a conversation, or all of them."""
        self._system.forget(session_id)

    def get_statistics(self) -> dict[str, Any]:
        """Counts since start: turns, tokens, hits by tier, evictions, bytes moved, and what the engine is.

        turns counts all; refused_turns could never be served, failed_turns could have been.
        """
        with self._lock:
            totals = dict(self._totals)
        history = totals["history_tokens"]
        shares = {
            rate: totals[tokens] / history if history else None
            for rate, tokens in (
                ("gpu_hit_rate", "gpu_hit_tokens"),
                ("cpu_hit_rate", "cpu_hit_tokens"),
                ("miss_rate", "recomputed_tokens"),
            )
        }
        return {**totals, **shares, **self._system.counters(), "engine": self._system.settings()}

    def get_statistics_str(self) -> str:
        """The same for people, a few lines."""
        s = self.get_statistics()
        engine = s["engine"]

        def share(name: str) -> str:
            return "none yet" if s[name] is None else f"{100 * s[name]:.1f} %"

        return "\n".join(
            (
                f"{engine['baseline']} on {engine['device']}, {engine['dtype']}, weights {engine['weights']}: "
                f"GPU tier {engine['gpu_tokens']:,} tokens, CPU tier {engine['cpu_tokens']:,} tokens",
                f"{s['turns']:.0f} turns, {s['output_tokens']:.0f} tokens generated, {s['failed_turns']:.0f} turns failed, "
                f"{s['refused_turns']:.0f} refused",
                f"history tokens {s['history_tokens']:.0f}: GPU hit {share('gpu_hit_rate')}, "
                f"CPU hit {share('cpu_hit_rate')}, recomputed {share('miss_rate')}",
                f"chunks evicted {s['evicted_chunks']:.0f}, dropped {s['dropped_chunks']:.0f}; "
                f"{s['swapped_in_bytes'] / 1e6:.1f} MB swapped in, {s['swapped_out_bytes'] / 1e6:.1f} MB out",
            )
        )

    def close(self) -> None:
        """Stop the engine; requests under way end with RequestFailed."""
        self._system.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how --------------------------------------------------------------------------------------------------------

    def _serve(self, session: str, ids: TokenArray[int], output: Length | Free, sampling: Sampling) -> TurnRecord:
        request = Request(next(self._ids), session, UNNUMBERED, ids, output, sampling)
        request.intended_s = self._system.clock.now_s()
        try:
            turn = self._system.ask(request)
        except WorkerError as error:
            raise RequestFailed(explain_crash(error)) from error
        with self._lock:
            self._totals["turns"] += 1
            self._totals["refused_turns"] += turn.status == "refused"
            self._totals["failed_turns"] += turn.status not in ("completed", "refused")
            self._totals["output_tokens"] += turn.output_tokens
            for name in _COUNTED:
                self._totals[name] += getattr(turn, name) or 0
        return turn

    def _text(self, turn: TurnRecord, stops: Sequence[str]) -> str:
        text = self._tokenizer.decode(turn.token_ids)
        return before_stop(text, stops) if turn.finish_reason == "stop" else text


_COUNTED = ("prompt_tokens", "history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "recomputed_tokens", "new_tokens")


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
) -> Server:
    """A server that is ready to answer.

    mode: pensieve, gpu_only, stateless, or another baseline in the engine; an outside engine such as vllm runs in trials.
    model: a name in conf/model, a hub id, or a folder written by save_pretrained; weights: hub (what was published: of a
    folder, its own), random or a folder, by default what the model says.
    gpu_cache, cpu_cache: "4GiB" or "8192 tokens". device: auto, cpu, cuda, or a simulated machine such as sim_h100.
    Raises the errors of pensieve.errors, each a sentence that says what to do.
    """
    try:
        return _server(mode, model, weights, gpu_cache, cpu_cache, eviction, device, seed, scheduler)
    except PensieveError as error:
        raise type(error)(_as_arguments(str(error))) from error


def _as_arguments(sentence: str) -> str:
    for field, argument in _ARGUMENTS.items():
        sentence = sentence.replace(field, argument)
    return sentence


def _baseline(mode: str) -> dict[str, Any]:
    """The option of conf/baseline. Raises EngineMissing for an outside engine, ConfigError for an unknown mode."""
    known = [name for name in options("baseline") if read_option("baseline", name)["cache"]]
    if mode in options("baseline") and mode not in known:
        raise EngineMissing(
            f"mode={mode!r} is an outside engine, and create_server starts ours only; compare with it in trials "
            f"(python runners/run.py baseline=pensieve,{mode} -m). Of ours, mode='prefix_cache' shares full blocks as vLLM "
            "does, and mode='stateless' keeps nothing between turns."
        )
    if mode not in known:
        raise ConfigError(ended(f"There is no mode {mode!r}{nearest(mode, known)}"))
    return read_option("baseline", mode)


def _server(
    mode: str,
    model: str,
    weights: str | None,
    gpu_cache: str,
    cpu_cache: str,
    eviction: str,
    device: str,
    seed: int,
    scheduler: str,
) -> Server:
    hardware = {"auto": "local"}.get(device, device)
    baseline = _baseline(mode)
    chosen = model_config(model, **({} if weights is None else {"weights": weights}))
    config = check(
        {
            "seed": seed,
            "model": chosen.model_dump(),
            "cache": {"name": "api", "gpu": gpu_cache, "cpu": cpu_cache},
            "eviction": read_option("eviction", eviction),
            "scheduler": read_option("scheduler", scheduler),
            "baseline": baseline,
            "workload": read_option("workload", "chat"),  # unused: requests come from the caller
            "hardware": read_option("hardware", hardware),
            "tracking": read_option("tracking", "off"),
        }
    )
    if needs_future(locate(str(config.eviction["_target_"]), f"eviction={eviction}")):
        raise ConfigError(
            f"eviction={eviction} needs a workload whose future is known, and live traffic has none; choose lru."
        )
    plan = plan_trial(config)
    check_free_memory(plan)
    tokenizer = build_tokenizer(config.model, plan.model.vocab, plan.device.simulated)
    return Server(build_system(plan, tokenizer), tokenizer, seed)
