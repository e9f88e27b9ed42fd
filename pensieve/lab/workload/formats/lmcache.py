"""LMCache's lookup hashes: JSON lines with the hash of each full chunk that a request asked for."""

from __future__ import annotations

from pensieve.lab.traffic.hashing import Salt
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, number, text, whole

FIELDS = {"timestamp", "request_id", "chunk_size", "seq_len", "chunk_hashes"}
RULE = "A lookup is a request, the first of each request_id. It has no reply: set workload.max_new_tokens."


def rows(reader: Reader, salt: Salt) -> tuple[Facts, list[Exchange]]:
    """The path is one file, or the folder of them. Raises MalformedInput."""
    asked: dict[str, tuple[Exchange, int]] = {}
    for file in reader.files("lookup_hashes_*.jsonl"):
        for name, row, size in reader.json_lines(lambda line: _line(line, salt), file):
            asked.setdefault(name, (row, size))
    sizes = {size for _, size in asked.values()}
    for row, size in asked.values():
        if len(sizes) > 1:
            row.lengths = [size] * len(row.blocks or ())
    facts = Facts("lmcache_lookup", block=sizes.pop() if len(sizes) == 1 else None, hashes="prefix", rule=RULE)
    return facts, [row for row, _ in asked.values()]


def _line(line: Row, salt: Salt) -> tuple[str, Exchange, int]:
    hashes, size, tokens = line.get("chunk_hashes"), whole(line, "chunk_size", 1), whole(line, "seq_len", 1)
    if not isinstance(hashes, list) or len(hashes) * size > tokens:
        raise Malformed("chunk_hashes is not a list of as many chunks as seq_len holds")
    row = Exchange(0, number(line, "timestamp"), status="completed", prompt_tokens=tokens)
    row.model, row.blocks = str(line.get("model_name") or "") or None, [salt.number(one) for one in hashes]
    return text(line, "request_id"), row, size
