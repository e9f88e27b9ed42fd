"""The record of where a chunk's KV is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class View(IntEnum):
    """Which victim index a chunk stands in; derived from its record, kept so that leaving an index needs no search.

    DIRTY: only on GPU, may be copied out. CLEAN: also on CPU, its GPU block may be taken at once. CPU_ONLY: its CPU block
    may be taken, and the KV is then lost. NONE: pinned, under way, or without KV.
    """

    NONE = 0
    DIRTY = 1
    CLEAN = 2
    CPU_ONLY = 3


@dataclass(slots=True)
class Chunk:
    """`chunk_tokens` positions of one conversation, all layers (paper section 4.3.1); the last one may be partly filled.

    Offsets [0, gpu_len) have KV in block `gpu`, offsets [0, cpu_len) in block `cpu`. A position is on GPU if its offset is
    below gpu_len, else on CPU if below cpu_len, else missing; so the missing positions of a chunk are always a suffix.
    pins: running requests that need the chunk (forbids eviction, not copying). copying: open tickets that read or write it.
    A GPU block with gpu_len 0 is reserved: taken at admission, its KV not computed yet.
    """

    gpu: int | None = None
    gpu_len: int = 0
    cpu: int | None = None
    cpu_len: int = 0
    pins: int = 0
    copying: int = 0
    view: View = View.NONE

    @property
    def clean(self) -> bool:
        return self.gpu_len > 0 and self.cpu_len == self.gpu_len and not self.copying

    @property
    def resident_len(self) -> int:
        """Leading offsets that have KV in either tier."""
        return max(self.gpu_len, self.cpu_len)
