"""vLLM's KV events and its request log: the log says what was asked, the events which blocks each request had to compute.

A request stores each full block of its prompt that it did not find, in order. So its first stored block says what it found on
the device, and of what follows the blocks that lay in the CPU tier at that moment were loaded from there.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.traffic.table import TOKEN_BYTES, Exchange, Facts, Salt
from pensieve.lab.workload.formats.reading import Reader, seconds
from pensieve.lab.workload.recording import chain

RULE = (
    "Arrivals are the log's: to the second, unless its format has fractions, and spread evenly within one. A first token is "
    "the step that stored the last full block of its prompt. A reply has the length that the log says, else max_tokens."
)
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium")
_LINE = re.compile(
    r"((?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?).*?\b(?:Request|Received request|Generated response) (\S+?):? "
)
_PROMPT, _REPLY = (
    re.compile(r"\bprompt_token_ids: \[([\d, ]*)\]"),
    re.compile(r"\boutput_token_ids: [\[(]([\d, ]*)[\])]"),
)
_CAP, _REASON = re.compile(r"\bmax_tokens=(\d+)"), re.compile(r"finish_reason: (\w+)$")
_QUARTER_S = 900


@dataclass(slots=True)
class _Asked:
    """A request of the log. start: of its prompt's blocks, the first that it stored; next: the one that it stores next; tip:
    the chain number of the last one. first_s: when it stored the first. loaded: blocks that came from the CPU tier."""

    row: Exchange
    chain: list[int]
    block: int
    start: int | None = None
    first_s: float = inf
    next: int = 0
    tip: int = 0
    loaded: int = 0
    computes: bool = False

    def replies(self, numbers: list[int]) -> bool:
        """Whether this may be a block of its reply: they come one at a time, and not more than it has tokens."""
        size, row = len(self.chain), self.row
        room = ((row.prompt_tokens or 0) + (row.output_tokens or 0) - 1) // self.block
        return len(numbers) == 1 and (self.start is None or size <= self.next) and max(size, self.next) < room

    def found_all(self, begun: int, at_s: float) -> bool:
        return self.start is None and self.row.request >= begun and (self.row.arrival_s or 0.0) // 1 <= at_s

    def comes_after(self, other: _Asked, at_s: float) -> bool:
        """It has begun nothing, and the log's second does not say that it was there by then."""
        later = self.row.request > other.row.request
        return later and self.start is None and (self.row.arrival_s or 0.0) // 1 + 1 > at_s


@dataclass(slots=True)
class Events:
    """What the events say, with hashes in place of tokens. Blocks are named by a number for them and all before them."""

    salt: Salt
    block: int | None = None
    chain: dict[Any, tuple[int, int]] = field(
        default_factory=dict
    )  # of vLLM's hash: our number, and of the block alone
    taken: list[tuple[float, str, str, list[int], int, str | None]] = field(default_factory=list)

    def take(self, batch: Any) -> None:
        """A batch as vLLM publishes it: time, events, rank. Raises ValueError."""
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            raise ValueError("it is no batch of a time and a list of events")
        for event in batch[1]:
            kind = event.get("type") if isinstance(event, Mapping) else None
            if kind not in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
                raise ValueError(f"{kind!r} is no event of vLLM's cache: it has no type that is known here")
            wanted = {"BlockStored": STORED, "BlockRemoved": ("block_hashes", "medium")}.get(kind, ())
            if lacking := [name for name in wanted if name not in event]:
                raise ValueError(f"a {kind} lacks {', '.join(lacking)}")
            if event.get("group_idx") or event.get("kv_cache_spec_kind") not in (None, "full_attention"):
                continue  # of another kind of layer, which has blocks of its own
            numbers, parent = self._stored(event) if kind == "BlockStored" else ([], 0)
            if kind == "BlockRemoved":
                numbers = [self.chain[one][0] for one in event["block_hashes"] if one in self.chain]
            self.taken.append((batch[0], kind, event.get("medium") or "GPU", numbers, parent, event.get("session_id")))

    def _stored(self, event: Mapping[str, Any]) -> tuple[list[int], int]:
        hashes, size, parent = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        if event["token_ids"]:
            self.block = self.block or size
            data = array("i", event["token_ids"]).tobytes()
            contents = self.salt.blocks(data, size * TOKEN_BYTES)
            if size != self.block or len(contents) != len(hashes):
                raise ValueError(
                    f"a BlockStored has {len(hashes)} block_hashes and token_ids for {len(contents)} of {size}"
                )
            if parent is None or parent in self.chain:
                number = self.chain[parent][0] if parent is not None else 0
                for one, content in zip(hashes, contents, strict=True):
                    number = hash((number, content))
                    self.chain[one] = number, content
        known = [self.chain[one][0] for one in hashes if one in self.chain]  # others: from before anybody listened
        return known, self.chain[parent][0] if parent in self.chain else 0


