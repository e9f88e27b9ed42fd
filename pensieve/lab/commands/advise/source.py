"""What is advised on: the rows of a recording, whose conversations they are, and the same as conversations to replay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from pensieve.errors import ConfigError
from pensieve.lab.traffic.hashing import Salt
from pensieve.lab.traffic.table import Exchange, Facts, exchanges, is_traffic, read_batches, read_facts
from pensieve.lab.workload.base import uniform
from pensieve.lab.workload.formats import load, served_rows
from pensieve.lab.workload.formats.traffic import asked_in, conversations_of, converted
from pensieve.lab.workload.recording import Conversation
from pensieve.lab.workload.trace import without_outliers

MOST_REQUESTS = 50_000
"""In memory at once: of a longer recording whole conversations are drawn; without names, its first requests are read."""


@dataclass(frozen=True, slots=True)
class Source:
    """rows: in order of arrival, each with its conversation. named: the recording says which requests are one. in_file: all
    requests of the file. strays: requests whose time lies far from all others, left out."""

    path: Path
    facts: Facts
    rows: Sequence[tuple[Exchange, str]]
    conversations: Sequence[Conversation]
    named: bool
    in_file: int
    strays: int = 0

    def only(self, conversations: Sequence[Conversation]) -> Source:
        names = {one.id for one in conversations}
        return replace(self, rows=[row for row in self.rows if row[1] in names], conversations=conversations)


def open_source(path: Path, format: str | None) -> Source:
    """Raises ConfigError for a recording that lacks what advice needs, MalformedInput for one that cannot be read."""
    if is_traffic(path):
        facts = read_facts(path)
        found, in_file = _read(path)
        named = all(one.session is not None for one in found)
    elif told := served_rows(path, format, Salt()):
        facts, found = told
        named, in_file = all(one.session is not None for one in found), len(found)
    else:
        recording = load(path, format, "skip")
        facts, rows = converted(recording, Salt())
        found, in_file = list(rows), recording.requests
        named = "shared_prefix_blocks" not in recording.facts
    asked = asked_in(found, facts)
    conversations: Sequence[Conversation] = conversations_of(asked, facts)
    lacking = [
        name
        for name, there in (
            ("times of arrival", facts.one_clock and any(one.arrival_s is not None for one in asked)),
            ("hashes of blocks", any(one.blocks for one in asked)),
        )
        if not there
    ]
    if lacking:
        raise ConfigError(
            f"{path.name} has no {' and no '.join(lacking)}, and without that nobody can tell what a cache would find; "
            "record the traffic with pensieve record."
        )
    names = {call.order: one.id for one in conversations for call in one.calls}
    conversations, strays = without_outliers(conversations, "skip", str(path))
    kept = {call.order for one in conversations for call in one.calls} if strays else names.keys()
    kept_rows = [(one, names[place]) for place, one in enumerate(asked) if place in kept]
    return Source(path, facts, kept_rows, conversations, named, in_file, strays)


def _read(path: Path) -> tuple[list[Exchange], int]:
    """The rows that fit into memory, and how many there are. What two tenants sent is made different: neither finds anything
    of the other."""
    in_file = sum(batch.num_rows for batch in read_batches(path, ["request"]))
    share = MOST_REQUESTS / max(1, in_file)
    found: list[Exchange] = []
    for batch in read_batches(path):
        if share < 1.0:
            chosen = [
                len(found) < MOST_REQUESTS if name is None else uniform(0, "advise", name) < share
                for name in batch.column("session").to_pylist()
            ]
            batch = batch.filter(pa.array(chosen))
        found += exchanges(batch)
    if len({one.tenant for one in found}) > 1:
        for one in found:
            one.session = None if one.session is None else f"{one.tenant}/{one.session}"
            one.blocks, one.output_blocks = (
                None if blocks is None else array("q", [hash((one.tenant, block)) for block in blocks])
                for blocks in (one.blocks, one.output_blocks)
            )
    return found, in_file
