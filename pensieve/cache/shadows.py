"""Pinned chunks whose copy on CPU is a duplicate."""

from __future__ import annotations

from pensieve.cache.chunk import Chunk
from pensieve.cache.session import Session


class Shadows(dict[tuple[int, int], tuple[Session, Chunk]]):
    """By conversation and chunk: their CPU blocks are the first to give up, since nothing is lost by it."""

    def file(self, session: Session, index: int, chunk: Chunk) -> None:
        """Keep or remove a pinned chunk, by its record."""
        if chunk.cpu is not None and not chunk.copying and chunk.gpu_len >= chunk.cpu_len:
            self[session.order, index] = (session, chunk)
        else:
            self.remove(session, index)

    def remove(self, session: Session, index: int) -> None:
        self.pop((session.order, index), None)

    def take(self) -> Chunk:
        """One of them, which is no longer one."""
        return self.pop(next(iter(self)))[1]
