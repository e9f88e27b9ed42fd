"""What engines and load generators wrote of requests that were served, as rows of recorded traffic."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pensieve.errors import MalformedInput
from pensieve.lab.traffic.hashing import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, Salt
from pensieve.lab.traffic.openai import Recorded
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, number, text, whole
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


def lmcache_lookup(reader: Reader, salt: Salt) -> Read:
    """The path is one file, or the folder of them."""
    asked: dict[str, tuple[Exchange, int]] = {}
    for file in reader.files("lookup_hashes_*.jsonl"):
        for name, row, size in reader.entries(lambda line: _looked_up(line, salt), file):
            asked.setdefault(name, (row, size))
    sizes = {size for _, size in asked.values()}
    for row, size in asked.values():
        if len(sizes) > 1:
            row.lengths = [size] * len(row.blocks or ())
    block = sizes.pop() if len(sizes) == 1 else None
    return Facts("lmcache_lookup", block=block, hashes="prefix", rule=LMCACHE_RULE), [row for row, _ in asked.values()]


def _looked_up(line: Row, salt: Salt) -> tuple[str, Exchange, int]:
    hashes, size, tokens = line.get("chunk_hashes"), whole(line, "chunk_size", 1), whole(line, "seq_len", 1)
    if not isinstance(hashes, list) or len(hashes) * size > tokens:
        raise Malformed("chunk_hashes is not a list of as many chunks as seq_len holds")
    row = Exchange(0, number(line, "timestamp"), status="completed", prompt_tokens=tokens)
    row.model, row.blocks = str(line.get("model_name") or "") or None, [salt.number(one) for one in hashes]
    return text(line, "request_id"), row, size


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


def sglang_dump(reader: Reader, salt: Salt) -> Read:
    """The path is one file, or the folder of them."""
    found: list[Exchange] = []
    for file in reader.files("*.pkl"):
        for place, record in enumerate(_dumped(file)):
            try:
                found.append(_dumped_row(record, salt))
            except Malformed as error:
                reader.reject(f"{file}: request {place}", str(error))
    return Facts("sglang_dump", block=BLOCK_TOKENS, engine={"name": "sglang"}, rule=SGLANG_RULE), found


def _dumped(file: Path) -> Iterable[Any]:
    try:
        with file.open("rb") as opened:
            dumped = _Unpickler(opened).load()
    except Exception as error:  # a damaged pickle raises any
        raise MalformedInput(f"{file} cannot be read as a dump of SGLang ({error!r}); give a .pkl of it.") from error
    records = dumped.get("requests") if isinstance(dumped, dict) else dumped
    if not isinstance(records, list):
        raise MalformedInput(f"{file} is no dump of SGLang: it lacks requests.")
    return records


def _dumped_row(record: Any, salt: Salt) -> Exchange:
    if not isinstance(record, tuple) or len(record) != 4 or not isinstance(record[1], dict):
        raise Malformed("it is no request, reply, begin and end")
    asked, reply, began_s, ended_s = record
    meta = reply.get("meta_info") or {}
    row = Exchange(0, float(began_s), end_s=float(ended_s), status="completed")
    reason = meta.get("finish_reason")
    row.finish_reason = str(reason.get("type")) if isinstance(reason, dict) else None
    row.status = "cancelled" if row.finish_reason == "abort" else "completed"
    row.prompt_tokens, row.output_tokens = meta.get("prompt_tokens"), meta.get("completion_tokens")
    row.cached_tokens = meta.get("cached_tokens")
    session = getattr(asked, "session_params", None)
    if isinstance(session, dict) and session.get("id"):
        row.session, row.session_from = salt.name(str(session["id"])), "body"
    ids, said, size = getattr(asked, "input_ids", None), reply.get("output_ids"), BLOCK_TOKENS * TOKEN_BYTES
    if isinstance(ids, list) and all(type(one) is int for one in ids):
        row.prompt_tokens, row.blocks = len(ids), salt.blocks(array("i", ids).tobytes(), size)
        if isinstance(said, list) and all(type(one) is int for one in said):
            row.output_tokens = len(said)
            row.output_blocks = salt.blocks(array("i", ids + said).tobytes(), size, len(row.blocks))
    if row.prompt_tokens is None:
        raise Malformed("it has neither input_ids nor meta_info.prompt_tokens")
    return row


# Load generators: inference-perf's per_request_lifecycle_metrics.json and AIPerf's profile_export.jsonl.

AIPERF_RULE = "Prompts are known by their length alone, so no two share anything. x_correlation_id is the session."


def inference_perf(reader: Reader, salt: Salt) -> Read:
    recorded = Recorded(salt, "bytes", BLOCK_BYTES)
    found = list(reader.entries(lambda entry: _lifecycle(entry, recorded)))
    told = [(row.prompt_tokens, row.prompt_bytes) for row in found if row.prompt_tokens and row.prompt_bytes]
    tokens, size = sum(one for one, _ in told), sum(one for _, one in told)
    ratio = f"info.input_tokens of {len(told)} requests"
    facts = Facts(
        "inference_perf", "bytes", BLOCK_BYTES, tokens_per_byte=tokens / size if size else None, ratio_from=ratio
    )
    return facts, found


def _lifecycle(entry: Row, recorded: Recorded) -> Exchange:
    info = entry.get("info") or {}
    try:
        row = recorded.asked(0, number(entry, "start_time"), {}, text(entry, "request").encode()).row
    except ValueError as error:
        raise error if isinstance(error, Malformed) else Malformed(f"request is no JSON ({error})") from error
    row.status, row.end_s = "failed" if entry.get("error") else "completed", number(entry, "end_time")
    row.prompt_tokens, row.output_tokens = info.get("input_tokens"), info.get("output_tokens")
    times = info.get("output_token_times") or [None]
    row.first_token_s = times[0]
    return row


def aiperf(reader: Reader, salt: Salt) -> Read:
    return Facts("aiperf", hashes="none", rule=AIPERF_RULE), list(reader.entries(lambda line: _profiled(line, salt)))


def _profiled(line: Row, salt: Salt) -> Exchange:
    about, metrics = line.get("metadata"), line.get("metrics")
    if not isinstance(about, Mapping) or not isinstance(metrics, Mapping):
        raise Malformed("it has no metadata or no metrics")
    values: dict[str, Any] = {name: one.get("value") for name, one in metrics.items() if isinstance(one, Mapping)}
    row = Exchange(0, number(about, "request_start_ns") / 1e9, status="completed")
    row.status = "failed" if line.get("error") else "cancelled" if about.get("was_cancelled") else "completed"
    row.end_s = number(about, "request_end_ns") / 1e9 if about.get("request_end_ns") is not None else None
    if row.status == "completed" or "input_sequence_length" in values:
        row.prompt_tokens = whole(values, "input_sequence_length", 1)
    row.output_tokens = whole(values, "output_sequence_length") if "output_sequence_length" in values else None
    if values.get("time_to_first_token") is not None and row.arrival_s is not None:
        row.first_token_s = row.arrival_s + number(values, "time_to_first_token") / 1e3
    if about.get("x_correlation_id"):
        row.session, row.session_from = salt.name(str(about["x_correlation_id"])), "source"
    return row


SERVED: dict[str, tuple[Callable[[Reader, Salt], Read], set[str]]] = {
    "lmcache_lookup": (lmcache_lookup, {"timestamp", "request_id", "chunk_size", "seq_len", "chunk_hashes"}),
    "sglang_dump": (sglang_dump, set()),
    "inference_perf": (inference_perf, {"start_time", "end_time", "request", "info"}),
    "aiperf": (aiperf, {"metadata", "metrics"}),
    "vllm_events": (vllm_events, set()),
}
"""How each is read, raising MalformedInput, and what its first entry has."""
