"""Automatic prefix caching: full blocks shared by content across sessions, least recently used (as vLLM and SGLang)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from pensieve.core.block_hash import BlockHash, HashChain
from pensieve.core.cache.pool import BlockPool
from pensieve.core.facts import Facts, Found
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import TokenArray
from pensieve.core.session import Run, Session, chunks_of
from pensieve.plugins.caches.one_tier import OneTier


class PrefixCache(OneTier):
    """A block is free, in use (references > 0), or idle: no request that runs has it, but its content may hit again.

    A full block that was computed is registered under the hash of all tokens up to its end. A prompt takes the longest
    chain of registered blocks, at most prompt - 1 tokens; the rest is computed into new blocks. Idle blocks are evicted
    least recently used first, and of one request the last block first, since its prefix is of use to more prompts. Only full
    blocks hit: the partly filled one at the end of a turn is lost with it. There is one tier, and the eviction policy of
    the configuration has no say.
    """

    shares = True

    spare_positions = 1
    """Beyond the prompt, that have blocks from the admission on."""

    def __init__(self, *, policy: EvictionPolicy, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int = 0) -> None:
        super().__init__(chunk_tokens, gpu_blocks)
        self.gpu = BlockPool(gpu_blocks)
        self._tables: dict[int, list[int]] = {}  # session number -> blocks, while a request of it runs
        self._computed: dict[int, int] = {}  # session number -> positions with KV in its table
        self._references: dict[int, int] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        return self.gpu.free + len(self._idle)

    @property
    def gpu_blocks_used(self) -> int:
        return self.gpu_blocks - self.gpu.free

    def free_blocks(self) -> tuple[set[int], set[int]]:
        return self.gpu.free_blocks(), set()

    def places(self, session: Session) -> str:
        tokens, size = session.tokens[:], self.chunk_tokens
        full = HashChain(size, session.tenant).upto(tokens, len(tokens))  # its own one the engine may be extending
        found = "".join("G" if name in self._block_of else "-" for name in full)
        return found.ljust(chunks_of(len(tokens), size), "-")

    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        """What other sessions share is not counted: it may only make the admission cheaper."""
        matched = self._match(session, min(keep, len(prompt) - 1))
        idle = sum(block in self._idle for block in matched)
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
                self._register(table[index], hashes[index])

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
        for name in session.named(len(session.tokens), self.chunk_tokens):
            for block in self._blocks_named(name):
                if block in self._idle:
                    del self._idle[block]
                    self._unregister(block)
                    self._free(block)
        super()._give_up(session)

    def _holds(self, session: Session) -> bool:
        """Its blocks are known by content, not by whose they are; while one is here, a limit of memory may ask it to give
        that up."""
        return any(name in self._block_of for name in session.named(len(session.tokens), self.chunk_tokens))

    def check(self) -> None:
        used = set(self._references)
        free, idle = self.gpu.free_blocks(), set(self._idle)
        assert len(free) + len(idle) + len(used) == self.gpu_blocks
        assert not (free & idle or free & used or idle & used)
        counts: dict[int, int] = {}
        for table in self._tables.values():
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._references
        assert idle <= set(self._hash_of)
        assert not free & set(self._hash_of)
        assert self._block_of == {name: block for block, name in self._hash_of.items()}

    # -- how --------------------------------------------------------------------------------------------------------

    def begin(self, *, facts: Facts | None = None, **others: Any) -> None:
        super().begin(facts=facts, **others)
        self.gpu.facts = self.facts

    def _match(self, session: Session, limit: int) -> list[int]:
        """The blocks of the longest registered prefix of at most `limit` tokens."""
        found = []
        for name in session.named(limit, self.chunk_tokens):
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def _occupy(self, session: Session, now_s: float) -> int:
        """Take the longest registered prefix and new blocks for the rest; returns the tokens found."""
        session.start(now_s)
        self.facts.runs(session)
        length = len(session.tokens)
        matched = self._match(session, length - 1)
        for block in matched:
            self._references[block] = self._references.get(block, 0) + 1
            self._idle.pop(block, None)
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
        stranded = frozenset(index for index in behind if names[index] in self._block_of)
        return super()._found(session, tokens)._replace(names=names, stranded=stranded)

    def _take(self, session: Session, count: int) -> list[int]:
        for _ in range(count - self.gpu.free):
            block = self._victim()
            self._evict(block)
            self._free(block)
        blocks = self.gpu.allocate(count, session.number)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _victim(self) -> int:
        return next(iter(self._idle))

    def _free(self, block: int) -> None:
        """Nobody has it, and nothing is known by its content."""
        self.gpu.release((block,))

    def _evict(self, block: int) -> None:
        del self._idle[block]
        self.facts.lost_content(self._hash_of[block])
        self._unregister(block)
        self.counters.evicted_chunks += 1
        self.counters.dropped_chunks += 1

    def _blocks_named(self, name: BlockHash) -> list[int]:
        return [self._block_of[name]] if name in self._block_of else []

    def _register(self, block: int, name: BlockHash) -> None:
        """The block has all of this content. Where another request computed the same at the same time, its block stays the
        one that hits."""
        if name not in self._block_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def _unregister(self, block: int) -> None:
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
