"""What engines and load generators wrote of requests that were served, as rows of recorded traffic."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import AliasPath, Field

from pensieve.errors import MalformedInput
from pensieve.lab.traffic.openai import Recorded
from pensieve.lab.traffic.table import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, Exchange, Facts, Salt, with_ratio
from pensieve.lab.workload.formats.reading import Entry, Positive, Reader, Whole
from pensieve.lab.workload.formats.vllm_events import vllm_events

Read = tuple[Facts, list[Exchange]]


def in_order(facts: Facts, rows: list[Exchange]) -> Read:
    """The rows in order of arrival, which begin at second 0."""
    rows.sort(key=lambda one: one.arrival_s or 0.0)
    start_s = rows[0].arrival_s or 0.0 if rows else 0.0
    for place, one in enumerate(rows):
        one.request = place
        for name in ("arrival_s", "first_token_s", "end_s"):
            if getattr(one, name) is not None:
                setattr(one, name, getattr(one, name) - start_s)
    return replace(facts, started_unix_s=start_s), rows


# LMCache's lookup hashes: JSON lines with the hash of each full chunk that a request asked for.

LMCACHE_RULE = "A lookup is a request, the first of each request_id. It has no reply: set workload.max_new_tokens."


class Lookup(Entry):
    timestamp: float
    request_id: str
    chunk_size: Positive
    seq_len: Positive
    chunk_hashes: list[Any]
    model_name: str | None = None


def lmcache_lookup(reader: Reader, salt: Salt) -> Read:
    """The path is one file, or the folder of them."""
    asked: dict[str, Lookup] = {}
    for file in reader.files("lookup_hashes_*.jsonl"):
        for one in reader.entries(Lookup.model_validate, file):
            asked.setdefault(one.request_id, one)
    sizes = {one.chunk_size for one in asked.values()}
    rows = []
    for one in asked.values():
        row = Exchange(0, one.timestamp, status="completed", prompt_tokens=one.seq_len, model=one.model_name)
        row.blocks = [salt.number(chunk) for chunk in one.chunk_hashes]
        row.lengths = [one.chunk_size] * len(row.blocks) if len(sizes) > 1 else None
        rows.append(row)
    block = sizes.pop() if len(sizes) == 1 else None
    return Facts("lmcache_lookup", block=block, hashes="prefix", rule=LMCACHE_RULE), rows


# SGLang's request dumps (dump_requests_folder): a pickle of requests with replies and times.

SGLANG_RULE = (
    "Prompts are token ids as SGLang had them. A request that has text and no ids shares nothing that is known."
)


class _Plain:
    """Stands for every object in a pickle, whatever its class: it has the fields, and runs none of the code."""

    def __new__(cls, *_: Any, **__: Any) -> _Plain:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.__dict__.update(part if isinstance(part, dict) else {})

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> Any:
        return _Plain


class Dumped(Entry):
    """asked, reply: of SGLang's own fields."""

    began_s: float
    ended_s: float
    ids: list[int] | None = Field(None, validation_alias=AliasPath("asked", "input_ids"))
    session: str | None = Field(None, validation_alias=AliasPath("asked", "session_params", "id"))
    said: list[int] | None = Field(None, validation_alias=AliasPath("reply", "output_ids"))
    prompt: Positive | None = Field(None, validation_alias=AliasPath("reply", "meta_info", "prompt_tokens"))
    output: Whole | None = Field(None, validation_alias=AliasPath("reply", "meta_info", "completion_tokens"))
    cached: Whole | None = Field(None, validation_alias=AliasPath("reply", "meta_info", "cached_tokens"))
    reason: str | None = Field(None, validation_alias=AliasPath("reply", "meta_info", "finish_reason", "type"))

    def row(self, salt: Salt) -> Exchange:
        """Raises ValueError."""
        ids, said, size = self.ids, self.said, BLOCK_TOKENS * TOKEN_BYTES
        row = Exchange(0, self.began_s, end_s=self.ended_s, finish_reason=self.reason, cached_tokens=self.cached)
        row.status = "cancelled" if self.reason == "abort" else "completed"
        row.prompt_tokens, row.output_tokens = self.prompt, self.output
        if self.session:
            row.session, row.session_from = salt.name(self.session), "body"
        if ids is not None:
            row.prompt_tokens, row.blocks = len(ids), salt.blocks(array("i", ids).tobytes(), size)
        if ids is not None and said:
            row.output_tokens = len(said)
            row.output_blocks = salt.blocks(array("i", ids + said).tobytes(), size, len(row.blocks or ()))
        if row.prompt_tokens is None:
            raise ValueError("it has neither input_ids nor meta_info.prompt_tokens")
        return row


