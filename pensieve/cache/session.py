"""A conversation as the cache knows it: its raw tokens, and a chunk record for every 32 of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pensieve.cache.chunk import Chunk
from pensieve.request import TokenArray
from pensieve.units import ceil_div


@dataclass(slots=True, eq=False)
class Session:
    """tokens: the whole conversation. computed: the positions ever computed for these tokens are [0, computed), dropped
    since or not. order: counts conversations from the first, breaks ties. last_active_s: when its last turn ended or was
    admitted. next_use_s: when it returns, where the schedule knows (offline policies only). waiting: requests of it that
    wait or are suspended. running: a request of it is admitted. turns: that were asked of it, whatever became of them.
    """

    name: str
    order: int
    created_s: float
    last_active_s: float
    tokens: TokenArray[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    next_use_s: float | None = None
    waiting: int = 0
    running: bool = False
    turns: int = 0


class Sessions(dict[str, Session]):
    """The conversations that a manager knows, by name."""

    _made = 0

    def open(self, name: str, now_s: float) -> Session:
        """The conversation of that name, made if new."""
        session = self.get(name)
        if session is None:
            session = self[name] = Session(name, self._made, now_s, now_s)
            self._made += 1
        return session


def common_prefix(a: TokenArray[int], b: TokenArray[int]) -> int:
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


def missing_runs(
    session: Session, length: int, chunk_tokens: int, cpu_too: bool = False
) -> tuple[tuple[int, int], ...]:
    """Maximal intervals of [0, length) without KV on GPU (swap-ins of the plan being made count as there); with cpu_too,
    without KV in either tier."""
    runs: list[list[int]] = []
    for index in range(ceil_div(length, chunk_tokens)):
        start = index * chunk_tokens
        stop = min(start + chunk_tokens, length)
        missing = start
        if index < len(session.chunks):
            chunk = session.chunks[index]
            missing += chunk.resident_len if cpu_too else chunk.gpu_len
        if missing >= stop:
            continue
        if runs and runs[-1][1] == missing:
            runs[-1][1] = stop
        else:
            runs.append([missing, stop])
    return tuple((start, stop) for start, stop in runs)
