"""One short prompt, many new tokens, nobody else: how fast does it decode?"""

from __future__ import annotations

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import Count, Positive, WorkloadContext
from pensieve.lab.workload.playback import Dialogue, Playback, Users
from pensieve.lab.workload.prose import prose


class DecodeWorkload(Playback):
    """The same prompt `iterations` times, one request at a time (load "closed"), each in a conversation of its own. The first
    `discard` are phase "warmup", the others "throughput". Fields: conf/workload/decode.yaml.

    total_ms is arrival to last token, per_token_ms that divided by the tokens. An engine that shares prefixes between
    conversations finds the prompt again, as it would in production.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        prompt_tokens: Count = 72,
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
        prompt = prose(context, prompt_tokens, "decode")
        if len(prompt) + new_tokens > context.max_context:
            raise ConfigError(
                f"Prompt and output are {len(prompt)} + {new_tokens} tokens, and the model's context is "
                f"{context.max_context}; use a shorter prompt or a smaller workload.new_tokens."
            )
        phases = ["warmup"] * discard + ["throughput"] * (iterations - discard)
        asked = [
            Dialogue.written(f"iteration-{number}", phase, [(prompt, new_tokens, {"iteration": number})])
            for number, phase in enumerate(phases)
        ]
        facts = {
            "prompt_tokens": len(prompt),
            "new_tokens": new_tokens,
            "requests_at_once": 1,
            "n_ctx": context.max_context,
        }
        super().__init__(
            context, (), asked, Users([asked]), lambda *_: 0.0,
            timeout_s=timeout_s, facts=facts, working_set=asked[0].longest,
        )  # fmt: skip
