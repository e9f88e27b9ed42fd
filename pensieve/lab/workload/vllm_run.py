"""A real run of vLLM, asked again: the same requests at the same times, to hold a simulated machine against it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.workload.base import Count, WorkloadContext
from pensieve.lab.workload.fit import Fit, fitted, warmups
from pensieve.lab.workload.formats.reading import Entry, Reader
from pensieve.lab.workload.playback import Pauses, Playback, Recorded
from pensieve.lab.workload.recording import Call, Parts, grouped

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
    """run, path: see file_of. Where the meta.json beside it names a known workload, prompts share what they shared.

    Raises ConfigError as file_of does, MalformedInput for a file that cannot be read.
    """
    file = file_of(run, path)
    requests = read_run(file)
    contents = [Parts(tuple(_pieces(requests, index, one.input_tokens))) for index, one in enumerate(requests)]
    conversations = grouped(
        (f"request-{index}", Call(content, one.output_tokens, one.arrival_s, continues=False, order=index))
        for index, (one, content) in enumerate(zip(requests, contents, strict=True))
    )
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
            "source": run if path is None else file.name,
            "rule": RULE,
            "requests_in_file": len(requests),
            "prompts_that_begin_like_another": sum(request.beginning is not None for request in requests),
            **left_out,
        },
    )


def _pieces(requests: Sequence[RealRequest], index: int, tokens: int) -> list[tuple[int, int]]:
    """The first tokens of a prompt: as another one begins, then its own."""
    request = requests[index]
    alike = min(tokens, request.shared_tokens)
    own = [(index, tokens - alike)] if tokens > alike else []
    if request.beginning is None or not alike:
        return own
    return _pieces(requests, request.beginning, alike) + own


# The runs: settings, and of each request when it came, how long it was, and when its first and last token were there.

RUNS = Path(__file__).parent / "vllm_runs"
"""Those that come with the package: LLMServingSim 2.0's, of vLLM 0.19 (MIT, Copyright (c) 2024, CASYS Lab at KAIST), with
times from the first arrival on; and of each workload which of its prompts begin alike."""
_REPLAYED: Mapping[str, tuple[object, ...]] = {
    "data_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "block_size": (16,),
    "dtype": ("auto", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "bfloat16", "float16"),
    "quantization": (None,),
    "speculative_config": (None,),
    "enable_prefix_caching": (True,),
    "enable_chunked_prefill": (True,),
    "policy": ("fcfs",),
}
"""Values that a replay has, of settings that it cannot change."""


@dataclass(frozen=True, slots=True)
class RealRequest:
    """Seconds since the first request arrived. beginning: another request, by its place in the order of arrival, whose prompt
    begins with the same `shared_tokens` tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    first_token_s: float
    last_token_s: float
    beginning: int | None = None
    shared_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_token_s - self.arrival_s)

    @property
    def tpot_ms(self) -> float | None:
        """None for a reply of one token."""
        if self.output_tokens < 2:
            return None
        return 1e3 * (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.last_token_s - self.arrival_s)


def shipped() -> list[str]:
    """The runs that come with the package."""
    return sorted(path.parent.name for path in RUNS.glob("*/meta.json"))


def file_of(run: str | None, path: str | None) -> Path:
    """The requests of one that comes with the package, or of another one. Raises ConfigError where there is none."""
    if path is not None:
        return Path(path)
    if run not in shipped():
        raise ConfigError(
            f"There is no run {run!r} of vLLM; there are {', '.join(shipped())}, and workload.path=FILE takes the "
            "requests.jsonl of another one."
        )
    return RUNS / run / "requests.csv"


class _Served(Entry):
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    input_toks: int
    output_toks: int


def read_run(file: Path) -> list[RealRequest]:
    """A requests.jsonl as LLMServingSim's benchmark of vLLM writes it, by arrival. meta.json beside it names the workload,
    which tells which prompts begin alike; without it none do.

    Arrivals are on the wall's clock and tokens on the engine's. The least time between the arrival of a request and its
    being queued by the engine is taken as the difference of the two: then nobody is queued before it arrived.

    Raises MalformedInput for a file that is none, or a meta.json that is no object; ConfigError as settings_of does.
    """
    settings_of(file)
    rows = sorted(Reader(file, "fail").entries(_Served.model_validate), key=lambda row: row.arrival_time)
    if not rows:
        raise MalformedInput(f"{file} is no requests.jsonl of a vLLM run; give one, or leave path out.")
    began = rows[0].arrival_time
    began_engine = began + min(row.queued_ts - row.arrival_time for row in rows)
    found = [
        RealRequest(
            round(row.arrival_time - began, 6),
            row.input_toks,
            row.output_toks,
            round(row.first_token_ts - began_engine, 6),
            round(row.last_token_ts - began_engine, 6),
        )
        for row in rows
    ]
    known = RUNS / f"{Path(str(_meta_beside(file).get('dataset_path', ''))).stem}.shared.csv"
    for row in csv.DictReader(known.read_text().splitlines()) if known.is_file() else ():
        place, earlier, tokens = (int(row[name]) for name in ("request", "earlier", "tokens"))
        found[place] = replace(found[place], beginning=earlier, shared_tokens=tokens)
    return found


def setting(name: str, run: str | None, path: str | None) -> object:
    """One of a run's settings, as vLLM names them; None: not recorded, or no run. Raises what file_of and settings_of do."""
    return None if run is None and path is None else settings_of(file_of(run, path)).get(name)


def settings_of(file: Path) -> dict[str, Any]:
    """What vLLM was started with and resolved it to, by name, of a run with these requests. Raises ConfigError for one that a
    replay cannot express."""
    meta = _meta_beside(file)
    resolved = meta.get("resolved_config")
    sections = [meta.get("engine_kwargs"), meta.get("kv_cache"), resolved]
    sections += resolved.values() if isinstance(resolved, Mapping) else ()
    settings: dict[str, Any] = {}
    for section in sections:
        for name, value in section.items() if isinstance(section, Mapping) else ():
            if settings.get(name) is None:
                settings[name] = value.removeprefix("torch.") if isinstance(value, str) else value
    other = [
        f"{name}={settings[name]}"
        for name, values in _REPLAYED.items()
        if settings.get(name) is not None and settings[name] not in values
    ]
    if other:
        raise ConfigError(
            f"The run of vLLM had {' and '.join(other)}, which a replay cannot express; name the "
            "requests.jsonl of another run."
        )
    return settings


def _meta_beside(path: Path) -> dict[str, Any]:
    file = path.parent / "meta.json"
    try:
        return TypeAdapter(dict[str, Any]).validate_json(file.read_bytes() if file.is_file() else b"{}")
    except (OSError, ValueError) as error:
        raise MalformedInput(
            f"{file} does not describe a run ({error!r}); move it away: without it all prompts begin differently, and the "
            "settings are vLLM's defaults."
        ) from None