def vllm_events(reader: Reader, salt: Salt) -> tuple[Facts, list[Exchange]]:
    """The path is a folder with vLLM's log (*.log) and its events: *.msgpack, the payloads one after another, or *.jsonl, a
    batch a line."""
    events = Events(salt)
    files = [file for pattern in ("*.msgpack", "*.jsonl") for file in sorted(reader.path.glob(pattern))]
    for file in files:
        batches = ((f"{file}: batch {place}", batch) for place, batch in enumerate(_batches(file), start=1))
        for _ in reader.parsed(batches, events.take):
            pass
    return joined(events, reader.files("*.log"))


def joined(events: Events, logs: Iterable[Path]) -> tuple[Facts, list[Exchange]]:
    """The log's requests with what the events say of them, in order of arrival. Raises MalformedInput for a log without
    requests, or events of no block."""
    if events.block is None:
        raise MalformedInput(
            "The events lack BlockStored with token_ids; start vLLM with --kv-events-config and enable_kv_cache_events."
        )
    asked = [one for file in logs for one in _asked(file, events.salt, events.block)]
    if not asked:
        raise MalformedInput(
            "The log lacks prompt_token_ids; start vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG."
        )
    _align(asked, events)
    strays = _walk(asked, events)
    latest_s = inf
    for one in reversed(asked):  # none came after its own first block, or after one that is later in the log
        latest_s = one.row.arrival_s = min(one.row.arrival_s or 0.0, one.first_s, latest_s)
    for one in asked:
        row, size = one.row, events.block
        on_device = size * (one.start if one.start is not None else len(one.chain))
        row.cached_tokens = min(on_device + size * one.loaded, (row.prompt_tokens or 1) - 1)
        if one.start is None:  # all was found; the last token is computed all the same, and with it its block
            row.cached_tokens = row.cached_tokens // size * size
        row.cached_gpu_tokens = min(on_device, row.cached_tokens)
        row.cached_cpu_tokens = row.cached_tokens - row.cached_gpu_tokens
    lost = {"events_of_no_request": strays} if strays else {}
    engine = {"name": "vllm", "block_tokens": events.block}
    return Facts("vllm_events", block=events.block, engine=engine, lost=lost, rule=RULE), [one.row for one in asked]


def _batches(file: Path) -> Iterator[Any]:
    try:
        if file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
            return
        with file.open("rb") as payloads:
            yield from _msgpack().Unpacker(payloads, raw=False)
    except (ValueError, OSError) as error:
        raise MalformedInput(
            f"{file} cannot be read as vLLM's events ({error}); write each payload as it comes."
        ) from error


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise ConfigError("vLLM's events are msgpack; pip install 'pensieve-lab[vllm-events]' reads them.") from error
    return msgpack


def listen(address: str, events: Events, until: Any) -> None:
    """Take what vLLM publishes at this address until told. Tokens are hashed as they come."""
    msgpack = _msgpack()
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(address)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        while not until():
            if socket.poll(200):
                *_, payload = socket.recv_multipart()
                events.take(msgpack.unpackb(payload, raw=False))


def _asked(file: Path, salt: Salt, block: int) -> Iterator[_Asked]:
    """In the order of the log, with seconds of its own clock."""
    found: dict[str, _Asked] = {}
    order: list[_Asked] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            about = _LINE.search(line)
            if about is None:
                continue
            stamp, name = about[1], about[2]
            at_s = seconds(stamp if stamp[4] == "-" else f"1972-{stamp}")
            if prompt := _PROMPT.search(line):
                ids = [int(one) for one in prompt[1].split(",") if one.strip()]
                row = Exchange(len(order), at_s, status="completed", prompt_tokens=len(ids))
                row.blocks = salt.blocks(array("i", ids).tobytes(), block * TOKEN_BYTES)
                found[name] = _Asked(row, chain(row.blocks), block)
                order.append(found[name])
            elif name in found:
                row = found[name].row
                if reply := _REPLY.search(line):
                    row.output_tokens, row.end_s = reply[1].count(",") + bool(reply[1].strip()), at_s
                elif (cap := _CAP.search(line)) and row.output_tokens is None:
                    row.output_tokens = int(cap[1])
                if reason := _REASON.search(line):
                    row.finish_reason = reason[1]
    yield from order


