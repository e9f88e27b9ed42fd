"""llama-server's accounting: a few contiguous slots, each with the KV of one prompt, over the same blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import TokenArray, tokens_of
from pensieve.core.session import Run, Session, chunks_of, common_prefix
from pensieve.errors import CapacityError
from pensieve.plugins.caches.prefix import OneTier

MOST_SLOTS = 4  # that are chosen where nobody says how many
SIMILARITY = 0.1  # llama-server's --slot-prompt-similarity, by default


@dataclass(slots=True)
class Slot:
    """cells: positions it can hold. tokens: those whose KV it holds, from position 0. used_s: when its last turn ended; minus
    infinity before its first. tenant: who asked for these tokens; nobody else finds them.
    last: whose they are: the session that ran in it last, or runs."""

    number: int
    blocks: tuple[int, ...]
    tokens: TokenArray[int] = field(default_factory=lambda: tokens_of([]))
    used_s: float = -math.inf
    session: Session | None = None
    tenant: str = ""
    last: Session | None = None


class SlotCache(OneTier):
    """n_slots slots of n_ctx / n_slots cells each (llama-server's --parallel and --ctx-size).

    A request takes the idle slot whose tokens share the longest prefix with its prompt, where that is more than SIMILARITY of
    the prompt, else the least recently used one: `get_available_slot` in llama.cpp's tools/server/server-context.cpp. In
    either, KV up to the first difference is kept and the rest is overwritten; nothing is shared between slots, and a request
    longer than a slot can never be served. llama-server's copies of slots in host memory (--cache-ram) are left out. The
    eviction policy of the configuration has no say.

    n_slots None: llama-server leaves the number to whoever starts it, who would see to it that a conversation fits; so it is
    the largest up to MOST_SLOTS whose slots hold `longest_tokens` (None: not known) with a chunk to spare.
    """

    grows = False

    def __init__(
        self,
        *,
        policy: EvictionPolicy,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        n_slots: int | None = None,
        longest_tokens: int | None = None,
    ) -> None:
        if n_slots is None:
            each = chunks_of((longest_tokens or 0) + chunk_tokens, chunk_tokens)
            n_slots = max(1, min(MOST_SLOTS, gpu_blocks // each))
        if n_slots < 1 or gpu_blocks < n_slots:
            raise CapacityError(
                f"{n_slots} slots do not fit in {gpu_blocks} blocks of {chunk_tokens} tokens; "
                "lower baseline.cache.n_slots or raise cache.gpu."
            )
        each = gpu_blocks // n_slots
        super().__init__(chunk_tokens, gpu_blocks=each * n_slots)
        self.request_blocks = each
        self.slots = [Slot(number, tuple(range(number * each, (number + 1) * each))) for number in range(n_slots)]
        self._slot_of: dict[int, Slot] = {}

    @property
    def chosen(self) -> dict[str, float]:
        return {"n_slots": len(self.slots), "slot_tokens": self.request_blocks * self.chunk_tokens}

    @property
    def available(self) -> int:
        return sum(slot.session is None for slot in self.slots) * self.request_blocks

    @property
    def gpu_blocks_used(self) -> int:
        return sum(
            len(slot.blocks) if slot.session is not None else chunks_of(len(slot.tokens), self.chunk_tokens)
            for slot in self.slots
        )

    def places(self, session: Session) -> str:
        found = max((_shared(slot, session) for slot in self.slots), default=0)
        chunks = chunks_of(len(session.tokens), self.chunk_tokens)
        return ("G" * chunks_of(found, self.chunk_tokens)).ljust(chunks, "-")

    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        return self.request_blocks - self.available

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        return self.request_blocks, ()  # a slot has all its cells from the start

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        slot = self._slot_of[session.number]
        for start, stop in runs:
            assert start == len(slot.tokens), "KV is computed in ascending order"
            slot.tokens.extend(session.tokens[start:stop])
            session.advance(stop)

    def _vacate(self, session: Session, now_s: float) -> None:
        self.facts.not_lost(session, 0, chunks_of(len(session.tokens), self.chunk_tokens))
        slot = self._slot_of.pop(session.number)
        slot.session, slot.used_s = None, now_s

    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        slot = self._slot_of[session.number]
        del slot.tokens[min((start for start, _ in written), default=len(slot.tokens)) :]

    def _give_up(self, session: Session) -> None:
        for slot in self.slots:
            if slot.last is session:
                self.slots[slot.number] = Slot(slot.number, slot.blocks)
                self.facts.freed("gpu", slot.blocks)
        super()._give_up(session)

    def _holds(self, session: Session) -> bool:
        return any(slot.last is session for slot in self.slots)

    def check(self) -> None:
        for slot in self.slots:
            assert len(slot.tokens) <= len(slot.blocks) * self.chunk_tokens
            if slot.session is not None:
                assert self._slot_of[slot.session.number] is slot
                assert slot.tokens == slot.session.tokens[: len(slot.tokens)]
        assert len(self._slot_of) == sum(slot.session is not None for slot in self.slots)

    # -- how --------------------------------------------------------------------------------------------------------

    def _occupy(self, session: Session, now_s: float) -> int:
        slot, size = self._choose(session), self.chunk_tokens
        found = min(_shared(slot, session), len(session.tokens) - 1)
        overwritten = chunks_of(len(slot.tokens), size) - chunks_of(found, size)
        del slot.tokens[found:]
        if overwritten and slot.last is not None and slot.last is not session:
            self.counters.evicted_chunks += overwritten
            self.counters.dropped_chunks += overwritten
            self.facts.lost(slot.last, 0, chunks_of(len(slot.last.tokens), size))
        told = self.facts.held if slot.last is None else self.facts.passed_on
        told("gpu", slot.blocks, session.number)
        slot.session = slot.last = session
        slot.tenant = session.tenant
        self._slot_of[session.number] = slot
        session.start(now_s)
        self.facts.runs(session)
        return found

    def _table(self, session: Session) -> tuple[int, ...]:
        return self._slot_of[session.number].blocks

    def _choose(self, session: Session) -> Slot:
        idle = [slot for slot in self.slots if slot.session is None]
        nearest = max(idle, key=lambda slot: (_shared(slot, session), -slot.number))
        if _shared(nearest, session) / len(session.tokens) > SIMILARITY:
            return nearest
        return min(idle, key=lambda slot: (slot.used_s, slot.number))


def _shared(slot: Slot, session: Session) -> int:
    """Leading tokens of the session whose KV the slot holds."""
    return common_prefix(slot.tokens, session.tokens) if slot.tenant == session.tenant else 0
