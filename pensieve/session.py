"""A conversation: its tokens, how far they were computed, and a record of each chunk's KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from pensieve.ledger import Loss
from pensieve.request import TokenArray


class View(IntEnum):
    """What eviction may do with a chunk; kept in its record so that leaving a victim index needs no search.

    DIRTY: only on GPU; may be copied out. CLEAN: also on CPU; its GPU block may be taken at once. CPU_ONLY: its CPU block
    may be taken, and the KV is then lost. NONE: nothing, since its session runs, a copy of it is under way, or it has no KV.
    """

    NONE = 0
    DIRTY = 1
    CLEAN = 2
    CPU_ONLY = 3


@dataclass(slots=True)
class Chunk:
    """The KV of `chunk_tokens` positions of one conversation, all layers (paper section 4.3.1); the last one may be partly
    filled. cache/tiers.py draws the states and alone changes them.

    Offsets [0, gpu_len) have KV in block `gpu`, offsets [0, cpu_len) in block `cpu`. copying: open tickets that read or
    write it. A GPU block with gpu_len 0 is reserved: taken at admission, its KV not computed yet. lost: why KV of it was last
    given up.
    """

    gpu: int | None = None
    gpu_len: int = 0
    cpu: int | None = None
    cpu_len: int = 0
    copying: int = 0
    view: View = View.NONE
    lost: Loss | None = None

    @property
    def clean(self) -> bool:
        return self.gpu_len > 0 and self.cpu_len == self.gpu_len and not self.copying

    @property
    def resident_len(self) -> int:
        """Leading offsets that have KV in either tier."""
        return max(self.gpu_len, self.cpu_len)


@dataclass(slots=True, eq=False)
class Session:
    """What is known of one conversation. Its methods alone write `tokens`, `computed`, `waiting` and `running`.

    tokens: the whole conversation. computed: KV of positions [0, computed) has been computed for these very tokens, whether
    or not it is still there. number: counts sessions from the first; breaks ties between equally good victims.
    last_active_s: when a request of it last started or ended. next_use_s: when it is asked again, where the schedule knows
    (offline policies only). waiting: its requests that wait, preempted ones included; queued: their places in the order of
    arrival, ascending. running: a request of it runs; at most
    one does. turns: that were asked of it, whatever became of them. chunks: where a cache with chunk records has its KV.
    tenant: it shares no KV with conversations of others.
    """

    name: str
    number: int
    created_s: float
    last_active_s: float
    tokens: TokenArray[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    next_use_s: float | None = None
    waiting: int = 0
    queued: tuple[int, ...] = ()
    running: bool = False
    turns: int = 0
    tenant: str = ""

    def append(self, token: int) -> None:
        """A token was generated."""
        self.tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """A message was asked."""
        self.tokens.extend(tokens)

    def begin_as(self, other: Session, length: int) -> None:
        """It is new, and begins with the first `length` tokens of another one, as far as those were computed."""
        assert not self.tokens
        self.tokens.extend(other.tokens[:length])
        self.computed = min(other.computed, len(self.tokens), max(len(self.tokens) - 1, 0))

    def advance(self, stop: int) -> None:
        """The plan being made computes positions up to `stop`."""
        if stop > self.computed:
            self.computed = stop

    def rollback(self, length: int, computed: int | None = None) -> None:
        """Only the first `length` tokens stand. computed: how far they were computed at the time that is returned to; None:
        as far as they are."""
        assert not self.running
        del self.tokens[length:]
        self.computed = min(self.computed, length if computed is None else min(computed, length))

    def start(self, now_s: float) -> None:
        """A request of it runs from now on."""
        self.running = True
        self.last_active_s = now_s

    def stop(self, now_s: float) -> None:
        """The request ended or was preempted. The last token it has is known, and its KV is for the next one to compute."""
        self.running = False
        self.last_active_s = now_s
        self.computed = min(self.computed, max(len(self.tokens) - 1, 0))

    def mark_waiting(self, arrival: int) -> None:
        self.waiting += 1
        self.queued = tuple(sorted((*self.queued, arrival)))

    def unmark_waiting(self, arrival: int) -> None:
        self.waiting -= 1
        self.queued = tuple(queued for queued in self.queued if queued != arrival)
        assert self.waiting == len(self.queued)


def chunks_of(tokens: int, chunk_tokens: int) -> int:
    """How many chunks hold so many tokens; the last one may be partly filled."""
    return -(-tokens // chunk_tokens)


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
