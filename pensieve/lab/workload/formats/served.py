"""What engines wrote of requests that they served, as rows of recorded traffic."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import AliasPath, Field

from pensieve.errors import MalformedInput
from pensieve.lab.traffic.table import BLOCK_TOKENS, TOKEN_BYTES, Exchange, Facts, Salt
from pensieve.lab.workload.formats.reading import Entry, Positive, Reader, Whole
from pensieve.lab.workload.formats.vllm_events import vllm_events

Read = tuple[Facts, list[Exchange]]


def rows_of(format: str, reader: Reader, salt: Salt) -> Read:
    """Raises MalformedInput."""
    return in_order(*SERVED[format][0](reader, salt))


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


SERVED: dict[str, tuple[Callable[[Reader, Salt], Read], set[str]]] = {
    "lmcache_lookup": (lmcache_lookup, Lookup.needs()),
    "sglang_dump": (sglang_dump, set()),
    "vllm_events": (vllm_events, set()),
}
"""How each is read, raising MalformedInput, and what its first entry has."""
