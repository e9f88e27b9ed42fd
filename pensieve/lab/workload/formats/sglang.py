"""SGLang's request dumps (dump_requests_folder): a pickle of requests with replies and times."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pensieve.errors import MalformedInput
from pensieve.lab.traffic.hashing import BLOCK_TOKENS, TOKEN_BYTES, Salt
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.formats.reading import Malformed, Reader

RULE = "Prompts are token ids as SGLang had them. A request that has text and no ids shares nothing that is known."


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


def rows(reader: Reader, salt: Salt) -> tuple[Facts, list[Exchange]]:
    """The path is one file, or the folder of them. Raises MalformedInput."""
    found: list[Exchange] = []
    for file in reader.files("*.pkl"):
        for place, record in enumerate(_records(file)):
            try:
                found.append(_row(record, salt))
            except Malformed as error:
                reader.reject(f"{file}: request {place}", str(error))
    return Facts("sglang_dump", block=BLOCK_TOKENS, engine={"name": "sglang"}, rule=RULE), found


def _records(file: Path) -> Iterable[Any]:
    try:
        with file.open("rb") as opened:
            dumped = _Unpickler(opened).load()
    except Exception as error:  # a damaged pickle raises any
        raise MalformedInput(f"{file} cannot be read as a dump of SGLang ({error!r}); give a .pkl of it.") from error
    records = dumped.get("requests") if isinstance(dumped, dict) else dumped
    if not isinstance(records, list):
        raise MalformedInput(f"{file} is no dump of SGLang: it lacks requests.")
    return records


def _row(record: Any, salt: Salt) -> Exchange:
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