def _align(asked: list[_Asked], events: Events) -> None:
    """The log's clock has no zone, and perhaps no year: it is set by the events', to quarters of an hour."""
    shift = round((events.taken[0][0] - (asked[0].row.arrival_s or 0.0)) / _QUARTER_S) * _QUARTER_S
    within: dict[float, list[Exchange]] = {}
    for one in asked:
        within.setdefault(one.row.arrival_s or 0.0, []).append(one.row)
    for second, rows in within.items():
        width = 1.0 if second.is_integer() else 0.0
        for place, row in enumerate(rows):
            row.arrival_s = second + shift + width * place / len(rows)
            row.end_s = None if row.end_s is None else row.end_s + shift


def _walk(asked: list[_Asked], events: Events) -> int:
    """Give each stored block to its request; returns how many had none."""
    holders: dict[int, list[_Asked]] = {}  # of a block: requests whose prompt has it, the latest last
    for one in asked:
        for number in one.chain:
            holders.setdefault(number, []).append(one)
    ends: dict[int, list[_Asked]] = {}  # by the last full block of the prompt
    for one in asked:
        if one.chain:
            ends.setdefault(one.chain[-1], []).append(one)
    content = dict(events.chain.values())
    growing: dict[tuple[int, str | None], _Asked] = {}  # by the last block of what it has so far: replies
    on_cpu: set[int] = set()
    strays = begun = 0
    for at_s, kind, medium, numbers, parent, session in events.taken:
        if kind == "AllBlocksCleared":
            on_cpu.clear()
        elif medium != "GPU":
            on_cpu = on_cpu | set(numbers) if kind == "BlockStored" else on_cpu - set(numbers)
        elif kind == "BlockStored" and numbers:
            mine, reply = _of(holders.get(numbers[0], ()), numbers, at_s, begun), growing.get((parent, session))
            if reply is None or not reply.replies(numbers):  # one that found its whole prompt
                reply = next((one for one in ends.get(parent, ()) if one.found_all(begun, at_s)), None)
            if reply is not None and reply.replies(numbers) and (mine is None or mine.comes_after(reply, at_s)):
                mine = reply
            if mine is None:
                strays += len(numbers)
                continue
            if session is not None:
                mine.row.session, mine.row.session_from = events.salt.name(session), "source"
            begun = max(begun, mine.row.request + 1)
            _stored(mine, numbers, at_s, on_cpu, content)
            growing[mine.tip, session] = mine
    return strays


def _of(holding: Iterable[_Asked], numbers: list[int], at_s: float, begun: int) -> _Asked | None:
    """Whose blocks these are: of the one that stores them next, else of the next in the queue, else of one before it, which
    waited for a load. begun: how many of the log's requests have begun, or were passed over since they found all."""
    fresh = passed = None
    for one in holding:
        at = one.chain.index(numbers[0])
        if one.chain[at : at + len(numbers)] != numbers or (one.row.arrival_s or 0.0) // 1 > at_s:
            continue
        if one.start is not None and one.next == at:
            return one
        if one.start is None and one.row.request >= begun:
            fresh = fresh or one
        elif one.start is None:
            passed = one
    return fresh or passed


def _stored(mine: _Asked, numbers: list[int], at_s: float, on_cpu: set[int], content: Mapping[int, int]) -> None:
    row, prompt = mine.row, len(mine.chain)
    if mine.start is None:
        mine.start = mine.next = mine.chain.index(numbers[0]) if numbers[0] in mine.chain else prompt
        mine.first_s = at_s
    for number in numbers:
        if mine.next < prompt:
            mine.computes = mine.computes or number not in on_cpu
            mine.loaded += not mine.computes
            if mine.computes and mine.next == prompt - 1:
                row.first_token_s = at_s
        else:
            row.output_blocks = [*(row.output_blocks or ()), content[number]]
        mine.next, mine.tip = mine.next + 1, number
