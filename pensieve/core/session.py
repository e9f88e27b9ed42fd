"""A conversation as the engine holds it: its tokens, how far they were computed, and a record of each chunk's KV."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from pensieve.core.request import Hint, TokenArray

Run = tuple[int, int]
"""Half-open interval of positions."""

ChunkRun = tuple[int, int]
"""Half-open interval of a session's chunks, by index."""

BlockHash = bytes
"""Of all tokens from the first position to the end of a full block."""


class View(IntEnum):
    """What eviction may do with a chunk; kept in its record so that leaving a victim index needs no search.

    DIRTY: only on GPU; may be copied out. CLEAN: also on CPU; its GPU block may be taken at once. CPU_ONLY: its CPU block
    may be taken, and the KV is then lost. NONE: nothing, since its session runs, a copy of it is under way, or it has no KV.
    """

    NONE = 0
    DIRTY = 1
    CLEAN = 2
    CPU_ONLY = 3


NO_BLOCK = -1
"""In a column of block numbers: the chunk has none in that tier."""

NO_BLOCKS, NOTHING = array("i", (NO_BLOCK,)), array("i", (0,))
"""Columns of one chunk without a block, and without KV; times n: of n chunks."""


class Chunks:
    """The records of consecutive chunks of a session: a column for each field, a row for each chunk.

    A long session has thousands of chunks, and hundreds of them change their state together. In columns a run of them
    is a slice, which is copied, counted and searched at memory speed; `chunks[i]` is one of them alone (Chunk).

    Offsets [0, gpu_len) of a chunk have KV in block `gpu`, offsets [0, cpu_len) in block `cpu`. copying: open tickets that
    read or write it. A GPU block with gpu_len 0 is reserved: taken at admission, its KV not computed yet. core/cache/tiers.py
    draws the states and alone changes them.
    """

    __slots__ = ("copying", "cpu", "cpu_len", "gpu", "gpu_len", "view")

    def __init__(self, count: int = 0) -> None:
        self.gpu: TokenArray[int] = array("i")
        self.gpu_len: TokenArray[int] = array("i")
        self.cpu: TokenArray[int] = array("i")
        self.cpu_len: TokenArray[int] = array("i")
        self.copying = bytearray()
        self.view = bytearray()
        self.add(count)

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> Chunk:
        gpu, cpu = (None if block == NO_BLOCK else block for block in (self.gpu[index], self.cpu[index]))
        return Chunk(gpu, self.gpu_len[index], cpu, self.cpu_len[index], self.copying[index], View(self.view[index]))

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.__getitem__, range(len(self.view)))

    def add(self, count: int) -> None:
        """Append `count` chunks without blocks."""
        for blocks, lengths in ((self.gpu, self.gpu_len), (self.cpu, self.cpu_len)):
            blocks.extend(NO_BLOCKS * count)
            lengths.extend(NOTHING * count)
        self.copying.extend(bytes(count))
        self.view.extend(bytes(count))

    @classmethod
    def joined(cls, parts: Iterable[Chunks]) -> Chunks:
        """Return a copy of these, one after the other."""
        found = cls()
        for part in parts:
            for name in cls.__slots__:
                getattr(found, name).extend(getattr(part, name))
        return found

    def cut(self, first: int) -> None:
        """Delete the chunks from `first` on."""
        del self.gpu[first:], self.gpu_len[first:], self.cpu[first:], self.cpu_len[first:]
        del self.copying[first:], self.view[first:]

    def take(self, index: int, other: Chunks) -> None:
        """Take over blocks and KV of another session's chunk of the same index, which has lost them then."""
        for name in ("gpu", "gpu_len", "cpu", "cpu_len"):
            getattr(self, name)[index] = getattr(other, name)[index]
        other.gpu[index] = other.cpu[index] = NO_BLOCK
        other.gpu_len[index] = other.cpu_len[index] = 0

    def without_gpu(self) -> list[ChunkRun]:
        """Runs of chunks that have no GPU block."""
        column = self.gpu
        lacking = column.count(NO_BLOCK)
        if not lacking or lacking == len(column):
            return [(0, lacking)] if lacking else []
        return runs_of(index for index, block in enumerate(column) if block == NO_BLOCK)


class Chunk(NamedTuple):
    """One row of Chunks: the KV of `chunk_tokens` positions of one session, all layers (paper section 4.3.1); the last
    chunk of a session may be partly filled."""

    gpu: int | None
    gpu_len: int
    cpu: int | None
    cpu_len: int
    copying: int
    view: View

    @property
    def resident_len(self) -> int:
        """Leading offsets that have KV in either tier."""
        return max(self.gpu_len, self.cpu_len)