def sglang_dump(reader: Reader, salt: Salt) -> Read:
    """The path is one file, or the folder of them."""
    rows = [
        row
        for file in reader.files("*.pkl")
        for row in reader.parsed(_dumped(file), lambda one: Dumped.model_validate(one).row(salt))
    ]
    return Facts("sglang_dump", block=BLOCK_TOKENS, engine={"name": "sglang"}, rule=SGLANG_RULE), rows


def _dumped(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as opened:
            dumped = _Unpickler(opened).load()
    except Exception as error:  # a damaged pickle raises any
        raise MalformedInput(f"{file} cannot be read as a dump of SGLang ({error!r}); give a .pkl of it.") from error
    records = dumped.get("requests") if isinstance(dumped, dict) else dumped
    if not isinstance(records, list):
        raise MalformedInput(f"{file} is no dump of SGLang: it lacks requests.")
    for place, (asked, reply, began_s, ended_s) in enumerate(records):
        yield f"{file}: request {place}", {"asked": vars(asked), "reply": reply, "began_s": began_s, "ended_s": ended_s}


# Load generators: inference-perf's per_request_lifecycle_metrics.json and AIPerf's profile_export.jsonl.


class Lifecycle(Entry):
    start_time: float
    end_time: float
    request: str
    prompt: Whole | None = Field(None, validation_alias=AliasPath("info", "input_tokens"))
    output: Whole | None = Field(None, validation_alias=AliasPath("info", "output_tokens"))
    first_token: float | None = Field(None, validation_alias=AliasPath("info", "output_token_times", 0))
    error: Any = None


def inference_perf(reader: Reader, salt: Salt) -> Read:
    recorded = Recorded(salt)

    def served(entry: Any) -> Exchange:
        one = Lifecycle.model_validate(entry)
        row = recorded.asked(0, one.start_time, {}, one.request.encode()).row
        row.status, row.end_s = "failed" if one.error else "completed", one.end_time
        row.prompt_tokens, row.output_tokens, row.first_token_s = one.prompt, one.output, one.first_token
        return row

    found = list(reader.entries(served))
    return with_ratio(Facts("inference_perf", "bytes", BLOCK_BYTES), found, "info.input_tokens"), found


AIPERF_RULE = "Prompts are known by their length alone, so no two share anything. x_correlation_id is the session."


class Profiled(Entry):
    began_ns: float = Field(validation_alias=AliasPath("metadata", "request_start_ns"))
    ended_ns: float | None = Field(None, validation_alias=AliasPath("metadata", "request_end_ns"))
    cancelled: bool | None = Field(None, validation_alias=AliasPath("metadata", "was_cancelled"))
    session: str | None = Field(None, validation_alias=AliasPath("metadata", "x_correlation_id"))
    prompt: Positive | None = Field(None, validation_alias=AliasPath("metrics", "input_sequence_length", "value"))
    output: Whole | None = Field(None, validation_alias=AliasPath("metrics", "output_sequence_length", "value"))
    ttft_ms: float | None = Field(None, validation_alias=AliasPath("metrics", "time_to_first_token", "value"))
    metrics: dict[str, Any]
    error: Any = None


def aiperf(reader: Reader, salt: Salt) -> Read:
    def served(entry: Any) -> Exchange:
        one = Profiled.model_validate(entry)
        row = Exchange(0, one.began_ns / 1e9, prompt_tokens=one.prompt, output_tokens=one.output)
        row.status = "failed" if one.error else "cancelled" if one.cancelled else "completed"
        row.end_s = None if one.ended_ns is None else one.ended_ns / 1e9
        row.first_token_s = None if one.ttft_ms is None else (one.began_ns / 1e9) + one.ttft_ms / 1e3
        if one.prompt is None and row.status == "completed":
            raise ValueError("it has no input_sequence_length")
        if one.session:
            row.session, row.session_from = salt.name(one.session), "source"
        return row

    return Facts("aiperf", hashes="none", rule=AIPERF_RULE), list(reader.entries(served))


SERVED: dict[str, tuple[Callable[[Reader, Salt], Read], set[str]]] = {
    "lmcache_lookup": (lmcache_lookup, Lookup.needs()),
    "sglang_dump": (sglang_dump, set()),
    "inference_perf": (inference_perf, Lifecycle.needs()),
    "aiperf": (aiperf, Profiled.needs()),
    "vllm_events": (vllm_events, set()),
}
"""How each is read, raising MalformedInput, and what its first entry has."""
