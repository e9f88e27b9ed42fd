"""Result files of load generators: inference-perf's per_request_lifecycle_metrics.json and AIPerf's profile_export.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.lab.traffic.hashing import BLOCK_BYTES, Salt
from pensieve.lab.traffic.openai import Recorded
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, number, text, whole

INFERENCE_PERF = {"start_time", "end_time", "request", "info"}
AIPERF = {"metadata", "metrics"}
AIPERF_RULE = "Prompts are known by their length alone, so no two share anything. x_correlation_id is the session."


def inference_perf(reader: Reader, salt: Salt) -> tuple[Facts, list[Exchange]]:
    """Raises MalformedInput."""
    recorded = Recorded(salt, "bytes", BLOCK_BYTES)
    found = list(reader.json_list(lambda entry: _lifecycle(entry, recorded)))
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


def aiperf(reader: Reader, salt: Salt) -> tuple[Facts, list[Exchange]]:
    """Raises MalformedInput."""
    return Facts("aiperf", hashes="none", rule=AIPERF_RULE), list(reader.json_lines(lambda line: _profiled(line, salt)))


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
