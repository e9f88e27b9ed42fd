"""RAGPulse: JSON lines with a time in seconds as text, two lengths, a session, and hashes of the prompt's components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, hash_list, number, text, whole
from pensieve.lab.workload.recording import Call, Conversation, Parts, Recording

COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
TRACE = "0_trace.jsonl"
LENGTHS = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}
"""Files of the folder with the tokens of each hash: a line holds this field and token_length."""

RULE = (
    "Requests with one session id are a conversation. Every request carries its whole prompt: system prompt, passages, "
    "history, web search, user input, in this order; equal hashes begin with equal tokens. {lengths}"
)
KNOWN = "The components' lengths are those published with the trace, the last one cut or prolonged to the input length."
UNKNOWN = (
    "The components' lengths were not given (the path is no folder with them): the input length is divided evenly."
)


@dataclass(frozen=True, slots=True)
class _Line:
    at_s: float
    session: str
    input_length: int
    output_length: int
    hashes: tuple[int, ...]


def read(reader: Reader) -> Recording:
    """The path is the trace alone, or the folder that holds it and the lengths (a configuration is identified by the
    content of its path, so files that merely lie beside a trace are not read).
    """
    lengths = _lengths(reader)
    file = reader.path / TRACE if reader.path.is_dir() else reader.path
    lines = sorted(reader.json_lines(_line, file), key=lambda line: line.at_s)
    first = lines[0].at_s if lines else 0.0
    calls: dict[str, list[Call]] = {}
    for order, line in enumerate(lines):
        parts = Parts(pieces(line.hashes, line.input_length, lengths))
        calls.setdefault(line.session, []).append(
            Call(parts, line.output_length, line.at_s - first, continues=False, order=order)
        )
    return reader.recording(
        format="ragpulse",
        conversations=tuple(Conversation(f"ragpulse-{session}", tuple(each)) for session, each in calls.items()),
        rule=RULE.format(lengths=KNOWN if lengths else UNKNOWN),
    )


def pieces(hashes: tuple[int, ...], tokens: int, lengths: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """(hash, tokens) of each component, `tokens` in all: of known length, or even shares of what is left to divide."""
    found: list[tuple[int, int]] = []
    left = tokens
    for place, one in enumerate(hashes):
        last = place == len(hashes) - 1
        share = left if last else min(left, lengths.get(one, left // (len(hashes) - place)))
        if share:
            found.append((one, share))
        left -= share
    return tuple(found)


def _lengths(reader: Reader) -> dict[int, int]:
    known: dict[int, int] = {}
    for name, field in LENGTHS.items():
        file = reader.path / name
        if file.is_file():
            known.update(reader.json_lines(partial(_length, field), file))
    return known


def _length(field: str, row: Row) -> tuple[int, int]:
    return whole(row, field), whole(row, "token_length")


def _line(row: Row) -> _Line:
    components = row.get("hash_ids")
    if not isinstance(components, Mapping):
        raise Malformed("hash_ids is not an object of components")
    hashes = tuple(one for name in COMPONENTS if name in components for one in hash_list(components, name))
    if not hashes:
        raise Malformed("hash_ids names no component")
    return _Line(
        number(row, "timestamp"), text(row, "session_id"), whole(row, "input_length", 1),
        whole(row, "output_length"), hashes,
    )  # fmt: skip
