"""A real run of vLLM, asked again: the same requests at the same times, to hold a simulated machine against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import Count, WorkloadContext
from pensieve.lab.workload.fit import Fit, fitted, warmups
from pensieve.lab.workload.playback import Pauses, Playback, Recorded, lengths_of
from pensieve.lab.workload.recording import Call, Content, Conversation, Parts
from pensieve.lab.workload.vllm_runs.reading import RealRequest, read_run, shipped_run

RULE = "Every request is a conversation of its own; prompts that began alike begin alike, by whole blocks of 16 tokens."


class VllmRun(Playback):
    """real: what the real run did with each conversation of this workload. seen: somebody looked at this run when the
    simulated machine was made."""

    def __init__(self, real: Mapping[str, RealRequest], seen: bool, **playback: Any) -> None:
        super().__init__(**playback)
        self.real = real
        self.seen = seen


def vllm_run(
    context: WorkloadContext,
    *,
    run: str | None = "rtx4090_llama3_1_8b",
    path: str | None = None,
    warmup_turns: Count = 1,
) -> VllmRun:
    """run: one that comes with the package. path: instead of it, the requests.jsonl of another one; where its meta.json lies
    beside it and names a known workload, prompts share what they shared.

    Raises ConfigError where there is neither, or no such run, MalformedInput for a file that cannot be read.
    """
    if run is None and path is None:
        raise ConfigError(
            "This needs workload.path=FILE, the requests.jsonl of a run of vLLM; set it, or workload.run=NAME."
        )
    requests = read_run(Path(path)) if path is not None else shipped_run(str(run))
    conversations = [
        Conversation(
            f"request-{index}",
            (Call(_content(requests, index), request.output_tokens, request.arrival_s, continues=False, order=index),),
        )
        for index, request in enumerate(requests)
    ]
    measured, left_out = fitted(conversations, Fit(context))
    real = {conversation.id: request for conversation, request in zip(conversations, requests, strict=True)}
    return VllmRun(
        real=real,
        seen=path is None,
        context=context,
        warmup=warmups(measured, warmup_turns, 1, context),
        measured=measured,
        arrivals=Recorded(),
        pause_s=Pauses(context.seed, 0.0),
        facts={
            "source": run if path is None else Path(path).name,
            "rule": RULE,
            "requests_in_file": len(requests),
            "prompts_that_begin_like_another": sum(request.beginning is not None for request in requests),
            **left_out,
            **lengths_of(measured),
        },
    )


def _content(requests: Sequence[RealRequest], index: int) -> Content:
    return Parts(tuple(_pieces(requests, index, requests[index].input_tokens)))


def _pieces(requests: Sequence[RealRequest], index: int, tokens: int) -> list[tuple[int, int]]:
    """The first tokens of a prompt: as another one begins, then its own."""
    request = requests[index]
    alike = min(tokens, request.shared_tokens)
    own = [(index, tokens - alike)] if tokens > alike else []
    if request.beginning is None or not alike:
        return own
    return _pieces(requests, request.beginning, alike) + own
