"""Automatic prefix caching: full blocks shared by content across sessions, least recently used (as vLLM and SGLang)."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from pensieve.core.cache.base import CacheManager, Room
from pensieve.core.cache.blocks import BlockPool
from pensieve.core.facts import Admission, Facts, Found
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import TokenArray
from pensieve.core.session import BlockHash, HashChain, Run, Session, chunks_of


class OneTier(CacheManager, Room):
    """What managers with a single tier have in common: nothing is ever copied, and a prompt finds a prefix or nothing. A
    subclass says what a prompt finds (`_occupy`), and what becomes of it afterwards."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks=0)
        self.room = self

    @abstractmethod
    def _occupy(self, session: Session, now_s: float) -> int:
        """Start the session and take blocks for all of its tokens and one more; returns how many leading tokens have KV there
        already."""

    @abstractmethod
    def _table(self, session: Session) -> tuple[int, ...]:
        """The blocks of a session that runs."""

    def _found(self, session: Session, tokens: int) -> Found:
        """What its admission has found, where that is so many leading tokens."""
        return Found(gpu=((0, tokens),) if tokens else (), shared=True)

    @abstractmethod
    def _vacate(self, session: Session, now_s: float) -> None:
        """Its request has stopped: others may have its blocks."""

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        if session.running:
            session.stop(now_s)
            self.facts.rests(session)
            self._vacate(session, now_s)

    def admit(self, session: Session, keep: int, suffix: TokenArray[int] | None, now_s: float) -> Admission:
        if suffix is not None:
            if keep < len(session.tokens):
                self.truncate(session, keep)
            session.extend(suffix)
        tokens = self._occupy(session, now_s)
        found = None if suffix is None else self._found(session, tokens)
        return Admission(((tokens, len(session.tokens)),), self._table(session), found)


