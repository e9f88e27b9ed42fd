"""Where a chunk that leaves the GPU finds its CPU block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pensieve.cache.session import Session

if TYPE_CHECKING:
    from pensieve.cache.two_tier import TwoTierCache


class CpuRoom:
    """CPU blocks for one round of copies: free ones, then duplicates, then the policy's victims."""

    def __init__(self, cache: TwoTierCache, now_s: float) -> None:
        self._cache = cache
        self._now_s = now_s
        self._victims = cache.cpu_only.victims(now_s)
        self._victim: tuple[Session, int] | None = None

    def block(self, session: Session, chunk: int) -> int | None:
        """A CPU block for this chunk, which leaves the GPU. None where every CPU block holds what the policy would keep
        longer than this chunk: then it is this chunk that should be lost."""
        cache = self._cache
        if not cache.cpu.free and cache.shadows:
            cache.free_cpu(cache.shadows.take())
        if not cache.cpu.free:
            self._victim = self._victim or next(self._victims, None)
            if self._victim is None:
                return None
            rank = cache.cpu_only.rank
            if rank(session, chunk, self._now_s) < rank(*self._victim, self._now_s):
                return None
            cache.drop_cpu(*self._victim)
            self._victim = None
        if not cache.cpu.free:
            return None
        return cache.cpu.allocate_after(session.chunks[chunk - 1].cpu if chunk else None)
