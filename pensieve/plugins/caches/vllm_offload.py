"""vLLM's prefix caching with its OffloadingConnector: a CPU tier behind the device's blocks, shared by content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from pensieve.core.cache.base import Broken
from pensieve.core.facts import Admission, Facts, Found
from pensieve.core.plan import CPU, GPU, Move, Moved
from pensieve.core.policies.base import EvictionPolicy, as_policy
from pensieve.core.request import TokenArray
from pensieve.core.session import BlockHash, Run, Session, chunks_of
from pensieve.plugins.caches.cpu_tier import Arc, CpuChunk, CpuTier, FromTail, Lru, Use
from pensieve.plugins.caches.prefix import PrefixCache

Order = Literal["lru", "arc", "eviction"]


@dataclass(slots=True)
class _Copy:
    """A move between the tiers that is not over. blocks: of the device. source: blocks that a load reads. chunks: that it
    writes, or keeps from eviction."""

    blocks: tuple[int, ...]
    chunks: Sequence[CpuChunk]
    source: tuple[int, ...] = ()


class VllmOffload(PrefixCache):
    """vLLM 0.32's scheduler (v1/core/block_pool.py, kv_cache_manager.py) with OffloadingConnector
    (distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py) over CPUOffloadingSpec, for full attention.

    A prompt takes the longest prefix that is on the device (at most all but its last token), and then the longest that goes
    on from there in the CPU tier, whole chunks, at least one chunk's tokens, possibly to the prompt's end; the last token is
    computed anew. Full chunks are offered to the CPU tier in the iteration that computes them, those that the device had
    too unless the prompt loads others, and are copied beside the next one: until that is done they are neither found nor
    evicted. A chunk stays in the CPU tier when it is loaded, and on the device when it is stored. Equal blocks that were
    computed twice are kept twice.

    order: which chunk leaves the CPU tier: lru or arc, as vLLM's own, or `eviction`: by the eviction policy of the
    configuration, the last chunk of a conversation first. blocks_per_chunk: vLLM's of the same name. offload_prompt_only:
    chunks that hold generated tokens are not stored.

    Not as in vLLM: a block whose store is under way is not evicted, where vLLM waits for the store.
    """

    spare_positions = 0
    keeps_twins = True
    stores = True

    def __init__(
        self,
        *,
        policy: EvictionPolicy,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        order: Order = "lru",
        blocks_per_chunk: Annotated[int, Field(ge=1)] = 1,
        offload_prompt_only: bool = True,
    ) -> None:
        super().__init__(policy=policy, chunk_tokens=chunk_tokens, gpu_blocks=gpu_blocks)
        slots = cpu_blocks // blocks_per_chunk
        self.cpu_blocks = slots * blocks_per_chunk
        self._policy = as_policy(policy) if order == "eviction" else None
        kept = Lru() if order == "lru" else Arc(slots)
        self.cpu = CpuTier(slots, blocks_per_chunk, FromTail(self._policy, blocks_per_chunk) if self._policy else kept)
        self._prompt_only = offload_prompt_only
        self.stores_replies = not offload_prompt_only
        self._uses: dict[int, Use] = {}  # session number -> of its request, from its admission to its end
        self._copies: dict[int, _Copy] = {}  # by ticket
        self._loads: list[Move] = []
        self._decided: list[Move] = []  # of what this plan computes: the next one copies it
        self._due: list[Move] = []
        self._loading: dict[int, int] = {}  # session number -> ticket of what its admission loads
        self._tickets = 0
        self._now_s = 0.0

    def begin(self, *, facts: Facts | None = None, **others: Any) -> None:
        super().begin(facts=facts, **others)
        self.cpu.facts = self.facts

    # -- query --------------------------------------------------------------------------------------------------------

    @property
    def cpu_blocks_used(self) -> int:
        return self.cpu.used * self.cpu.blocks_per_chunk

    def storing(self, prefilling: bool) -> bool:
        if not self.cpu.slots:
            return False
        return prefilling or bool(self._due or self._decided) or any(use.refused for use in self._uses.values())

    def free_blocks(self) -> tuple[set[int], set[int]]:
        read = (block for copy in self._copies.values() for block in copy.source)
        return self.gpu.free_blocks(), self.cpu.free_blocks().difference(read)

    def _is_below(self, names: Sequence[BlockHash], index: int) -> bool:
        last = (index // self.cpu.blocks_per_chunk + 1) * self.cpu.blocks_per_chunk - 1
        return last < len(names) and self.cpu.get(names[last]) is not None

    # -- a request ----------------------------------------------------------------------------------------------------

    def admit(self, session: Session, keep: int, suffix: TokenArray[int] | None, now_s: float) -> Admission:
        self._now_s = now_s
        if suffix is not None:
            if keep < len(session.tokens):
                self.truncate(session, keep)
            session.extend(suffix)
            self._uses[session.number] = Use(len(session.tokens))
            if self._policy is not None:
                self._tell(self._policy.observe, session, now_s)
        length = len(session.tokens)
        on_gpu = self._occupy(session, now_s)
        self.cpu.order.changed(session)
        stop = self._load(session, on_gpu)
        found = None if suffix is None else self._found(session, stop)
        if found is not None and stop > on_gpu:
            on_cpu = ((on_gpu, min(stop, length - 1)),)
            found = found._replace(gpu=((0, on_gpu),) if on_gpu else (), cpu=on_cpu)
        computed = self._computed[session.number] = min(stop, length - 1)
        return Admission(
            ((computed, length),),
            self._table(session),
            found,
            loading=(stop - on_gpu) // self.chunk_tokens,
            loaded_tokens=computed - on_gpu if stop > on_gpu else 0,
            read_ticket=self._loading.get(session.number),
        )

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        self._now_s = now_s
        return super().extend(session, length, now_s)

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        super().advance(session, runs)
        self._stop_loading(session)
        self._decided += self._store(session)

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        self._now_s = now_s
        self._stop_loading(session)
        if finished and session.running:
            self._due += self._store(session)
        super().release(session, now_s, finished)
        use = self._uses.pop(session.number, None) if finished else None
        if use is not None:
            if self._policy is not None:
                self._tell(self._policy.rest, session, now_s)
            self.cpu.order.used(session, use)
        self.cpu.order.changed(session)

    def _tell(self, hear: Callable[[Session, float], None] | None, session: Session, now_s: float) -> None:
        """Have the policy hear of a turn. To a policy inside vLLM a conversation is as long as its full chunks."""
        if hear is None:
            return
        tokens, size = session.tokens, self.chunk_tokens * self.cpu.blocks_per_chunk
        session.tokens = cast("TokenArray[int]", range(len(tokens) // size * size))
        try:
            hear(session, now_s)
        finally:
            session.tokens = tokens

    def reorder(self, session: Session) -> None:
        self.cpu.order.changed(session)

    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        runs = list(written)
        super().invalidate(session, runs)
        size = self.chunk_tokens * self.cpu.blocks_per_chunk
        names = self._chunk_names(session, len(session.tokens))
        for start, stop in runs:
            for own in names[start // size : chunks_of(stop, size)]:
                if own[-1] in self.cpu:
                    self.cpu.remove(own[-1])

    # -- copies -------------------------------------------------------------------------------------------------------

    def take_moves(self) -> tuple[Move, ...]:
        moves = (*self._due, *self._loads)
        self._due, self._decided, self._loads = self._decided, [], []
        self.counters.swapped_out_blocks += sum(len(move.src) for move in moves if move.source == GPU)
        self.counters.swapped_in_blocks += sum(len(move.src) for move in moves if move.source == CPU)
        return moves

    def finish(self, moved: Sequence[Moved]) -> Broken:
        broken: list[Session] = []
        for one in moved:
            copy = self._copies.pop(one.ticket)
            for block in copy.blocks:
                self._busy[block] -= 1
                if not self._busy[block]:
                    del self._busy[block]
                    if block in self._stuck:
                        self._stuck.remove(block)
                        self.gpu.release((block,))
            for chunk in copy.chunks:
                if copy.source:
                    self.cpu.loaded(chunk)
                else:
                    self.cpu.stored(chunk, one.ok)
            if copy.source and not one.ok:
                broken += self._lost(copy.blocks)
        return Broken(copied=tuple(broken))

    def check(self) -> None:
        super().check()
        assert self._busy == Counter(block for copy in self._copies.values() for block in copy.blocks)
        stores = [chunk.slot for copy in self._copies.values() if not copy.source for chunk in copy.chunks]
        loads = Counter(chunk.slot for copy in self._copies.values() if copy.source for chunk in copy.chunks)
        assert len(set(stores)) == len(stores)
        self.cpu.check(stores, loads)
        assert set(self._tables) <= set(self._uses)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _chunk_names(self, session: Session, length: int) -> list[list[BlockHash]]:
        """The names of the blocks of each full chunk in [0, length)."""
        per = self.cpu.blocks_per_chunk
        names = session.named(length, self.chunk_tokens)
        return [names[first : first + per] for first in range(0, len(names) - per + 1, per)]

    def _load(self, session: Session, on_gpu: int) -> int:
        """Start to load what goes on from there in the CPU tier; returns how many leading tokens are found in both tiers."""
        size, per = self.chunk_tokens, self.cpu.blocks_per_chunk
        first = on_gpu // (size * per)
        chunks: list[CpuChunk] = []
        for own in self._chunk_names(session, len(session.tokens))[first:]:
            if (chunk := self.cpu.get(own[-1])) is None:
                break
            chunks.append(chunk)
        stop = (first + len(chunks)) * size * per
        if stop - on_gpu < size * per:
            return on_gpu
        start, end = on_gpu // size, stop // size
        source = [block for chunk in chunks for block in self.cpu.blocks(chunk)][start - first * per :]
        table, use = self._tables[session.number], self._uses[session.number]
        target = tuple(table[start:end])
        ticket = self._ticket(_Copy(target, chunks, tuple(source)))
        self._loads.append(Move(ticket, CPU, GPU, tuple(source), target, urgent=True))
        self._loading[session.number] = ticket
        self.facts.awaited(ticket, session)
        self.cpu.load(session, use, first, chunks)
        use.following, use.refused = first + len(chunks), False
        for index, name in enumerate(session.named(stop, size)[start:end], start):
            self._register(table[index], name, session)
        return stop

    def _stop_loading(self, session: Session) -> None:
        """vLLM computes nothing of a request before its load is done, and then the chunks may be evicted, for its own stores
        too. Where nothing else is to be computed, the load is of the same plan here; what is stored in their place is of a
        later one, after the load."""
        copy = self._copies.get(self._loading.pop(session.number, 0))
        if copy is not None:
            for chunk in copy.chunks:
                self.cpu.loaded(chunk)
            copy.chunks = ()

    def _store(self, session: Session) -> list[Move]:
        """Offer the full chunks that were computed since the last call; returns the copies of those that have room."""
        use, size, per = self._uses[session.number], self.chunk_tokens, self.cpu.blocks_per_chunk
        length = min(self._computed[session.number], use.prompt if self._prompt_only else len(session.tokens))
        if not self.cpu.slots or length // (size * per) <= use.following:
            return []
        names = self._chunk_names(session, length)
        table = self._tables[session.number]
        for index, own in enumerate(names[use.following :], use.following):
            if any(self._hash_of.get(table[index * per + i]) != name for i, name in enumerate(own)):
                del names[index:]  # its step failed
                break
        made = self.cpu.offer(session, use, names[use.following :], self._now_s)
        use.refused = made is None
        if made is None:
            return []
        use.following = max(use.following, len(names))
        storing, evicted = made
        for chunk in evicted:
            for name in chunk.names:
                self._lose(name)
        if not storing:
            return []
        blocks = tuple(table[index * per + i] for index, _ in storing for i in range(per))
        chunks = [chunk for _, chunk in storing]
        ticket = self._ticket(_Copy(blocks, chunks))
        return [Move(ticket, GPU, CPU, blocks, tuple(block for chunk in chunks for block in self.cpu.blocks(chunk)))]

    def _ticket(self, copy: _Copy) -> int:
        self._tickets += 1
        self._copies[self._tickets] = copy
        self._busy.update(copy.blocks)
        return self._tickets

    def _lost(self, blocks: Sequence[int]) -> list[Session]:
        """A load failed: nobody shall find what it should have brought. Returns the sessions that run on it."""
        for block in blocks:
            self._unregister(block)
            if block in self._idle:
                del self._idle[block]
                self._free(block)
        failed = set(blocks)
        return [one for one in self.sessions.values() if not failed.isdisjoint(self._tables.get(one.number, ()))]

    def _give_up(self, session: Session) -> None:
        for own in self._chunk_names(session, len(session.tokens)):
            self.cpu.forget(own[-1], session)
        super()._give_up(session)

    def _found(self, session: Session, tokens: int) -> Found:
        found = super()._found(session, tokens)
        assert found.names is not None
        behind = range(tokens // self.chunk_tokens, len(found.names))
        there = found.stranded.union(index for index in behind if self.cpu.has_block(found.names[index]))
        return found._replace(stranded=there)

    def _holds(self, session: Session) -> bool:
        return super()._holds(session) or any(
            own[-1] in self.cpu for own in self._chunk_names(session, len(session.tokens))
        )

    def _lose(self, name: BlockHash) -> None:
        if not self.cpu.has_block(name):
            super()._lose(name)