class PrefixCache(OneTier):
    """A block is free, in use (references > 0), or idle: no request that runs has it, but its content may hit again.
    Where a subclass copies blocks to another tier, one whose copy is not over is busy, and is not evicted yet.

    A full block that was computed is registered under the hash of all tokens up to its end. A prompt takes the longest
    chain of registered blocks, at most prompt - 1 tokens; the rest is computed into new blocks. Idle blocks are evicted
    least recently used first, and of one request the last block first, since its prefix is of use to more prompts. Only full
    blocks hit: the partly filled one at the end of a turn is lost with it. There is one tier, and the eviction policy of
    the configuration has no say.
    """

    shares = True

    spare_positions = 1
    """Beyond the prompt, that have blocks from the admission on."""

    keeps_twins = False
    """Equal blocks that were computed twice are both kept, and the earlier one hits; else the earlier one alone."""

    def __init__(self, *, policy: EvictionPolicy, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int = 0) -> None:
        super().__init__(chunk_tokens, gpu_blocks)
        self.gpu = BlockPool(gpu_blocks)
        self._tables: dict[int, list[int]] = {}  # session number -> blocks, while a request of it runs
        self._computed: dict[int, int] = {}  # session number -> positions with KV in its table
        self._references: dict[int, int] = {}
        self._blocks_of: dict[BlockHash, list[int]] = {}  # of one name, the one that hits in front
        self._hash_of: dict[int, BlockHash] = {}
        self._users: dict[int, set[int]] = {}  # of blocks that have a name: sessions that ran with it
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._busy: Counter[int] = Counter()  # blocks -> copies that are not over
        self._stuck: set[int] = set()  # nobody's, and free once their copies are over

    @property
    def available(self) -> int:
        return self.gpu.free + len(self._idle) - self.outgoing

    @property
    def outgoing(self) -> int:
        return sum([block in self._idle for block in self._busy])

    @property
    def gpu_blocks_used(self) -> int:
        return self.gpu_blocks - self.gpu.free

    def free_blocks(self) -> tuple[set[int], set[int]]:
        return self.gpu.free_blocks(), set()

    def places(self, session: Session) -> str:
        tokens, size = session.tokens[:], self.chunk_tokens
        full = HashChain(size, session.tenant).upto(tokens, len(tokens))  # its own one the engine may be extending
        letters = {(True, True): "B", (True, False): "G", (False, True): "C", (False, False): "-"}
        found = (letters[name in self._blocks_of, self._is_below(full, index)] for index, name in enumerate(full))
        return "".join(found).ljust(chunks_of(len(tokens), size), "-")

    def _is_below(self, names: Sequence[BlockHash], index: int) -> bool:
        """A tier below has full block `index` of a prompt with these."""
        return False

    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        """What other sessions share is not counted: it may only make the admission cheaper."""
        matched = self._match(session, min(keep, len(prompt) - 1))
        idle = sum([block in self._idle and block not in self._busy for block in matched])
        return chunks_of(len(prompt) + 1, self.chunk_tokens) - len(matched) + idle - self.available

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        table = self._tables[session.number]
        first = len(table)
        count = chunks_of(length, self.chunk_tokens) - first
        if count <= 0:
            return first, ()
        if count > self.available:
            return None
        table.extend(self._take(session, count))
        return first, tuple(table[first:])

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        size, table = self.chunk_tokens, self._tables[session.number]
        for start, stop in runs:
            assert start == self._computed[session.number], "KV is computed in ascending order"
            self._computed[session.number] = stop
            session.advance(stop)
            hashes = session.named(stop, size)
            for index in range(start // size, stop // size):
                self._register(table[index], hashes[index], session)

    def _vacate(self, session: Session, now_s: float) -> None:
        for block in reversed(self._tables.pop(session.number)):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free(block)
        del self._computed[session.number]

    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        size, table = self.chunk_tokens, self._tables[session.number]
        for start, stop in written:
            for block in table[start // size : chunks_of(stop, size)]:
                self._unregister(block)

    def _give_up(self, session: Session) -> None:
        """What other conversations have used stays theirs."""
        for name in session.named(len(session.tokens), self.chunk_tokens):
            for block in list(self._blocks_of.get(name, ())):
                users = self._users[block]
                users.discard(session.number)
                if not users and block in self._idle:
                    del self._idle[block]
                    self._unregister(block)
                    self._free(block)
        super()._give_up(session)

    def _holds(self, session: Session) -> bool:
        """Its blocks are known by content, not by whose they are; while one is here, a limit of memory may ask it to give
        that up."""
        return any(name in self._blocks_of for name in session.named(len(session.tokens), self.chunk_tokens))

    def check(self) -> None:
        used, idle, free = set(self._references), set(self._idle), self.gpu.free_blocks()
        assert sorted((*used, *idle, *free, *self._stuck)) == list(range(self.gpu_blocks))
        assert self._references == Counter(block for table in self._tables.values() for block in table)
        assert idle <= set(self._hash_of) <= used | idle and self._users.keys() == self._hash_of.keys()
        assert self._stuck <= set(self._busy) and not free & set(self._busy)
        assert sorted(self._hash_of) == sorted(block for blocks in self._blocks_of.values() for block in blocks)
        for name, blocks in self._blocks_of.items():
            assert {self._hash_of[block] for block in blocks} == {name} and (self.keeps_twins or len(blocks) == 1)

    # -- how --------------------------------------------------------------------------------------------------------

    def begin(self, *, facts: Facts | None = None, **others: Any) -> None:
        super().begin(facts=facts, **others)
        self.gpu.facts = self.facts

    def _match(self, session: Session, limit: int) -> list[int]:
        """The blocks of the longest registered prefix of at most `limit` tokens."""
        known = (self._blocks_of.get(name, []) for name in session.named(limit, self.chunk_tokens))
        return [blocks[0] for blocks in takewhile(len, known)]

    def _occupy(self, session: Session, now_s: float) -> int:
        session.start(now_s)
        self.facts.runs(session)
        length = len(session.tokens)
        matched = self._match(session, length - 1)
        for block in matched:
            self._references[block] = self._references.get(block, 0) + 1
            self._idle.pop(block, None)
            self._users[block].add(session.number)
        if matched:
            self.facts.passed_on("gpu", matched, session.number)
        fresh = self._take(session, chunks_of(length + self.spare_positions, self.chunk_tokens) - len(matched))
        self._tables[session.number] = [*matched, *fresh]
        found = len(matched) * self.chunk_tokens
        self._computed[session.number] = found
        return found

    def _table(self, session: Session) -> tuple[int, ...]:
        return tuple(self._tables[session.number])

    def _found(self, session: Session, tokens: int) -> Found:
        names = session.named(len(session.tokens), self.chunk_tokens)
        behind = range(tokens // self.chunk_tokens, len(names))
        stranded = frozenset(index for index in behind if names[index] in self._blocks_of)
        return super()._found(session, tokens)._replace(names=names, stranded=stranded)

    def _take(self, session: Session, count: int) -> Sequence[int]:
        for _ in range(count - self.gpu.free):
            block = next(block for block in self._idle if block not in self._busy)
            self._evict(block)
            self._free(block)
        blocks = self.gpu.allocate(count, session.number)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _free(self, block: int) -> None:
        """Nobody has it, and nothing is known by its content."""
        if block in self._busy:
            self._stuck.add(block)
        else:
            self.gpu.release((block,))

    def _evict(self, block: int) -> None:
        del self._idle[block]
        name = self._hash_of[block]
        self._unregister(block)
        self.counters.evicted_chunks += 1
        self._lose(name)

    def _lose(self, name: BlockHash) -> None:
        """A copy of this content is gone; it may have been the last one in memory."""
        if name not in self._blocks_of:
            self.facts.lost_content(name)
            self.counters.dropped_chunks += 1

    def _register(self, block: int, name: BlockHash, session: Session) -> None:
        """The block has all of this content."""
        if block not in self._hash_of and (self.keeps_twins or name not in self._blocks_of):
            self._blocks_of.setdefault(name, []).append(block)
            self._hash_of[block] = name
            self._users[block] = {session.number}

    def _unregister(self, block: int) -> None:
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._users[block]
            self._blocks_of[name].remove(block)
            if not self._blocks_of[name]:
                del self._blocks_of[name]
