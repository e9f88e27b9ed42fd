"""One short prompt, many new tokens, nobody else: how fast does it decode?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pensieve.core.request import Length, tokens_of
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import Arrival, Asking, Count, Positive, WorkloadContext, WorkloadPlan
from pensieve.lab.workload.prose import prose
from pensieve.serve.record import TurnRecord


class DecodeWorkload(Asking):
    """The same prompt `iterations` times, one request at a time (load "closed"), each in a conversation of its own.

    prompt_tokens: its length. prompt_path: a text file to use instead, whole. new_tokens: of each output.
    discard: the first iterations are phase "warmup", the others "throughput".
    timeout_s: a request is cancelled this long after it was due; None: never.

    total_ms is arrival to last token, per_token_ms that divided by the tokens. An engine that shares prefixes between
    conversations finds the prompt again, as it would in production.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        prompt_tokens: Count = 72,
        prompt_path: str | None = None,
        new_tokens: Count = 50,
        iterations: Count = 30,
        discard: Count = 5,
        timeout_s: Positive | None = None,
    ) -> None:
        if discard >= iterations:
            raise ConfigError(
                f"workload.discard={discard} leaves none of workload.iterations={iterations} to measure; "
                "raise iterations, or lower discard."
            )
        super().__init__(context, timeout_s)
        self._prompt = (
            prose(context, prompt_tokens, "decode")
            if prompt_path is None
            else tokens_of(list(context.encode(_text(prompt_path))))
        )
        whole = len(self._prompt) + new_tokens
        if whole > context.max_context:
            raise ConfigError(
                f"Prompt and output are {len(self._prompt)} + {new_tokens} tokens, and the model's context is "
                f"{context.max_context}; use a shorter prompt or a smaller workload.new_tokens."
            )
        self._new_tokens, self._iterations, self._discard = new_tokens, iterations, discard

    def describe(self) -> WorkloadPlan:
        whole = len(self._prompt) + self._new_tokens - 1
        return WorkloadPlan(
            load="closed",
            sessions=self._iterations - self._discard,
            turns=self._iterations,
            working_set_tokens=whole,  # one conversation at a time; finished ones are never asked again
            warmup_turns=self._discard,
            facts={
                "prompt_tokens": len(self._prompt),
                "new_tokens": self._new_tokens,
                "requests_at_once": 1,
                "n_ctx": self._context.max_context,
                "longest_conversation_tokens": whole,
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(0, 0.0)]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        assert turn.finished_s is not None
        following = turn.iteration + 1
        return [self._arrival(following, turn.finished_s)] if following < self._iterations else []

    def _arrival(self, iteration: int, at_s: float) -> Arrival:
        phase, output = "warmup" if iteration < self._discard else "throughput", Length(self._new_tokens)
        return self._ask(at_s, f"iteration-{iteration}", 1, self._prompt[:], output, phase, iteration=iteration)


def _text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.prompt_path={path} cannot be read as text: {error}.") from error
    if not text.strip():
        raise ConfigError(f"workload.prompt_path={path} is empty; write the prompt into it.")
    return text
