"""The file of recorded traffic, Parquet with a row a request: its columns, facts and salted hashes, reader and writer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pensieve.core.request import TokenArray
from pensieve.errors import MalformedInput

VERSION = 1
KEY = b"pensieve.traffic"
"""Of the Parquet file's own metadata: the Facts, as JSON."""
GROUP_ROWS = 4096
"""Rows a row group: what a reader has in memory at once."""

TOKEN_BYTES = 4
BLOCK_TOKENS, BLOCK_BYTES = 16, 64
"""A block of a recording, in tokens where these are known, else in bytes."""

BYTES_PER_TOKEN = 4  # where nobody tells

Status = Literal["completed", "failed", "cancelled", "unfinished"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for a whole file.

    source: proxy, serve, or the format that was imported. unit, block: a block is so many tokens, or bytes of the rendered
    prompt; block None: none are hashed, or each row says (`lengths`). hashes: content: of a block alone; prefix: of it and
    all before it. tokens_per_byte, ratio_from: of the file, and what it was made of. engine: what is known of who served:
    name, version, gpu_tokens, cpu_tokens, block_tokens, policy. started_unix_s: second 0; one_clock: every arrival is by
    the file's clock, not by its session's own. lost: how many requests were not recorded, by reason. complete: the
    recording ended, it was not killed. rule: which requests are a session, where the source does not say.
    """

    source: str
    unit: Literal["tokens", "bytes"] = "tokens"
    block: int | None = None
    hashes: Literal["content", "prefix", "none"] = "content"
    tokens_per_byte: float | None = None
    ratio_from: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    started_unix_s: float | None = None
    one_clock: bool = True
    lost: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    rule: str = ""
    version: int = VERSION

    @property
    def block_tokens(self) -> float | None:
        """Tokens a block, a fraction where blocks are bytes. None: see `block`."""
        if self.block is None:
            return None
        return (
            float(self.block) if self.unit == "tokens" else self.block * (self.tokens_per_byte or 1 / BYTES_PER_TOKEN)
        )


@dataclass(slots=True)
class Exchange:
    """A request and what came of it: a row. None: not known."""

    request: int  # its number, unique in the file
    arrival_s: float | None = None  # when it came, by the file's clock; the source may have no times
    first_token_s: float | None = None  # when the first token of its reply was there
    end_s: float | None = None  # when its reply ended
    status: Status = "unfinished"  # still open where the recording ends
    finish_reason: str | None = None  # why its reply ended, in the server's word
    session: str | None = None  # its conversation; not said: the prefix chain tells
    session_from: str | None = None  # who said so: header, body, user, ..., or the source
    parent: int | None = None  # the request that it goes on from, where that was said
    kept_tokens: int | None = None  # leading tokens that are its parent's prompt and reply
    pause_s: float | None = None  # from its parent's reply to it, where the source says it itself
    waits_for: Sequence[str] | None = None  # sessions that had to be over before it
    tenant: str | None = None  # whose key it came with
    model: str | None = None  # the model that was asked for
    replica: str | None = None  # which server answered, where there are several
    prompt_tokens: int | None = None  # length of its prompt, as the server says
    output_tokens: int | None = None  # length of its reply, as the server says
    prompt_bytes: int | None = None  # length of its rendered prompt, where blocks are bytes
    output_bytes: int | None = None  # length of its rendered reply, where blocks are bytes
    cached_tokens: int | None = None  # prompt tokens that the server says it found in its cache
    cached_gpu_tokens: int | None = None  # of these, on the GPU, where tiers are told apart
    cached_cpu_tokens: int | None = None  # of these, in CPU memory
    cached_disk_tokens: int | None = None  # of these, on disk or another machine
    blocks: Sequence[int] | None = None  # of each full block of its prompt; perhaps one more for the rest
    lengths: Sequence[int] | None = None  # tokens of each of these, where they differ
    output_blocks: Sequence[int] | None = None  # of prompt and reply, from where `blocks` ends on


_KINDS = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "Status": pa.string()}
_KINDS |= {"Sequence[int]": pa.list_(pa.int64()), "Sequence[str]": pa.list_(pa.string())}
COLUMNS = {one.name: _KINDS[str(one.type).removesuffix(" | None")] for one in dataclasses.fields(Exchange)}
SCHEMA = pa.schema(list(COLUMNS.items()))


class Salt:
    """A secret that is never written: whoever lacks it learns nothing of what was said. key: for tests, and to give two files
    one salt."""

    def __init__(self, key: bytes | None = None) -> None:
        self._keyed = hashlib.blake2b(key=os.urandom(32) if key is None else key, digest_size=8)

    def blocks(self, data: bytes, size: int, first: int = 0) -> TokenArray[int]:
        """A signed number of 64 bits for each full block of `size` bytes, from block `first` on."""
        digests = bytearray()
        for start in range(first * size, len(data) - size + 1, size):
            keyed = self._keyed.copy()
            keyed.update(data[start : start + size])
            digests += keyed.digest()
        return array("q", bytes(digests))

    def number(self, one: object) -> int:
        """A number for a source's own hash."""
        return int.from_bytes(self._of(str(one)).digest(), "big", signed=True)

    def name(self, text: str) -> str:
        return self._of(text).hexdigest()

    def _of(self, text: str) -> hashlib.blake2b:
        keyed = self._keyed.copy()
        keyed.update(text.encode("utf-8", "replace"))
        return keyed


def with_ratio(facts: Facts, rows: Iterable[Exchange], told_by: str) -> Facts:
    """With the tokens of a byte, by the requests of which somebody has told the tokens; without any it is assumed."""
    told = [(row.prompt_tokens, row.prompt_bytes) for row in rows if row.prompt_tokens and row.prompt_bytes]
    if not told:
        ratio_from = f"assumed: {BYTES_PER_TOKEN} bytes a token"
        return dataclasses.replace(facts, tokens_per_byte=1 / BYTES_PER_TOKEN, ratio_from=ratio_from)
    tokens, size = (sum(column) for column in zip(*told, strict=True))
    return dataclasses.replace(facts, tokens_per_byte=tokens / size, ratio_from=f"{told_by} of {len(told)} requests")


def ends_of(one: Exchange, facts: Facts) -> NDArray[np.int64]:
    """Where its prompt's blocks end, in tokens: where blocks are equally long, of the place in a prompt alone, so that what
    two prompts begin with is equally long in both."""
    if one.lengths is not None:
        return np.cumsum(np.array(one.lengths, dtype=np.int64))
    return edges(len(one.blocks or ()), facts.block_tokens or 0.0)[1:]


def edges(count: int, block_tokens: float) -> NDArray[np.int64]:
    """Where `count` blocks begin, and where the last one ends, in tokens."""
    return (block_tokens * np.arange(count + 1)).astype(np.int64)


def write(path: Path, facts: Facts, exchanges: Iterable[Exchange]) -> None:
    """Write the file under another name, then give it its own: nobody finds half of it. exchanges: in order of arrival, of
    which GROUP_ROWS are in memory. Raises OSError."""
    schema = SCHEMA.with_metadata({KEY: json.dumps(dataclasses.asdict(facts)).encode()})
    unready = path.with_name(f"{path.name}.unready")
    try:
        with pq.ParquetWriter(unready, schema, compression="zstd") as writer:
            rows = iter(exchanges)
            while group := list(islice(rows, GROUP_ROWS)):
                columns = [pa.array([getattr(one, name) for one in group], schema.field(name).type) for name in COLUMNS]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        os.replace(unready, path)
    finally:
        unready.unlink(missing_ok=True)


def is_traffic(path: Path) -> bool:
    """Whether it begins as Parquet does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def read_facts(path: Path) -> Facts:
    """Raises MalformedInput for a file that is no recorded traffic, or of a version not known here."""
    return _opened(path)[1]


def read_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows in order of arrival, at most GROUP_ROWS at once. Raises MalformedInput."""
    file, _ = _opened(path)
    try:
        yield from file.iter_batches(GROUP_ROWS, columns=list(columns or COLUMNS))
    except (pa.ArrowException, OSError) as error:
        raise MalformedInput(
            f"{path} ends early or is damaged ({error}); record it again, or copy it again."
        ) from error


def read(path: Path) -> Iterator[Exchange]:
    """The rows in order of arrival. Raises MalformedInput."""
    for batch in read_batches(path):
        yield from exchanges(batch)


def exchanges(batch: pa.RecordBatch) -> Iterator[Exchange]:
    """The rows of a batch with all columns."""
    blocks, output_blocks = (_arrays(batch.column(name)) for name in ("blocks", "output_blocks"))
    for place, row in enumerate(batch.drop_columns(["blocks", "output_blocks"]).to_pylist()):
        one = Exchange(**row)
        one.blocks, one.output_blocks = blocks[place], output_blocks[place]
        yield one


def _arrays(column: pa.ListArray) -> list[TokenArray[int] | None]:
    """Lists of numbers, eight bytes each."""
    values, starts = column.values.to_numpy(), column.offsets.to_numpy()
    return [
        array("q", values[starts[place] : starts[place + 1]].tobytes()) if known else None
        for place, known in enumerate(column.is_valid().to_pylist())
    ]


def _opened(path: Path) -> tuple[pq.ParquetFile, Facts]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise MalformedInput(f"{path} cannot be read as Parquet ({error}); give a file of pensieve record.") from error
    found = (file.schema_arrow.metadata or {}).get(KEY)
    lacking = [name for name in COLUMNS if name not in file.schema_arrow.names]
    if found is None or lacking:
        what = f"the columns {', '.join(lacking)}" if lacking else f"the metadata {KEY.decode()}"
        raise MalformedInput(f"{path} is Parquet and no recorded traffic: it lacks {what}.")
    facts = json.loads(found)
    if facts.get("version") != VERSION:
        raise MalformedInput(
            f"{path} is of version {facts.get('version')}, and version {VERSION} is known here; record it again."
        )
    return file, Facts(**facts)