class Node:
    """Chunks [start, start + len(chunks)) of a session, and where their KV is: what tiers and victim indices know. A
    session that shares nothing has one, its leaf; else its leaf is the last, and no other session has it.

    session: whom the policy is asked about. running: how many requests use it now. waiting: how many sessions that have it
    are waited for, as far as that is counted (Stem). parent: the node before it. findable: how many of a leaf's chunks others
    can find, by the name `key` of the first.
    """

    __slots__ = ("chunks", "findable", "key", "number", "parent", "running", "session", "start", "waiting")

    def __init__(self, number: int, session: Session) -> None:
        self.number, self.session = number, session
        self.start = self.running = self.waiting = self.findable = 0
        self.chunks = Chunks()
        self.parent: Stem | None = None
        self.key: BlockHash | None = None

    def named(self, stop: int, chunk_tokens: int) -> Sequence[BlockHash]:
        """Return the names by content of its full chunks in [0, stop) that were computed."""
        known = self.session.named(min((self.start + stop) * chunk_tokens, self.session.computed), chunk_tokens)
        return known[self.start :]

    @property
    def users(self) -> tuple[Session, ...]:
        """The sessions that run on it."""
        return (self.session,) if self.running else ()


class Stem(Node):
    """A node that several sessions have, or had: full chunks, known by what is said in them.

    names: of its chunks. children: the nodes that follow it, by the name of their first chunk. holders: the sessions that
    have it, by number, the one that ran last at the end; that one is `session`.
    """

    __slots__ = ("children", "holders", "names")

    def __init__(self, number: int, session: Session, names: list[BlockHash]) -> None:
        super().__init__(number, session)
        self.names = names
        self.children: dict[BlockHash, Node] = {}
        self.holders: dict[int, Session] = {}

    @property
    def stop(self) -> int:
        return self.start + len(self.names)

    def named(self, stop: int, chunk_tokens: int) -> Sequence[BlockHash]:
        return self.names[:stop]

    @property
    def users(self) -> tuple[Session, ...]:
        return tuple(session for session in self.holders.values() if session.running)


@dataclass(slots=True, eq=False)
class Session:
    """A conversation as the engine holds it. Its methods alone write `tokens`, `computed`, `waiting` and `running`.

    tokens: all that was said so far. computed: KV of positions [0, computed) has been computed for these very tokens, whether
    or not it is still there. number: counts sessions from the first; breaks ties between equally good victims.
    last_active_s: when a request of it last started or ended. next_use_s: when it is asked again, where the schedule knows
    (offline policies only). waiting: of its requests that wait, preempted ones included, the places in the order of arrival,
    ascending. running: a request of it runs; at most one does. turns: that were asked of it, whatever became of them.
    tenant: it shares no KV with sessions of others. hint: what its client said of the time after its last reply; None:
    nothing, or that turn did not come to its end. It stands until the next turn is over. memo: what the eviction policy has
    noted of it.
    """

    name: str
    number: int
    created_s: float
    last_active_s: float
    tokens: TokenArray[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    leaf: Node = field(init=False)
    next_use_s: float | None = None
    waiting: tuple[int, ...] = ()
    running: bool = False
    turns: int = 0
    tenant: str = ""
    hint: Hint | None = None
    memo: Any = None
    _names: HashChain | None = None

    def __post_init__(self) -> None:
        self.leaf = Node(self.number, self)

    def close(self) -> None:
        """Let go of its chunks. The two have each other: apart they need no collector."""
        del self.leaf

    @property
    def chunks(self) -> Chunks:
        """The records of all its chunks; a copy of them where it has several nodes."""
        return self.leaf.chunks if self.leaf.parent is None else Chunks.joined(node.chunks for node in self.nodes())

    def nodes(self) -> list[Node]:
        """All that have its chunks, in order."""
        leaf = self.leaf
        if leaf.parent is None:
            return [leaf]
        return [*self.stems(), leaf]

    def stems(self) -> list[Stem]:
        """Its nodes that others may have too, in order."""
        found, stem = [], self.leaf.parent
        while stem is not None:
            found.append(stem)
            stem = stem.parent
        return found[::-1]

    def in_nodes(self, runs: Iterable[ChunkRun]) -> list[tuple[Node, int, int]]:
        """These chunks, all of which it has, as runs of its nodes' chunks."""
        leaf = self.leaf
        if leaf.parent is None:
            return [(leaf, start, stop) for start, stop in runs]
        found: list[tuple[Node, int, int]] = []
        stems = self.stems()
        for start, stop in runs:
            found += [
                (stem, max(start, stem.start) - stem.start, min(stop, stem.stop) - stem.start)
                for stem in stems
                if start < stem.stop and stem.start < stop
            ]
            if leaf.start < stop:
                found.append((leaf, max(start, leaf.start) - leaf.start, stop - leaf.start))
        return found

    def append(self, token: int) -> None:
        """Add a token that was generated."""
        self.tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the tokens of a message."""
        self.tokens.extend(tokens)

    def begin(self, tokens: TokenArray[int], computed: int) -> None:
        """Begin this new session with tokens that were computed up to there, by another session or an earlier engine; the
        last one is computed anew."""
        assert not self.tokens
        self.tokens.extend(tokens)
        self.computed = min(computed, max(len(tokens) - 1, 0))

    def named(self, length: int, chunk_tokens: int) -> list[BlockHash]:
        """Return the names by content of the full blocks in [0, length)."""
        if self._names is None:
            self._names = HashChain(chunk_tokens, self.tenant)
        return self._names.upto(self.tokens, length)

    def name_known(self, index: int) -> BlockHash | None:
        """Return the name of full block `index` if somebody has asked for it, else None. Any thread may ask."""
        known = [] if self._names is None else self._names.hashes
        return known[index] if index < len(known) else None

    def advance(self, stop: int) -> None:
        """Record that the plan being made computes positions up to `stop`."""
        if stop > self.computed:
            self.computed = stop

    def rollback(self, length: int, computed: int | None = None) -> None:
        """Keep the first `length` tokens only. computed: how far they were computed at the time that is returned to; None:
        as far as they are now."""
        assert not self.running
        del self.tokens[length:]
        self.computed = min(self.computed, length if computed is None else min(computed, length))
        if self._names is not None:
            self._names.cut(length)

    def start(self, now_s: float) -> None:
        """Mark it as running from now on."""
        self.running = True
        self.last_active_s = now_s

    def stop(self, now_s: float) -> None:
        """Mark it as no longer running: its request ended or was preempted. Its last token stays, and the next request
        computes the KV of that: what a plan in flight has computed of it does not count."""
        self.running = False
        self.last_active_s = now_s
        self.computed = min(self.computed, max(len(self.tokens) - 1, 0))

    def mark_waiting(self, arrival: int) -> None:
        self.waiting = tuple(sorted((*self.waiting, arrival)))

    def unmark_waiting(self, arrival: int) -> None:
        self.waiting = tuple(filter(arrival.__ne__, self.waiting))


class HashChain:
    """Hashes of a session's full blocks, extended as tokens come and cut as they go; each token is hashed once.

    tenant: hashes of two tenants never agree, so that none can tell by a hit what another one has asked.
    """

    def __init__(self, chunk_tokens: int, tenant: str = "") -> None:
        self._size = chunk_tokens
        self._before = hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""
        self.hashes: list[BlockHash] = []

    def upto(self, tokens: TokenArray[int], length: int) -> list[BlockHash]:
        """Return the hashes of the full blocks in [0, length)."""
        while (len(self.hashes) + 1) * self._size <= length:
            start = len(self.hashes) * self._size
            before = self.hashes[-1] if self.hashes else self._before
            block = tokens[start : start + self._size].tobytes()
            self.hashes.append(hashlib.blake2b(before + block, digest_size=16).digest())
        return self.hashes[: length // self._size]

    def cut(self, length: int) -> None:
        del self.hashes[length // self._size :]


def chunks_of(tokens: int, chunk_tokens: int) -> int:
    """How many chunks hold so many tokens; the last one may be partly filled."""
    return -(-tokens // chunk_tokens)


def runs_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Group ascending numbers into half-open runs."""
    listed = list(indices)
    if listed and listed[-1] - listed[0] == len(listed) - 1:
        return [(listed[0], listed[-1] + 1)]
    runs: list[tuple[int, int]] = []
    for index in listed:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def tokens_in(runs: Iterable[Run]) -> int:
    """How many positions the runs have together."""
    total = 0
    for start, stop in runs:
        total += stop - start
    return total


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join neighbouring intervals. runs: ascending."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix, by halving: whole slices compare at memory speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
